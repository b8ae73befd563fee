"""Race lmkit against others on one text: the same minutes of training in turns, one evaluator, loss over minutes.

    python tests/acceptance/race.py TRAIN.txt VALID.txt --out DIR --rival nanochat=CHECKOUT --minutes 1.5 --depth 8 \\
        --seeds 0,1,2

Documents of the texts end with `<|endoftext|>`. A rival is a checkout, whose own commands run unchanged in a Python
that has its requirements (`--rival-python`). Each side trains a tokenizer on the training text; the vocabularies are
of one size, that of lmkit's recipe. DIR gets `race.json` (all rows), `race.png` and a log of every command; the same
command with other `--seeds` or another rival adds rows, and repeats failed ones.

- *Minutes* are those of optimizer steps behind the first step. Start-up, the first step (which compiles), evaluations
  and saving come on top, and `first_step_s` and `wall_s` report them. A short run of each side, which also fills the
  caches of compilers, measures the seconds that lmkit's clock has to allow beyond the minutes, and the number of
  iterations that nanochat, which has no clock, is told to make.
- *Bits per byte* judge the weights at the end, on each held-out document by itself: the nats of its tokens, given its
  beginning and the earlier tokens in the model's context, over the bytes of the documents. `same_windows` compares
  the evaluator with nanochat's own on windows that both can read.
- The curves in the picture are the evaluations that each side makes while it trains, each in its own way: they do not
  compare sides. nanochat's validation reads the first tokens of documents, since it crops those that do not fit.
- nanochat has no option for a seed. Seed 0 is nanochat as it is; `race_in_nanochat.py` says what another seed moves.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment, device_name
from lmkit.measure.plots import decorate, loss_curve
from lmkit.measure.tables import Column, finite, grouped, terminal_table
from lmkit.recipe.load import load_recipe
from lmkit.recipe.recipe import Recipe
from lmkit.storage.atomic import write_atomic

INSIDE_NANOCHAT = Path(__file__).with_name("race_in_nanochat.py").resolve()
WARM_STEPS = 30
UNMEASURED = 10
"""Steps at the beginning of nanochat's short run that do not count; nanochat's own average leaves out as many."""
ENOUGH_STEPS = 1_000_000
TABLES = ("tokenizer", "data", "model", "optimizer", "train")  # of lmkit's recipe, kept in race.json
COLUMNS = (
    *(Column("side", "side"), Column("seed", "seed"), Column("bits_per_byte", "bits/byte", ".4f", "status")),
    *(Column("training_min", "minutes", ".3f"), Column("steps", "steps", ",d")),
    *(
        Column("tokens", "tokens", ",d"),
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("epochs", "epochs", ".2f"),
    ),
    *(Column("first_step_s", "to 1st step s", ".1f"), Column("wall_s", "wall s", ".1f")),
)
SUMMARY = (
    *(Column("side", "side"), Column("rows", "runs", "d"), Column("failed", "failed", "d")),
    *(Column(f"bits_per_byte_{of}", f"bits/byte {of}", ".4f") for of in ("median", "lowest", "highest")),
    *(Column("tokens_per_s", "tokens/s", ",.0f"), Column("training_min", "minutes", ".3f")),
    Column("first_step_s", "to 1st step s", ".1f"),
)

Row = dict[str, Any]
Points = list[tuple[float, float]]


class Failed(Exception):
    """A side cannot do its part; the message is one line."""


@dataclass(frozen=True)
class Ended:
    """What a command printed, how long it ran, and after how many seconds its first step had ended."""

    lines: list[str]
    wall_s: float
    first_step_s: float | None


def watch(
    command: Sequence[str | Path],
    *,
    log: Path,
    folder: Path | None = None,
    first_step: str = r"(?!)",
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command and keep its output in `log`; its first step has ended when a line matches `first_step`.

    Raises:
        Failed: it cannot start or does not end with 0; with its last line, or lmkit's line of error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines, seen, began = [], None, time.perf_counter()
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    with open(log, "w", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(
                list(map(str, command)), cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise Failed(str(error)) from error
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                lines.append(line.rstrip("\n"))
                if seen is None and re.match(first_step, line):
                    seen = time.perf_counter() - began
    if process.returncode:
        said = [line for line in lines if line.strip()] or [f"exit code {process.returncode}, and no word"]
        errors = [line for line in said if line.startswith("error[")]
        raise Failed((errors or said)[-1].strip())
    return Ended(lines, time.perf_counter() - began, seen)


@dataclass(frozen=True)
class Course:
    """What is the same for all sides."""

    train: Path
    valid: Path
    out: Path
    minutes: float
    depth: int
    device: str
    points: int
    """Evaluations while a side trains."""


class Side(ABC):
    """One side of the race. `prepared` keeps what `prepare` measured, JSON types only."""

    name: str
    first_step: str

    def __init__(self, course: Course) -> None:
        self.course, self.folder = course, course.out / self.name
        self.prepared: dict[str, Any] = {}

    def log(self, what: str) -> Path:
        return self.folder / "logs" / f"{what}.log"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what decides the side's results, apart from the seed."""

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Make the data and measure what a training needs to know."""

    @abstractmethod
    def run(self, seed: int) -> Row:
        """Train with a seed, and judge."""


# lmkit


def seconds_of(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return step -> seconds of training behind the first step, without evaluations, from lmkit's metrics."""
    steps, seconds, tokens = {}, 0.0, None
    for record in records:
        if record["kind"] == "train":
            if tokens is not None:
                seconds += (record["tokens"] - tokens) / record["tokens_per_second"]
            steps[record["step"]], tokens = seconds, record["tokens"]
    return steps


def lengths_of(records: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the seconds of a step, and of an evaluation, in each interval between two lines of training."""
    steps: list[float] = []
    evaluations: list[float] = []
    before, evaluated = None, False
    for record in records:
        if record["kind"] == "train":
            if before is not None:
                stepping = (record["tokens"] - before["tokens"]) / record["tokens_per_second"]
                steps.append(stepping / (record["step"] - before["step"]))
                if evaluated:
                    evaluations.append(max(0.0, record["seconds"] - before["seconds"] - stepping))
            before, evaluated = record, False
        evaluated |= record["kind"] == "valid"
    return steps, evaluations


def between(known: Mapping[int, float], step: int) -> float:
    """Return the seconds of a step between two known ones; steps are equally long."""
    if step in known:
        return known[step]
    below = max((it for it in known if it < step), default=min(known))
    above = min((it for it in known if it > step), default=below)
    if above == below:
        return known[below]
    return known[below] + (known[above] - known[below]) * (step - below) / (above - below)


class Lmkit(Side):
    """This checkout's `python -m lmkit`, with the recipe that the command line names.

    The recipe gets `model.depth` unless it describes a model of so many layers already.
    """

    name = "lmkit"
    first_step = r"step 1/"

    def __init__(self, course: Course, recipe: str, changes: Sequence[str]) -> None:
        super().__init__(course)
        self._source, self._changes = recipe, list(changes)
        recipe_as_it_is = load_recipe(recipe, self._changes)
        if recipe_as_it_is.model is None or recipe_as_it_is.model.num_layers != course.depth:
            self._changes.insert(0, f"model.depth={course.depth}")
        self._changes.insert(0, f"train.steps={ENOUGH_STEPS}")  # the clock ends a run
        texts = {"train": [str(course.train)], "valid": [str(course.valid)]}
        self._changes += [
            'corpus.source="files"',
            *(f"corpus.{key}={json.dumps(it)}" for key, it in texts.items()),
        ]
        self._changes += [f"run.folder={json.dumps(str(self.folder))}", f'run.device="{course.device}"']
        self._changes += ["checkpoint.interval=0", "checkpoint.minutes=0"]  # saves at the end only
        self.recipe: Recipe = load_recipe(recipe, [*self._changes, f"train.max_minutes={course.minutes}"])
        assert self.recipe.tokenizer is not None
        self.vocab_size = self.recipe.tokenizer.vocab_size

    def settings(self) -> dict[str, Any]:
        tables = self.recipe.model_dump(mode="json")
        return {name: tables[name] for name in TABLES}

    def _lmkit(self, command: str, name: str, *options: str, **changes: Any) -> Ended:
        given = (f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items())
        sets = [part for change in (*self._changes, f"run.name={name}", *given) for part in ("--set", change)]
        program = (sys.executable, "-m", "lmkit", command, self._source)
        return watch(
            (*program, *options, *sets), log=self.log(f"{command}-{name}"), first_step=self.first_step
        )

    def _train(self, name: str, *options: str, **changes: Any) -> tuple[Ended, list[Row]]:
        run, tokens = self.folder / name, self.folder / "data" / "tokens"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        shutil.copy(self.folder / "data" / "tokenizer.json", run)  # for `lmkit evaluate`
        data = {f"data__{part}": str(tokens / f"{part}.npy") for part in ("train", "valid")}
        ended = self._lmkit("train", name, "--json", *options, **data, **changes)
        return ended, [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]

    def prepare(self) -> dict[str, Any]:
        few = {
            "generate__max_new_tokens": 1,
            "train__max_minutes": 1e-6,
        }  # one step: `run` is here for the data
        data = self._lmkit("run", "data", **few)
        interval = WARM_STEPS // 3
        options = {"train__eval_interval": interval, "train__max_minutes": self.course.minutes}
        _, records = self._train("short", "--stop-at-step", str(WARM_STEPS), **options)
        first = records[0]
        steps, evaluations = lengths_of(records)
        if not steps:
            raise Failed(f"made {records[-1]['step']} step in {self.course.minutes} minutes")
        return {
            "data_s": data.wall_s,
            "step_s": median(steps),
            "first_step_s": first["seconds"],
            "evaluation_s": min(evaluations, default=0.0),  # the first one may compile
        }

    def run(self, seed: int) -> Row:
        course, known = self.course, self.prepared
        beyond = known["first_step_s"] + course.points * known["evaluation_s"]
        steps = 60 * course.minutes / known["step_s"]
        changes = {
            "run__seed": seed,
            "train__max_minutes": course.minutes + beyond / 60,
            "train__eval_interval": max(1, round(steps / course.points)),
        }
        ended, records = self._train(f"seed-{seed}", **changes)
        made = json.loads(next(line for line in reversed(ended.lines) if line.startswith("{")))
        seconds = seconds_of(records)
        last = [record for record in records if record["kind"] == "train"][-1]
        training, one = seconds[last["step"]], last["tokens"] / last["step"]
        curve = [
            (between(seconds, record["step"]) / 60, record["bits_per_byte"])
            for record in records
            if record["kind"] == "valid"
        ]
        judged = self._judge(seed)
        environment = describe_environment()
        return {
            "training_min": training / 60,
            "steps": last["step"],
            "tokens": last["tokens"],
            "tokens_per_s": (last["tokens"] - one) / training,
            "epochs": last["tokens"] / self._tokens_of_text(),
            "first_step_s": ended.first_step_s,
            "wall_s": ended.wall_s,
            "parameters": made["parameters"],
            **judged,
            "versions": {
                "lmkit": environment["lmkit"],
                "python": environment["python"],
                **environment["packages"],
            },
            "git": environment["git"],
            "curve": curve,
        }

    def _tokens_of_text(self) -> int:
        import numpy as np

        return len(np.load(self.folder / "data" / "tokens" / "train.npy", mmap_mode="r"))

    def _judge(self, seed: int) -> Row:
        program = (sys.executable, "-m", "lmkit", "evaluate", self.folder / f"seed-{seed}")
        options = ("--by-document", "--json", "--device", self.course.device)
        ended = watch((*program, *options), log=self.log(f"judge-seed-{seed}"))
        result = json.loads(next(line for line in reversed(ended.lines) if line.startswith("{")))
        size = sum(document["bytes"] for document in result["documents"])
        nats = result["loss"] * result["tokens"]
        assert self.recipe.model is not None
        context = self.recipe.model.context_length
        return judgement(nats, size, result["tokens"], len(result["documents"]), context)


def judgement(nats: float, size: int, tokens: int, documents: int, context_length: int) -> Row:
    """Return the keys of a row that say how the held-out documents were predicted."""
    return {
        "bits_per_byte": nats / math.log(2) / size,
        "judged": {"documents": documents, "bytes": size, "tokens": tokens, "context_length": context_length},
    }


# nanochat


@dataclass(frozen=True)
class Printed:
    """What `scripts.base_train` printed: seconds of each step, and its evaluations as (step, bits per byte)."""

    seconds: list[float]
    evaluations: list[tuple[int, float]]
    batch_tokens: int
    epoch: int
    parameters: int

    @property
    def training(self) -> float:
        """Seconds of training behind the first step."""
        return sum(self.seconds[1:])

    @property
    def curve(self) -> Points:
        """(minutes, bits per byte) of the evaluations, without that of the untrained model."""
        return [(sum(self.seconds[1:step]) / 60, value) for step, value in self.evaluations if step]


def printed_by_nanochat(lines: Sequence[str]) -> Printed:
    """Read the output of `scripts.base_train`."""
    seconds, evaluations, batch, epoch, parameters = [], [], None, 0, 0
    for line in lines:
        if found := re.match(r"step \d+/\d+ .*\| dt: ([\d.]+)ms .*\| epoch: (\d+)", line):
            seconds.append(float(found[1]) / 1000)
            epoch = int(found[2])
        elif found := re.match(r"Step (\d+) \| Validation bpb: ([\d.]+)", line):
            evaluations.append((int(found[1]), float(found[2])))
        elif found := re.match(r"Total batch size ([\d,]+) =>", line):
            batch = int(found[1].replace(",", ""))
        elif found := re.match(r"total\s+: ([\d,]+)$", line):
            parameters = int(found[1].replace(",", ""))
    if batch is None or len(seconds) < 2:
        raise Failed("nanochat printed no batch size, or less than two steps, in a form that is known here")
    return Printed(seconds, evaluations, batch, epoch, parameters)


def iterations_for(minutes: float, seconds: Sequence[float]) -> int:
    """Return how many iterations take so many minutes behind the first, given the seconds of those of a short run."""
    counted = seconds[UNMEASURED:] if len(seconds) > 2 * UNMEASURED else seconds[1:]
    return 1 + max(1, round(60 * minutes / median(counted)))


class Nanochat(Side):
    """A checkout of nanochat: its `scripts.tok_train` and `scripts.base_train`."""

    name = "nanochat"
    first_step = r"step 0+/"

    def __init__(
        self, course: Course, checkout: Path, *, python: str, vocab_size: int, options: Sequence[str]
    ) -> None:
        super().__init__(course)
        self._checkout, self._python, self._vocab_size = checkout.resolve(), python, vocab_size
        self._options = [f"--depth={course.depth}", f"--device-type={course.device}"]
        self._options += ["--core-metric-every=-1", "--sample-every=-1", "--eval-tokens=524288"]
        self._options += [f"--{option}" for option in options]  # the last of a name counts

    def settings(self) -> dict[str, Any]:
        return {"vocab_size": self._vocab_size, "options": self._options}

    def _watch(self, what: str, *command: str | Path, **options: Any) -> Ended:
        paths = [str(self._checkout), str(self._stand_ins()), os.environ.get("PYTHONPATH", "")]
        environment = {
            "NANOCHAT_BASE_DIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        options |= {"folder": self._checkout, "environment": environment}
        try:
            return watch((self._python, *command), log=self.log(what), **options)
        except Failed as failed:
            raise Failed(str(failed).replace(f"{self._checkout}/", "")) from failed

    def _stand_ins(self) -> Path:
        """Make an empty module of wandb, if there is none: nanochat imports it, and asks nothing of it by default."""
        folder = self.folder / "stand-ins"
        if not folder.exists():
            folder.mkdir(parents=True)
            looks = "import importlib.util as i, sys; sys.exit(i.find_spec('wandb') is None)"
            if subprocess.run((self._python, "-c", looks), cwd=folder).returncode:
                (folder / "wandb.py").touch()
        return folder

    def _train(self, tag: str, seed: int, *options: str) -> tuple[Ended, Printed]:
        module = ("-m", "scripts.base_train") if seed == 0 else (INSIDE_NANOCHAT, "train", str(seed))
        given = (*module, *self._options, f"--model-tag={tag}", *options)
        ended = self._watch(f"train-{tag}", *given, first_step=self.first_step)
        return ended, printed_by_nanochat(ended.lines)

    def prepare(self) -> dict[str, Any]:
        course = self.course
        shards = self._watch(
            "shards", INSIDE_NANOCHAT, "shards", course.train.resolve(), course.valid.resolve()
        )
        tokenizer = self._watch("tok_train", "-m", "scripts.tok_train", f"--vocab-size={self._vocab_size}")
        _, printed = self._train("short", 0, f"--num-iterations={WARM_STEPS}", "--eval-every=-1")
        shutil.rmtree(self.folder / "base_checkpoints" / "short")
        iterations = iterations_for(course.minutes, printed.seconds)
        return {"data_s": shards.wall_s + tokenizer.wall_s, "iterations": iterations}

    def run(self, seed: int) -> Row:
        iterations, tag = self.prepared["iterations"], f"seed-{seed}"
        every = max(1, round(iterations / self.course.points))
        options = (f"--num-iterations={iterations}", f"--eval-every={every}")
        ended, printed = self._train(tag, seed, *options)
        out = self.folder / f"{tag}.judged.json"
        self._watch(
            *(f"judge-{tag}", INSIDE_NANOCHAT, "score", self.course.valid.resolve(), tag, out.resolve()),
            self.course.device,
        )
        judged = json.loads(out.read_text("utf-8"))
        steps = len(printed.seconds)
        return {
            "training_min": printed.training / 60,
            "steps": steps,
            "tokens": steps * printed.batch_tokens,
            "tokens_per_s": (steps - 1) * printed.batch_tokens / printed.training,
            "epochs": printed.epoch,  # begun; nanochat reads up to 1000 documents ahead, and crops
            "first_step_s": ended.first_step_s,
            "wall_s": ended.wall_s,
            "parameters": printed.parameters,
            **judgement(*(judged[key] for key in ("nats", "bytes", "tokens", "documents", "context_length"))),
            **{key: judged[key] for key in ("same_windows", "flash_attention_3", "versions")},
            "git": git_state_of(self._checkout),
            "curve": printed.curve,
        }


def git_state_of(checkout: Path) -> dict[str, Any] | None:
    """Return the commit of a checkout and whether it has changes; None if it is no repository."""
    if not (checkout / ".git").exists():
        return None
    said = []
    for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        found = subprocess.run(("git", "-C", checkout, *command), capture_output=True, text=True)
        if found.returncode:
            return None
        said.append(found.stdout.strip())
    return {"commit": said[0], "dirty": bool(said[1])}


RIVALS = {"nanochat": Nanochat}


# The race


def race(sides: Sequence[Side], seeds: Sequence[int], out: Path, setup: Mapping[str, Any]) -> list[Row]:
    """Run all sides with each seed in turns; return the rows, with those that `out` has from earlier.

    A side that fails is a row with its error, and the others go on.

    Raises:
        Failed: `out` holds a race with another setup.
    """
    path = out / "race.json"
    state: dict[str, Any] = {"setup": finite(dict(setup)), "prepared": {}, "rows": []}
    if path.exists():
        earlier = json.loads(path.read_text("utf-8"))
        known, new = earlier["setup"], state["setup"]
        if changed := [key for key in known.keys() & new.keys() if known[key] != new[key]]:
            raise Failed(f"{path}: another race ({', '.join(sorted(changed))}); name another folder")
        state = earlier | {"setup": known | new}
    failed: dict[str, str] = {}
    for side in sides:
        if side.name not in state["prepared"]:
            print(f"{side.name}: prepares", flush=True)
            try:
                state["prepared"][side.name] = finite(side.prepare())
            except Failed as error:
                failed[side.name] = str(error)
                print(f"{side.name} failed: {error}", flush=True)
        side.prepared = state["prepared"].get(side.name, {})
    _keep(path, state)
    for seed in seeds:
        for side in sides:
            rows = [row for row in state["rows"] if (row["side"], row["seed"]) == (side.name, seed)]
            if rows and rows[0]["status"] == "ok":
                continue
            row: Row = {"side": side.name, "seed": seed, "status": "failed", "minutes": side.course.minutes}
            print(f"{side.name}, seed {seed}: trains", flush=True)
            try:
                if side.name in failed:
                    raise Failed(failed[side.name])
                row |= finite(side.run(seed)) | {"device": device_name(side.course.device)}
                _refuse_other_text(row, state["rows"])
                row["status"] = "ok"
            except Failed as error:
                row["error"] = str(error).replace(f"{out}/", "")
            for old in rows:
                state["rows"].remove(old)
            state["rows"].append(row)
            said = (
                f"failed: {row['error']}" if "error" in row else f"{row['bits_per_byte']:.4f} bits per byte"
            )
            print(f"{side.name}, seed {seed}: {said}", flush=True)
            _keep(path, state)
    return state["rows"]


def _keep(path: Path, state: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(state, indent=1) + "\n")


def _refuse_other_text(row: Row, others: Sequence[Row]) -> None:
    size = row["judged"]["bytes"]
    sizes = {other["judged"]["bytes"] for other in others if other["status"] == "ok"}
    if sizes - {size}:
        raise Failed(f"judged {size} bytes of text, others {min(sizes)}: not the same documents")


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each side: medians, and the range of bits per byte."""
    found = []
    for side, members in grouped(list(rows), lambda row: str(row["side"])).items():
        good = [row for row in members if row["status"] == "ok"]
        summary: Row = {"side": side, "rows": len(members), "failed": len(members) - len(good)}
        for key in ("tokens_per_s", "training_min", "first_step_s"):
            summary[key] = median(row[key] for row in good) if good else None
        bits = [row["bits_per_byte"] for row in good]
        for of, function in (("median", median), ("lowest", min), ("highest", max)):
            summary[f"bits_per_byte_{of}"] = function(bits) if bits else None
        found.append(summary)
    return found


def picture(rows: Sequence[Row]) -> bytes:
    """Draw the loss over minutes of every run, and the judged results at the ends."""
    series: dict[str, Points] = {}
    good = [row for row in rows if row["status"] == "ok"]
    for row in sorted(good, key=lambda row: (row["side"], row["seed"])):
        series[f"{row['side']}, seed {row['seed']}"] = [(x, y) for x, y in row["curve"]]
    marked = []
    for summary in summarise(good):
        marked.append(f"{summary['side']}, judged by document (median)")
        series[marked[-1]] = [(summary["training_min"], summary["bits_per_byte_median"])]
    labels = {"x_label": "minutes of training", "y_label": "bits per byte of held-out text"}
    return loss_curve(series, title="Held-out loss over minutes of training", marked=marked, **labels)


def report(rows: Sequence[Row], out: Path) -> None:
    """Print the tables and write the picture."""
    ordered = sorted(rows, key=lambda row: (row["side"], row["seed"]))
    print(terminal_table(ordered, COLUMNS), end="")
    print(terminal_table(summarise(ordered), SUMMARY), end="")
    for row in ordered:
        if row["status"] != "ok":
            print(f"{row['side']}, seed {row['seed']} failed: {row['error']}")
        elif abs(row["training_min"] / row["minutes"] - 1) > 0.02:
            print(
                f"{row['side']}, seed {row['seed']}: trained {row['training_min']:.3f} of {row['minutes']} minutes"
            )
    if any(row["status"] == "ok" for row in rows):
        drawn = decorate("race.png", lambda: picture(rows))
        if drawn is not None:
            write_atomic(out / "race.png", drawn)


def _seeds(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("train", type=Path, help="text to train on; documents end with <|endoftext|>")
    made.add_argument("valid", type=Path, help="held-out text")
    made.add_argument("--out", type=Path, required=True, help="folder of data, runs and results")
    made.add_argument("--rival", action="append", default=[], metavar="NAME=CHECKOUT", help="nanochat=PATH")
    made.add_argument("--rival-python", default=sys.executable, help="a Python with the rival's requirements")
    made.add_argument(
        "--rival-set", action="append", default=[], metavar="OPTION=VALUE", help="of its training"
    )
    made.add_argument("--minutes", type=float, default=1.5)
    made.add_argument("--depth", type=int, default=8, help="layers of every model")
    made.add_argument("--seeds", type=_seeds, default=[0, 1, 2], help="for example 0,1,2; '' only prepares")
    made.add_argument("--ours", default="speedrun", metavar="RECIPE", help="lmkit's recipe")
    made.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="of lmkit's recipe"
    )
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--points", type=int, default=10, help="evaluations while a side trains")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race; 1 if a side failed, 2 if the race cannot begin."""
    given = parser().parse_args(arguments)
    out: Path = given.out.resolve()
    course = Course(
        given.train.resolve(),
        given.valid.resolve(),
        out,
        given.minutes,
        given.depth,
        given.device,
        given.points,
    )
    try:
        ours = Lmkit(course, given.ours, given.set)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    sides: list[Side] = [ours]
    for text in given.rival:
        name, _, checkout = text.partition("=")
        if name not in RIVALS or not Path(checkout).is_dir():
            raise SystemExit(f"--rival {text}: name one of {', '.join(RIVALS)}, and a folder")
        options = {"vocab_size": ours.vocab_size, "options": given.rival_set}
        sides.append(RIVALS[name](course, Path(checkout), python=given.rival_python, **options))
    setup = {
        "minutes": course.minutes,
        "depth": course.depth,
        "device": course.device,
        "points": course.points,
    }
    for part in ("train", "valid"):
        with open(getattr(course, part), "rb") as file:
            setup[part] = {"bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}
    setup |= {side.name: side.settings() for side in sides}
    out.mkdir(parents=True, exist_ok=True)
    try:
        rows = race(sides, given.seeds, out, setup)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    report(rows, out)
    return int(any(row["status"] != "ok" for row in rows))


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while chunk := file.read(1 << 20):
        found.update(chunk)
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
