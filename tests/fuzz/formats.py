"""The file formats that lmkit reads: good files, how they are damaged, how they are read, and what a right load is.

`read` raises `LmkitError`, or has checked that what was read is what the files say, found out in another way than the
reader's: parsed again by a plain parser, or compared with the undamaged content where a checksum protects it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import logging
import re
import shutil
import socketserver
import sqlite3
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np

from lmkit.benches.journal import Journal
from lmkit.commands import compare, report, train, verify
from lmkit.commands.recipe import show_recipe
from lmkit.commands.stages import StageRecord
from lmkit.data.corpora import prepare_corpus
from lmkit.data.download import Dataset, RemoteFile, download
from lmkit.data.token_files import TokenFileWriter, open_tokens
from lmkit.errors import LmkitError
from lmkit.optim.adamw import AdamW
from lmkit.profiling.kineto import read_chrome_trace
from lmkit.profiling.nsys_database import read_nsys_database
from lmkit.profiling.reduction import summarize
from lmkit.profiling.trace import Trace
from lmkit.recipe.aliases import canonical
from lmkit.recipe.corpus import CorpusConfig
from lmkit.recipe.load import load_recipe, recipe_to_toml, validate
from lmkit.recipe.model import fill_preset
from lmkit.recipe.shipped import shipped_recipes
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.byte_alphabet import to_bytes
from lmkit.training.checkpoint_folder import MANIFEST, MODEL, STATE, newest_valid, shard_name, write_manifest
from lmkit.training.checkpoints import newest_checkpoint, open_checkpoint, plain_model
from lmkit.training.metrics import MetricsFile, read_metrics
from lmkit.training.optimizer_state import load_optimizer_tensors
from lmkit.training.run_folder import draw_losses
from lmkit.training.state import restore_rng
from lmkit.training.tensor_files import FileEntry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Files = dict[str, bytes]
Mutation = Callable[[Random, bytes], bytes]
TEXT = "Once upon a time, there was a tiny héron.\n<|endoftext|>\x00 12345 \U0001f426"


class Format(ABC):
    """One kind of file, or several that belong together.

    Args:
        folder: a place for what is made once.
    """

    name: str
    damages: tuple[tuple[str, Mutation], ...]
    """(file, mutation); each case takes one of these."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.good = self.make(folder)

    @abstractmethod
    def make(self, folder: Path) -> Files:
        """The undamaged files."""

    @abstractmethod
    def read(self, folder: Path, random: Random) -> None:
        """Read what is in `folder`.

        Raises:
            LmkitError: the files are damaged.
            AssertionError: they were read, but wrongly.
        """

    def damaged(self, random: Random) -> Files:
        victim, mutate = random.choice(self.damages)
        return {**self.good, victim: mutate(random, self.good[victim])}

    def try_undamaged(self, folder: Path) -> None:
        """What is good must load."""
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in self.good.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        self.read(folder, Random(0))
        self.close()
        shutil.rmtree(folder)

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """No more cases."""


def is_changed(path: Path, good: bytes) -> bool:
    return path.read_bytes() != good


# ---- recipes


class RecipeFile(Format):
    name = "recipe"
    damages = (
        ("recipe.toml", mutations.damage_toml),
        ("recipe.toml", mutations.damage_toml),
        ("recipe.toml", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        self.shipped = {name: path.read_bytes() for name, path in shipped_recipes().items()}
        return {"recipe.toml": self.shipped["quickstart"]}

    def damaged(self, random: Random) -> Files:
        self.good = {"recipe.toml": random.choice(list(self.shipped.values()))}
        return super().damaged(random)

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "recipe.toml"
        recipe = load_recipe(path)
        show_recipe(recipe)
        written = canonical(tomllib.loads(path.read_text("utf-8")))
        if "model" in written:
            written["model"] = fill_preset(written["model"])
        loaded = recipe.model_dump(mode="json")
        for table, content in written.items():
            assert_inside(content, loaded[table], table)
        (folder / "again.toml").write_text(recipe_to_toml(recipe), "utf-8")
        assert load_recipe(folder / "again.toml") == recipe


def assert_inside(written: Any, loaded: Any, where: str) -> None:
    """Every key of the file has its value in the recipe; a path may be spelled in another way."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert_inside(value, loaded[key], f"{where}.{key}")
    elif isinstance(written, list):
        assert len(written) == len(loaded), where
        for one, other in zip(written, loaded, strict=True):
            assert_inside(one, other, where)
    else:
        expected = float(written) if isinstance(loaded, float) else written
        same = loaded == expected and isinstance(loaded, bool) == isinstance(written, bool)
        assert same or (isinstance(written, str) and loaded == str(Path(written))), f"{where}: {loaded!r}"


# ---- tokenizers


def small_tokenizer() -> Tokenizer:
    merges = [
        (b"h", b"e"),
        (b" ", b"t"),
        (b" t", b"he"),
        (b"\xc3", b"\xa9"),
        (b"o", b"n"),
        (b"1", b"2"),
        (b"12", b"3"),
    ]
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(merges)}
    return Tokenizer(vocab=vocab, merges=merges, special_tokens=("<|endoftext|>", "<|pad|>"))


def assert_works(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(tokenizer.encode(TEXT)) < tokenizer.vocab_size


class TokenizerFile(Format):
    name = "tokenizer.json"
    damages = (
        ("tokenizer.json", mutations.damage_json),
        ("tokenizer.json", mutations.damage_json),
        ("tokenizer.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        small_tokenizer().save(folder / "tokenizer.json")
        return {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "tokenizer.json"
        tokenizer = Tokenizer.load(path)
        content = json.loads(path.read_bytes())
        special = {token["id"]: token["content"] for token in content["added_tokens"]}
        ordinary = {
            i: to_bytes(token) for token, i in content["model"]["vocab"].items() if special.get(i) != token
        }
        assert tokenizer.vocab == ordinary | {i: text.encode() for i, text in special.items()}
        assert len(tokenizer.merges) == len(content["model"]["merges"])
        assert {i: text for text, i in tokenizer.special_ids.items()} == special
        assert_works(tokenizer)
        tokenizer.save(folder / "again.json")
        assert Tokenizer.load(folder / "again.json").sha256 == tokenizer.sha256


class Gpt2Files(Format):
    name = "gpt2 vocab.json + merges.txt"
    damages = (
        ("vocab.json", mutations.damage_json),
        ("vocab.json", mutations.damage),
        ("merges.txt", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        small_tokenizer().save_gpt2(folder)
        return {name: (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}

    def read(self, folder: Path, random: Random) -> None:
        tokenizer = Tokenizer.load_gpt2(folder / "vocab.json", folder / "merges.txt")
        content = json.loads((folder / "vocab.json").read_bytes())
        for token, token_id in content.items():
            assert tokenizer.special_ids.get(token) == token_id or tokenizer.vocab[token_id] == to_bytes(
                token
            )
        assert len(content) == len(tokenizer.vocab)
        assert_works(tokenizer)


# ---- token files


class TokenFiles(Format):
    name = "token file"
    damages = (
        ("tokens.npy", mutations.damage_npy),
        ("tokens.npy", mutations.damage_npy),
        ("tokens.npy", mutations.damage),
        ("tokens.json", mutations.damage_json),
        ("tokens.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        self.kinds = []
        for vocab_size in (1000, 1 << 16, 70_000):
            ids = np.random.default_rng(vocab_size).integers(0, vocab_size, 500)
            with TokenFileWriter(
                folder / "tokens.npy", vocab_size=vocab_size, tokenizer_sha256="a" * 64
            ) as writer:
                writer.append(ids)
                writer.finish(num_documents=3, num_bytes=1500, source_sha256="b" * 64)
            self.kinds.append({name: (folder / name).read_bytes() for name in ("tokens.npy", "tokens.json")})
        return self.kinds[0]

    def damaged(self, random: Random) -> Files:
        self.good = random.choice(self.kinds)
        return super().damaged(random)

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "tokens.npy"
        opened = open_tokens(path)
        data = path.read_bytes()
        meta = json.loads((folder / "tokens.json").read_bytes())
        assert vars(opened.meta) == meta
        raw = data[len(data) - opened.tokens.nbytes :]
        assert opened.tokens.tobytes() == raw
        assert len(opened.tokens) == meta["num_tokens"] > 0
        assert int(opened.tokens.max()) < meta["vocab_size"]
        assert meta["num_bytes"] >= 0
        assert meta["num_documents"] >= 0


# ---- checkpoints

TINY = (
    "run.device=cpu", "run.threads=1", "data.source=random", "model.vocab_size=64", "model.context_length=8",
    "model.d_model=16", "model.d_ff=32", "model.num_layers=1", "model.num_heads=2", "train.steps=2",
    "train.batch_size=2",
)  # fmt: skip
STEP = "run/checkpoints/step-00000002"
OPTIMIZER = shard_name(0, 1)


class CheckpointFiles(Format):
    """A file of a checkpoint is changed; the manifest is not, so nothing that changed may be read."""

    name = "checkpoint"
    damages = (
        (f"{STEP}/{MODEL}", mutations.damage_safetensors),
        (f"{STEP}/{MODEL}", mutations.damage),
        (f"{STEP}/{OPTIMIZER}", mutations.damage_safetensors),
        (f"{STEP}/{OPTIMIZER}", mutations.damage),
        (f"{STEP}/{STATE}", mutations.damage_json),
        (f"{STEP}/{STATE}", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        recipe = load_recipe(None, [*TINY, f"run.folder={folder}"])
        logging.getLogger("lmkit").setLevel(logging.ERROR)
        with contextlib.redirect_stderr(io.StringIO()):
            train.run(recipe)
        step = folder / STEP
        return {f"{STEP}/{path.name}": path.read_bytes() for path in sorted(step.iterdir())}

    def read(self, folder: Path, random: Random) -> None:
        checkpoint = open_checkpoint(folder / STEP)
        checkpoint.model_tensors()
        checkpoint.optimizer_tensors()
        for name, good in self.good.items():
            assert not is_changed(folder / name, good), f"{name} was changed, and read"
        assert newest_valid(folder / "run" / "checkpoints").path == folder / STEP


class Manifest(CheckpointFiles):
    """The manifest is changed; it carries a checksum of its own."""

    name = "manifest"
    damages = (
        (f"{STEP}/{MANIFEST}", mutations.damage_json),
        (f"{STEP}/{MANIFEST}", mutations.damage),
    )

    def read(self, folder: Path, random: Random) -> None:
        chosen = newest_valid(folder / "run" / "checkpoints").path
        assert chosen == folder / STEP
        manifest = f"{STEP}/{MANIFEST}"
        assert json.loads((folder / manifest).read_bytes()) == json.loads(self.good[manifest])
        open_checkpoint(chosen).model_tensors()


class ForgedCheckpoint(CheckpointFiles):
    """Somebody changes a checkpoint and writes a manifest that fits: what is read must still be sound."""

    name = "forged checkpoint"

    def damaged(self, random: Random) -> Files:
        files = super().damaged(random)
        return {name: data for name, data in files.items() if not name.endswith(MANIFEST)}

    def read(self, folder: Path, random: Random) -> None:
        step = folder / STEP
        write_manifest(
            step,
            {
                p.name: FileEntry(hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size)
                for p in step.iterdir()
            },
        )
        checkpoint = newest_checkpoint(step)
        model = plain_model(checkpoint, device="cpu")
        weights = plain_tensors((step / MODEL).read_bytes())
        for name, tensor in model.state_dict().items():
            shape, raw = weights[name]
            assert list(tensor.shape) == shape
            assert tensor.numpy().tobytes() == raw or checkpoint.model_tensors()[name].dtype != tensor.dtype
        validate(checkpoint.state.recipe, origin="state.json")
        optimizer = AdamW(model.parameters())
        shards = checkpoint.all_optimizer_shards()
        load_optimizer_tensors(optimizer, model, shards, checkpoint.state.optimizer_layout, origin=str(step))
        for parameter, state in optimizer.state.items():
            assert all(
                value.shape in (parameter.shape, ()) for value in state.values() if hasattr(value, "shape")
            )
        restore_rng(checkpoint.state.rng[0], parameter.device)


def plain_tensors(data: bytes) -> dict[str, tuple[list[int], bytes]]:
    """Name -> (shape, bytes) of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    rest = data[8 + length :]
    return {name: (entry["shape"], rest[slice(*entry["data_offsets"])]) for name, entry in header.items()}


# ---- what runs and benches write


class MetricsLines(Format):
    name = "metrics.jsonl"
    damages = (
        ("metrics.jsonl", mutations.damage),
        ("metrics.jsonl", mutations.damage),
        ("metrics.jsonl", mutations.damage_json_lines),
    )

    def make(self, folder: Path) -> Files:
        records: list[dict[str, Any]] = []
        for step in range(1, 21):
            records.append(
                {"kind": "train", "step": step, "loss": 4.0 / step, "lr": 1e-3, "seconds": step / 7}
            )
            if step % 5 == 0:
                records.append(
                    {"kind": "valid", "step": step, "loss": 4.5 / step, "perplexity": 9.0, "tokens": 100}
                )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        draw_losses(folder, title="loss")  # matplotlib makes code of its own when it is imported
        return {"metrics.jsonl": (folder / "metrics.jsonl").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "metrics.jsonl"
        records = read_metrics(path)
        good = [json.loads(line) for line in self.good["metrics.jsonl"].splitlines()]
        lines = set(path.read_bytes().split(b"\n"))
        untouched = [record for record in good if json.dumps(record).encode() in lines]
        assert [record for record in records if record in untouched] or not untouched
        for record in records:
            assert isinstance(record["kind"], str)
            assert isinstance(record["step"], int)
        MetricsFile(path, after_step=12).close()
        again = read_metrics(path)
        assert [r["step"] for r in again] == [r["step"] for r in records if r["step"] <= 12]
        if random.random() < 0.05:  # matplotlib takes a hundred times longer than all the rest
            draw_losses(folder, title="loss")


class Results(Format):
    name = "bench results"
    damages = (
        ("after.jsonl", mutations.damage_json_lines),
        ("after.jsonl", mutations.damage_json_lines),
        ("after.jsonl", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        rows = [
            {"bench": "attention", "kernel": kernel, "length": length, "median_ms": 1.5, "samples_ms": [1.0, 2.0]}
            for kernel in ("sdpa", "vectorized")
            for length in (128, 256)
        ]  # fmt: skip
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        return {"before.jsonl": data, "after.jsonl": data}

    def read(self, folder: Path, random: Random) -> None:
        compared = compare.run(folder / "before.jsonl", folder / "after.jsonl", threshold=0.05)
        assert len(compared.rows) >= 4
        str(compared)


ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "h200"


class ReportedRows(Format):
    """Rows as `lmkit report`, `lmkit compare` and a bench that goes on read them; the first file is damaged."""

    files: tuple[str, ...]
    most_rows = 14
    most_samples = 6

    def make(self, folder: Path) -> Files:
        victim = self.files[0]
        structure = mutations.damage_json_lines if victim.endswith(".jsonl") else mutations.damage_json
        self.damages = (
            (victim, structure),
            (victim, structure),
            (victim, structure),
            (victim, mutations.damage),
        )
        return {name: self._shortened(ARTIFACTS / name) for name in self.files}

    def _shortened(self, path: Path) -> bytes:
        if path.suffix != ".jsonl":
            return path.read_bytes()
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[: self.most_rows]]
        for row in rows:
            if "samples_ms" in row:
                row["samples_ms"] = row["samples_ms"][: self.most_samples]
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def read(self, folder: Path, random: Random) -> None:
        victim = folder / self.files[0]
        reader = random.choice(("report", "report", "compare", "journal"))
        if reader == "report" or victim.suffix != ".jsonl":
            report.run(folder, None)
            report.run(folder, None, check=True)
            if b'"inf"' not in victim.read_bytes():
                for written in (folder / "reports").iterdir():
                    assert not re.search(r"\b(nan|inf)\b", written.read_text("utf-8")), written
        elif reader == "compare":
            compared = compare.run(victim, victim, threshold=0.05)
            str(compared).encode()
            assert compared.worse == 0
        else:
            assert Journal(victim).rows() == [json.loads(line) for line in victim.read_bytes().splitlines()]


class AttentionRows(ReportedRows):
    name = "attention rows"
    files = ("attention/acceptance.jsonl",)


class MatrixRows(ReportedRows):
    name = "lm-matrix rows"
    files = ("lm_matrix_x2/lm_matrix_results.jsonl",)


class ModelRows(ReportedRows):
    name = "model rows"
    files = ("model/model_results.jsonl",)


class DdpRows(ReportedRows):
    name = "ddp rows"
    files = ("ddp/reading7.jsonl", "ddp/reading6.jsonl")


class AllReduceRows(ReportedRows):
    name = "all-reduce rows"
    files = ("all_reduce/all_reduce_results.jsonl",)


class OptimizerRows(ReportedRows):
    name = "optimizer rows"
    files = ("optimizer/optimizer_results.jsonl",)


class MemoryRows(ReportedRows):
    name = "memory rows"
    files = tuple(f"memory/2.7b_step_{length}/memory_peaks.jsonl" for length in (128, 2048))


class ProfileSummaries(ReportedRows):
    name = "profile_summary.json"
    files = tuple(f"profile/{name}/profile_summary.json" for name in ("medium_step", "medium_forward"))


class Environments(ReportedRows):
    name = "environment.json"
    files = ("ddp_162M/environment.json", "ddp_162M/ddp_results.jsonl")


class ChromeTrace(Format):
    """A recording of torch.profiler, as `lmkit profile nsys FILE` reads it."""

    name = "chrome trace"
    damages = (
        ("trace.json", mutations.damage_json),
        ("trace.json", mutations.damage_json),
        ("trace.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
            plain = {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": duration,
                "pid": 10,
                "tid": 1,
            }
            return plain | more

        events = [{"ph": "M", "name": "process_name", "pid": 10}]
        for start in (0.0, 1000.5):
            events += [
                event("user_annotation", "step", start, 1000),
                event("user_annotation", "forward", start + 100, 200.25),
                event("cpu_op", "aten::linear", start + 100, 100),
                event("cpu_op", "aten::mm", start + 120, 60),
                event(
                    "cuda_runtime", "cudaLaunchKernel", start + 130, 10, args={"correlation": int(start) + 1}
                ),
                event(
                    "kernel",
                    "gemm",
                    start + 150,
                    100,
                    pid=0,
                    args={"correlation": int(start) + 1, "device": 0},
                ),
                event("gpu_memset", "Memset", start + 950, 50, pid=0, args={"correlation": 9, "device": 0}),
            ]
        return {"trace.json": json.dumps({"traceEvents": events}).encode()}

    def read(self, folder: Path, random: Random) -> None:
        trace = read_chrome_trace(folder / "trace.json")
        events = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
        complete = [event for event in events if event.get("ph") == "X"]
        kinds = ("kernel", "gpu_memcpy", "gpu_memset")
        assert len(trace.work or ()) == sum(event.get("cat") in kinds for event in complete)
        assert sum(calls for calls, _ in trace.ops.values()) == sum(
            event.get("cat") == "cpu_op" for event in complete
        )
        assert_sound(trace)


def assert_sound(trace: Trace) -> None:
    for entry in (*trace.ranges, *(trace.calls or ()), *(trace.work or ())):
        assert isinstance(entry.name, str)
        assert type(entry.start) is type(entry.end) is int
        assert entry.start <= entry.end
    summary = summarize(trace)
    json.dumps(summary.as_dict(), allow_nan=False)
    summary.markdown().encode()
    summary.text()


class NsysDatabase(Format):
    """A recording of Nsight Systems. SQLite keeps any type in any column."""

    name = "nsys database"
    damages = (
        ("report.sqlite", mutations.damage_sqlite),
        ("report.sqlite", mutations.damage_sqlite),
        ("report.sqlite", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        path, thread = folder / "report.sqlite", 77 << 24 | 1
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.executescript(
                "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,"
                " globalTid INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,"
                " correlationId INTEGER, nameId INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,"
                " correlationId INTEGER, globalPid INTEGER, shortName INTEGER, graphNodeId INTEGER);"
                "INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel'), (2, 'gemm'), (3, 'step');"
            )
            for start in (0, 1000):
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, 3, ?)", (start, start + 900, thread)
                )
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'forward', NULL, ?)",
                    (start + 10, start + 90, thread),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 1)",
                    (start + 20, start + 30, thread, start + 1),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, ?, ?, 2, NULL)",
                    (start + 40, start + 200, start + 1, 77 << 24),
                )
            database.commit()
        return {"report.sqlite": path.read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        assert_sound(read_nsys_database(folder / "report.sqlite"))


class Stages(Format):
    name = "stages.json"
    damages = (
        ("stages.json", mutations.damage_json),
        ("stages.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        record = StageRecord(folder / "stages.json")
        (folder / "train.txt").write_text("text")
        for stage in ("corpus", "tokenizer"):
            record.begin(stage, "key")
            record.finish(stage, "key", {"train": [Path("train.txt")], "valid": []})
        record.begin("encode", "key")
        return {"stages.json": (folder / "stages.json").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        record = StageRecord(folder / "stages.json")
        for stage in ("corpus", "tokenizer", "encode", "train"):
            record.begun(stage, "before")
            record.finished(stage, "key")
            if record.made(stage):
                assert all(
                    isinstance(path, Path) for paths in record.outputs(stage).values() for path in paths
                )
        record.begin("train", "key", "before")
        assert StageRecord(folder / "stages.json").begun("train", "before")


class Corpus(Format):
    name = "corpus .jsonl and .txt"
    damages = (
        ("corpus.jsonl", mutations.damage),
        ("corpus.jsonl", mutations.damage_json_lines),
        ("corpus.txt", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        documents = [f"Story {i}: thé cat sat. \U0001f426\n\nThe end." for i in range(20)]
        return {
            "corpus.jsonl": "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents).encode(),
            "corpus.txt": "<|endoftext|>\n".join(documents).encode(),
        }  # fmt: skip

    def read(self, folder: Path, random: Random) -> None:
        for name in self.good:
            table = CorpusConfig(source="files", train=(folder / name,), errors="strict", valid_fraction=0.25)
            files = prepare_corpus(table, folder / "out")
            written = b"".join(path.read_bytes() for path in (*files.train, *files.valid))
            written.decode("utf-8")
            if name == "corpus.txt":
                assert written == (folder / name).read_bytes()
            else:
                lines = (folder / name).read_bytes().split(b"\n")
                texts = [json.loads(line)["text"] for line in lines if line.decode().strip()]
                assert (
                    written.decode()
                    == "".join(text + "<|endoftext|>\n" for text in texts).encode("utf-8", "replace").decode()
                )


class VerifiedRun(CheckpointFiles):
    """`lmkit verify` on a whole run folder."""

    name = "lmkit verify"
    damages = (
        ("run/recipe.toml", mutations.damage_toml),
        ("run/recipe.toml", mutations.damage),
        ("run/environment.json", mutations.damage),
        ("run/metrics.jsonl", mutations.damage),
        ("run/metrics.jsonl", mutations.damage_json_lines),
        (f"{STEP}/{MODEL}", mutations.damage),
        (f"{STEP}/{MANIFEST}", mutations.damage_json),
        (f"{STEP}/{MANIFEST}", mutations.damage),
        (f"{STEP}/{STATE}", mutations.damage_json),
    )

    def make(self, folder: Path) -> Files:
        files = super().make(folder)
        names = ("recipe.toml", "environment.json", "metrics.jsonl")
        return files | {f"run/{name}": (folder / "run" / name).read_bytes() for name in names}

    def read(self, folder: Path, random: Random) -> None:
        result = verify.run(folder / "run")
        assert all("\n" not in str(check) for check in result.checks)
        if not result.ok:
            raise LmkitError("verify says so")
        for name in (f"{STEP}/{MODEL}", f"{STEP}/{STATE}"):
            assert not is_changed(folder / name, self.good[name]), f"{name} was changed, and found well"


# ---- downloads

CONTENT = Random(1).randbytes(5_000) + b"text\n" * 3_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
ARCHIVE = gzip.compress(CONTENT, mtime=0)
ARCHIVE_DIGEST = hashlib.sha256(ARCHIVE).hexdigest()
PLAIN = Dataset("http://unused", RemoteFile("a.txt", "a.txt", 100_000), RemoteFile("a.txt", "a.txt", 100_000))
ZIPPED = Dataset("http://unused", RemoteFile("a.txt", "a.gz", 100_000), RemoteFile("a.txt", "a.gz", 100_000))


class Site:
    """A server on this machine that answers with what it is told to."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                request = b"".join(iter(self.rfile.readline, b"\r\n"))
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(answer(request))

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def response(request: bytes, content: bytes) -> bytes:
    """All of it, or the part that is asked for; the tag is the digest, as the Hugging Face hub sends it."""
    wanted = re.search(rb"Range: bytes=(\d+)-", request)
    start = int(wanted[1]) if wanted else 0
    if start >= len(content):
        return b"HTTP/1.1 416 No such range\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    part = (
        f"HTTP/1.1 206 Part\r\nContent-Range: bytes {start}-{len(content) - 1}/{len(content)}"
        if start
        else "HTTP/1.1 200 OK"
    )
    tag = hashlib.sha256(content).hexdigest()
    head = f'{part}\r\nETag: "{tag}"\r\nContent-Length: {len(content) - start}\r\nConnection: close\r\n\r\n'
    return head.encode() + content[start:]


class InterruptedDownload(Format):
    """What an interrupted download left is changed; the server is well and knows the digest."""

    name = "partial download"
    damages = (
        ("a.txt.partial", mutations.damage),
        ("a.txt.partial.version.json", mutations.damage_json),
        ("a.txt.partial.version.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        self.site: Site | None = None
        version = {"validator": f'"{DIGEST}"', "size": len(CONTENT), "sha256": DIGEST}
        return {
            "a.txt.partial": CONTENT[:7_000],
            "a.txt.partial.version.json": json.dumps(version).encode(),
        }

    def read(self, folder: Path, random: Random) -> None:
        self.site = self.site or Site(lambda request: response(request, CONTENT))
        paths = download(PLAIN, folder, base_url=self.site.url, retry_wait_s=0)
        assert [path.read_bytes() for path in paths] == [CONTENT] * 2
        assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}

    def close(self) -> None:
        if self.site is not None:
            self.site.close()
        self.site = None


class FinishedDownload(InterruptedDownload):
    """What was downloaded is changed, or its recorded digest."""

    name = "finished download"
    damages = (("a.txt", mutations.damage), ("a.txt.sha256", mutations.damage))

    def make(self, folder: Path) -> Files:
        self.site = None
        return {"a.txt": CONTENT, "a.txt.sha256": f"{DIGEST}  a.txt\n".encode()}


class ServerAnswers(InterruptedDownload):
    """The server's answers are changed, headers and body."""

    name = "server answers"
    damages = (
        ("answer", mutations.damage),
        ("answer", mutations.damage_http_head),
    )

    def make(self, folder: Path) -> Files:
        self.site = None
        return {"answer": response(b"", CONTENT)}

    def read(self, folder: Path, random: Random) -> None:
        answer = (folder / "answer").read_bytes()
        self.answers = cycle([answer])
        self.site = self.site or Site(lambda request: next(self.answers))
        paths = download(PLAIN, folder / "data", base_url=self.site.url, retry_wait_s=0)
        if f'\netag: "{DIGEST}"\r\n'.encode() in answer.partition(b"\r\n\r\n")[0].lower():
            assert [path.read_bytes() for path in paths] == [CONTENT] * 2


class Archive(InterruptedDownload):
    """A downloaded archive, changed before its digest was recorded: gzip's own checksum has to notice."""

    name = "gzip archive"
    damages = (
        ("a.gz", mutations.damage),
        ("a.gz", mutations.damage_archive),
    )

    def make(self, folder: Path) -> Files:
        self.site = None
        return {"a.gz": ARCHIVE}

    def read(self, folder: Path, random: Random) -> None:
        archive = (folder / "a.gz").read_bytes()
        (folder / "a.gz.sha256").write_text(f"{hashlib.sha256(archive).hexdigest()}  a.gz\n")
        paths = download(ZIPPED, folder, base_url="http://127.0.0.1:9", retry_wait_s=0)
        assert [path.read_bytes() for path in paths] == [gzip.decompress(archive)] * 2
        assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}


FORMATS: dict[str, Callable[[Path], Format]] = {
    form.name: form  # type: ignore[type-abstract]
    for form in (
        RecipeFile, TokenizerFile, Gpt2Files, TokenFiles, Manifest, CheckpointFiles, ForgedCheckpoint,
        MetricsLines, Results, AttentionRows, MatrixRows, ModelRows, DdpRows, AllReduceRows, OptimizerRows,
        MemoryRows, ProfileSummaries, Environments, ChromeTrace, NsysDatabase,
        Stages, Corpus, VerifiedRun, InterruptedDownload, FinishedDownload, ServerAnswers,
        Archive,
    )
}  # fmt: skip
