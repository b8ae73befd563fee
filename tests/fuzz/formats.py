"""The formats that lmkit reads: good files, how they are damaged, how they are read, and what a right load is.

`read` raises `LmkitError`, or has checked what was read in another way than the reader's: against a plain parser, or
against the undamaged content if a checksum protects it.
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
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np

from lmkit.cli.app import run_command_line
from lmkit.cli.pipeline import STAGES, Pipeline
from lmkit.data.corpora import prepare_corpus
from lmkit.data.download import Dataset, RemoteFile, download_dataset
from lmkit.data.token_files import TokenFileWriter, open_tokens
from lmkit.errors import LmkitError
from lmkit.optim.adamw import AdamW
from lmkit.profile.kineto import read_chrome_trace
from lmkit.profile.nsys import read_nsys_database
from lmkit.profile.summary import report_of, summarize
from lmkit.profile.trace import Trace
from lmkit.recipe.load import (
    load_recipe,
    recipe_to_toml,
    shipped_recipes,
    validate,
    with_our_names,
)
from lmkit.recipe.tables import PRESETS, CorpusConfig
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.files import to_bytes
from lmkit.training import session
from lmkit.training.checkpoint import (
    MANIFEST,
    MODEL,
    STATE,
    FileEntry,
    newest_checkpoint,
    newest_valid,
    open_checkpoint,
    shard_name,
)
from lmkit.training.checkpoint_writer import write_manifest
from lmkit.training.metrics import MetricsFile, read_metrics
from lmkit.training.model_state import load_optimizer_tensors, plain_model
from lmkit.training.state import restore_rng

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Files = dict[str, bytes]
damage, damage_json, damage_lines, damage_toml = (
    mutations.damage,
    mutations.damage_json,
    mutations.damage_json_lines,
    mutations.damage_toml,
)


class Format:
    """One kind of file, or several that belong together.

    Attributes:
        damages: a file and its mutations; a case applies one of them.
    """

    name: str
    damages: tuple[tuple[Any, ...], ...]

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.good = self.make(folder)

    def make(self, folder: Path) -> Files:
        """Return the undamaged files."""
        raise NotImplementedError

    def read(self, folder: Path, random: Random) -> None:
        """Read what is in `folder`.

        Raises:
            LmkitError: the files are damaged.
            AssertionError: they were read wrongly.
        """
        raise NotImplementedError

    def damaged(self, random: Random) -> Files:
        victim, mutate = random.choice(
            [(name, one) for name, *mutations in self.damages for one in mutations]
        )
        return {**self.good, victim: mutate(random, self.good[victim])}

    def close(self) -> None:
        """No more cases."""


def write(files: Files, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def command(*words: str | Path) -> None:
    """Run a command line; an error that it prints is raised."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        run_command_line([str(word) for word in words])
    for line in err.getvalue().splitlines():
        if line.startswith("error"):
            raise LmkitError("fuzz.refused", line)


class RecipeFile(Format):
    name = "recipe"
    damages = (("recipe.toml", damage_toml, damage_toml, damage),)

    def make(self, folder: Path) -> Files:
        self.shipped = [path.read_bytes() for path in shipped_recipes().values()]
        return {"recipe.toml": self.shipped[0]}

    def damaged(self, random: Random) -> Files:
        self.good = {"recipe.toml": random.choice(self.shipped)}
        return super().damaged(random)

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "recipe.toml"
        recipe = load_recipe(path)
        written = with_our_names(tomllib.loads(path.read_text("utf-8-sig")))
        if "model" in written:
            written["model"] = PRESETS.get(recipe.model.preset, {}) | written["model"]
        assert_inside(written, recipe.model_dump(mode="json"), "")
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


TEXT = "Once upon a time, there was a tiny héron.\n<|endoftext|>\x00 12345 \U0001f426"


def small_tokenizer() -> Tokenizer:
    pairs = "h e| t| t he|\xc3 \xa9|o n|1 2|12 3".encode("latin-1").split(b"|")
    merges = [(a or b" ", b) for a, _, b in (pair.rpartition(b" ") for pair in pairs)]
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(merges)}
    return Tokenizer(vocab=vocab, merges=merges, special_tokens=("<|endoftext|>", "<|pad|>"))


def assert_works(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(tokenizer.encode(TEXT)) < tokenizer.vocab_size


class TokenizerFile(Format):
    name = "tokenizer.json"
    damages = (("tokenizer.json", damage_json, damage_json, damage),)

    def make(self, folder: Path) -> Files:
        small_tokenizer().save(folder / "tokenizer.json")
        return {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "tokenizer.json"
        tokenizer = Tokenizer.load(path)
        content = json.loads(path.read_bytes())
        special = {token["id"]: token["content"] for token in content["added_tokens"]}
        vocab = content["model"]["vocab"].items()
        ordinary = {i: to_bytes(token) for token, i in vocab if special.get(i) != token}
        assert tokenizer.vocab == ordinary | {i: text.encode() for i, text in special.items()}
        assert len(tokenizer.merges) == len(content["model"]["merges"])
        assert {i: text for text, i in tokenizer.special_ids.items()} == special
        assert_works(tokenizer)


class Gpt2Files(Format):
    name = "gpt2 vocab.json + merges.txt"
    damages = (("vocab.json", damage_json, damage), ("merges.txt", damage))

    def make(self, folder: Path) -> Files:
        small_tokenizer().save_gpt2(folder)
        return {name: (folder / name).read_bytes() for name, *_ in self.damages}

    def read(self, folder: Path, random: Random) -> None:
        tokenizer = Tokenizer.load_gpt2(folder / "vocab.json", folder / "merges.txt")
        content = json.loads((folder / "vocab.json").read_bytes())
        assert len(content) == len(tokenizer.vocab)
        for token, token_id in content.items():
            special = tokenizer.special_ids.get(token) == token_id
            assert special or tokenizer.vocab[token_id] == to_bytes(token)
        assert_works(tokenizer)


class TokenFiles(Format):
    name = "token file"
    damages = (
        ("tokens.npy", mutations.damage_npy, mutations.damage_npy, damage),
        ("tokens.json", damage_json, damage),
    )

    def make(self, folder: Path) -> Files:
        self.kinds = []
        for vocab_size in (1000, 1 << 16, 70_000):
            ids = np.random.default_rng(vocab_size).integers(0, vocab_size, 500)
            path = folder / "tokens.npy"
            with TokenFileWriter(path, vocab_size=vocab_size, tokenizer_sha256="a" * 64) as writer:
                writer.append(ids)
                writer.finish(num_documents=3, num_bytes=1500, source_sha256="b" * 64)
            self.kinds.append({name: (folder / name).read_bytes() for name, *_ in self.damages})
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
        assert opened.tokens.tobytes() == data[len(data) - opened.tokens.nbytes :]
        assert len(opened.tokens) == meta["num_tokens"] > 0
        assert int(opened.tokens.max()) < meta["vocab_size"]
        assert min(meta["num_bytes"], meta["num_documents"]) >= 0


TINY = (
    "run.device=cpu", "run.threads=1", "data.source=random", "model.vocab_size=64", "model.context_length=8",
    "model.d_model=16", "model.d_ff=32", "model.num_layers=1", "model.num_heads=2", "train.steps=2",
    "train.batch_size=2",
)  # fmt: skip
STEP = "run/checkpoints/step-00000002"
OPTIMIZER = shard_name(0, 1)


class CheckpointFiles(Format):
    """A file of a checkpoint is changed and the manifest is not: nothing that changed may be read."""

    name = "checkpoint"
    damages = (
        (f"{STEP}/{MODEL}", mutations.damage_safetensors, damage),
        (f"{STEP}/{OPTIMIZER}", mutations.damage_safetensors, damage),
        (f"{STEP}/{STATE}", damage_json, damage),
    )

    def make(self, folder: Path) -> Files:
        logging.getLogger("lmkit").setLevel(logging.ERROR)
        with contextlib.redirect_stderr(io.StringIO()):
            session.train(load_recipe(None, [*TINY, f"run.folder={folder}"]))
        return {f"{STEP}/{path.name}": path.read_bytes() for path in sorted((folder / STEP).iterdir())}

    def read(self, folder: Path, random: Random) -> None:
        checkpoint = open_checkpoint(folder / STEP)
        checkpoint.model_tensors()
        checkpoint.optimizer_tensors()
        for name, good in self.good.items():
            assert (folder / name).read_bytes() == good, f"{name} was changed, and read"
        assert newest_valid(folder / "run" / "checkpoints").path == folder / STEP


class Manifest(CheckpointFiles):
    """The manifest is changed; it has its own checksum."""

    name = "manifest"
    damages = ((f"{STEP}/{MANIFEST}", damage_json, damage),)

    def read(self, folder: Path, random: Random) -> None:
        chosen = newest_valid(folder / "run" / "checkpoints").path
        assert chosen == folder / STEP
        manifest = f"{STEP}/{MANIFEST}"
        assert json.loads((folder / manifest).read_bytes()) == json.loads(self.good[manifest])
        open_checkpoint(chosen).model_tensors()


class ForgedCheckpoint(CheckpointFiles):
    """A checkpoint is changed and gets a manifest that fits: what is read must still be sound."""

    name = "forged checkpoint"

    def read(self, folder: Path, random: Random) -> None:
        step = folder / STEP
        (step / MANIFEST).unlink()
        contents = {path.name: path.read_bytes() for path in step.iterdir()}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        write_manifest(step, {name: FileEntry(digests[name], len(data)) for name, data in contents.items()})
        checkpoint = newest_checkpoint(step)
        model = plain_model(checkpoint, device="cpu")
        weights = plain_tensors(contents[MODEL])
        for name, tensor in model.state_dict().items():
            shape, raw = weights[name]
            assert list(tensor.shape) == shape
            assert tensor.numpy().tobytes() == raw or checkpoint.model_tensors()[name].dtype != tensor.dtype
        validate(checkpoint.state.recipe, origin="state.json")
        optimizer = AdamW(model.parameters())
        shards = checkpoint.all_optimizer_shards()
        load_optimizer_tensors(optimizer, model, shards, checkpoint.state.optimizer_layout, origin=str(step))
        for parameter, state in optimizer.state.items():
            shapes = [value.shape for value in state.values() if hasattr(value, "shape")]
            assert all(shape in (parameter.shape, ()) for shape in shapes)
        restore_rng(checkpoint.state.rng[0], parameter.device)


def plain_tensors(data: bytes) -> dict[str, tuple[list[int], bytes]]:
    """Return name -> (shape, bytes) of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    rest = data[8 + length :]
    return {name: (entry["shape"], rest[slice(*entry["data_offsets"])]) for name, entry in header.items()}


class VerifiedRun(CheckpointFiles):
    """`lmkit verify` on a whole run folder."""

    name = "lmkit verify"
    damages = (
        ("run/recipe.toml", damage_toml, damage),
        ("run/environment.json", damage),
        ("run/metrics.jsonl", damage, damage_lines),
        (f"{STEP}/{MODEL}", damage),
        (f"{STEP}/{MANIFEST}", damage_json, damage),
        (f"{STEP}/{STATE}", damage_json),
    )

    def make(self, folder: Path) -> Files:
        files = super().make(folder)
        names = ("recipe.toml", "environment.json", "metrics.jsonl")
        return files | {f"run/{name}": (folder / "run" / name).read_bytes() for name in names}

    def read(self, folder: Path, random: Random) -> None:
        from lmkit.training.verify import verify_path

        result = verify_path(folder / "run")
        assert all("\n" not in str(check) for check in result.checks)
        if not result.ok:
            raise LmkitError("fuzz.refused", "a check failed")
        for name in (f"{STEP}/{MODEL}", f"{STEP}/{STATE}"):
            assert (folder / name).read_bytes() == self.good[name], f"{name} was changed, and verified"


class MetricsLines(Format):
    name = "metrics.jsonl"
    damages = (("metrics.jsonl", damage, damage, damage_lines),)

    def make(self, folder: Path) -> Files:
        records: list[dict[str, Any]] = []
        for step in range(1, 21):
            records.append({"kind": "train", "step": step, "loss": 4.0 / step, "lr": 1e-3, "seconds": 0.5})
            if step % 5 == 0:
                records.append({"kind": "valid", "step": step, "loss": 4.5 / step, "perplexity": 9.0})
        return {"metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records).encode()}

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "metrics.jsonl"
        records = read_metrics(path)
        good = [json.loads(line) for line in self.good["metrics.jsonl"].splitlines()]
        lines = set(path.read_bytes().split(b"\n"))
        untouched = [record for record in good if json.dumps(record).encode() in lines]
        assert [record for record in records if record in untouched] or not untouched
        MetricsFile(path, after_step=12).close()
        assert [r["step"] for r in read_metrics(path)] == [r["step"] for r in records if r["step"] <= 12]


class Stages(Format):
    name = "stages.json"
    damages = (("stages.json", damage_json, damage),)

    def make(self, folder: Path) -> Files:
        run = self._pipeline(folder)
        for stage in ("corpus", "tokenizer"):
            run.record.finish(stage, {"train": [Path("train.txt")], "valid": []})
        return {"stages.json": (folder / "stages.json").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        run = self._pipeline(folder)
        for stage in STAGES:
            run.record.is_finished(stage)
            if run.record.was_made(stage):
                assert all(
                    isinstance(path, Path) for paths in run.record.outputs(stage).values() for path in paths
                )
        run.record.finish("train", {})
        assert self._pipeline(folder).record.is_finished("train")

    def _pipeline(self, folder: Path) -> Pipeline:
        recipe = load_recipe("quickstart", flags={"run.folder": str(folder.parent), "run.name": folder.name})
        return Pipeline(recipe, progress=lambda *_: None)


class Corpus(Format):
    name = "corpus .jsonl and .txt"
    damages = (("corpus.jsonl", damage, damage_lines), ("corpus.txt", damage))

    def make(self, folder: Path) -> Files:
        documents = [f"Story {i}: thé cat sat. \U0001f426\n\nThe end." for i in range(20)]
        lines = (json.dumps({"text": text, "id": 1}) + "\n" for text in documents)
        return {
            "corpus.jsonl": "".join(lines).encode(),
            "corpus.txt": "<|endoftext|>\n".join(documents).encode(),
        }

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
                assert written == "".join(text + "<|endoftext|>\n" for text in texts).encode(
                    "utf-8", "replace"
                )


ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "h200"


class Results(Format):
    """Result files of benches and profiles, as `lmkit compare` and `lmkit report` read them."""

    name = "results"
    damages = ()

    def make(self, folder: Path) -> Files:
        row = {"bench": "attention", "kernel": "sdpa", "median_ms": 1.5, "samples_ms": [1.0, 2.0]}
        self.kinds: dict[str, bytes] = {"rows.jsonl": (json.dumps(row) + "\n").encode() * 2}
        for pattern in ("*.jsonl", "profile_summary.json", "environment.json"):
            for path in sorted(ARTIFACTS.rglob(pattern)):
                lines = path.read_bytes().splitlines(keepends=True)
                self.kinds[str(path.relative_to(ARTIFACTS))] = b"".join(
                    lines[:14] if path.suffix == ".jsonl" else lines
                )
        write(self.kinds, folder)
        command(
            "compare", folder / "rows.jsonl", folder / "rows.jsonl"
        )  # what is imported and evaluated at first
        command("report", folder, "--output", folder / "reports")  # use belongs to no case
        return self.kinds

    def damaged(self, random: Random) -> Files:
        name = random.choice(list(self.kinds))
        mutate = random.choice((damage_lines if name.endswith(".jsonl") else damage_json, damage))
        return {name: mutate(random, self.kinds[name])}

    def read(self, folder: Path, random: Random) -> None:
        if random.random() < 0.5:
            command("report", folder, "--output", folder / "reports")
        for path in folder.rglob("*.jsonl"):
            command("compare", path, path)


class ChromeTrace(Format):
    name = "chrome trace"
    damages = (("trace.json", damage_json, damage_json, damage),)

    def make(self, folder: Path) -> Files:
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 10}]
        for start in (0.0, 1000.5):
            gpu = {"pid": 0, "args": {"correlation": int(start) + 1, "device": 0}}
            launch = {"args": {"correlation": int(start) + 1}}
            for category, name, after, duration, more in (
                ("user_annotation", "step", 0, 1000, {}),
                ("user_annotation", "forward", 100, 200.25, {}),
                ("cpu_op", "aten::linear", 100, 100, {}),
                ("cpu_op", "aten::mm", 120, 60, {}),
                ("cuda_runtime", "cudaLaunchKernel", 130, 10, launch),
                ("kernel", "gemm", 150, 100, gpu),
                ("gpu_memset", "Memset", 950, 50, gpu),
            ):
                times = {"ts": start + after, "dur": duration, "pid": 10, "tid": 1}
                events.append({"ph": "X", "cat": category, "name": name, **times, **more})
        return {"trace.json": json.dumps({"traceEvents": events}).encode()}

    def read(self, folder: Path, random: Random) -> None:
        trace = read_chrome_trace(folder / "trace.json")
        events = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
        complete = [event.get("cat") for event in events if event.get("ph") == "X"]
        work = sum(category in ("kernel", "gpu_memcpy", "gpu_memset") for category in complete)
        assert len(trace.work or ()) == work
        assert sum(calls for calls, _ in trace.ops.values()) == complete.count("cpu_op")
        assert_sound(trace)


def assert_sound(trace: Trace) -> None:
    for entry in (*trace.ranges, *(trace.calls or ()), *(trace.work or ())):
        assert isinstance(entry.name, str)
        assert type(entry.start) is type(entry.end) is int
        assert entry.start <= entry.end
    summary = summarize(trace)
    json.dumps(summary, allow_nan=False)
    report_of(summary).encode()


class NsysDatabase(Format):
    name = "nsys database"
    damages = (("report.sqlite", mutations.damage_sqlite, mutations.damage_sqlite, damage),)

    def make(self, folder: Path) -> Files:
        path, thread = folder / "report.sqlite", 77 << 24 | 1
        rows = "".join(
            f"INSERT INTO NVTX_EVENTS VALUES ({start}, {start + 900}, 59, NULL, 3, {thread});"
            f"INSERT INTO NVTX_EVENTS VALUES ({start + 10}, {start + 90}, 59, 'forward', NULL, {thread});"
            f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({start + 20}, {start + 30}, {thread}, {start + 1}, 1);"
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({start + 40}, {start + 200}, 0, {start + 1}, {77 << 24},"
            " 2, NULL);"
            for start in (0, 1000)
        )
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.executescript(
                "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,"
                " globalTid INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,"
                " correlationId INTEGER, nameId INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,"
                " correlationId INTEGER, globalPid INTEGER, shortName INTEGER, graphNodeId INTEGER);"
                "INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel'), (2, 'gemm'), (3, 'step');" + rows
            )
        return {"report.sqlite": path.read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        assert_sound(read_nsys_database(folder / "report.sqlite"))


CONTENT = Random(1).randbytes(5_000) + b"text\n" * 3_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PLAIN = Dataset("http://unused", RemoteFile("a.txt", "a.txt", 100_000), RemoteFile("a.txt", "a.txt", 100_000))
ZIPPED = Dataset("http://unused", RemoteFile("a.txt", "a.gz", 100_000), RemoteFile("a.txt", "a.gz", 100_000))


def response(request: bytes, content: bytes) -> bytes:
    """Return the answer of a healthy server: all of the content, or the part that is asked for."""
    wanted = re.search(rb"Range: bytes=(\d+)-", request)
    start = int(wanted[1]) if wanted else 0
    if start >= len(content):
        return b"HTTP/1.1 416 No such range\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    status = "HTTP/1.1 200 OK"
    if start:
        status = f"HTTP/1.1 206 Part\r\nContent-Range: bytes {start}-{len(content) - 1}/{len(content)}"
    head = (
        f'{status}\r\nETag: "{DIGEST}"\r\nContent-Length: {len(content) - start}\r\nConnection: close\r\n\r\n'
    )
    return head.encode() + content[start:]


class Download(Format):
    """What an interrupted download left is changed; the server is healthy and knows the digest."""

    name = "partial download"
    damages = (("a.txt.partial", damage), ("a.txt.partial.version.json", damage_json, damage))
    server: socketserver.ThreadingTCPServer | None = None

    def make(self, folder: Path) -> Files:
        version = {"validator": f'"{DIGEST}"', "size": len(CONTENT), "sha256": DIGEST}
        return {
            "a.txt.partial": CONTENT[:7_000],
            "a.txt.partial.version.json": json.dumps(version).encode(),
        }

    def url(self) -> str:
        """Start a server on this machine that answers with `self.answer`."""
        if self.server is None:

            class Handler(socketserver.StreamRequestHandler):
                def handle(handler) -> None:
                    request = b"".join(iter(handler.rfile.readline, b"\r\n"))
                    with contextlib.suppress(ConnectionError):
                        handler.wfile.write(self.answer(request))

            self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
            self.server.daemon_threads = True
            threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: bytes) -> bytes:
        return response(request, CONTENT)

    def read(self, folder: Path, random: Random) -> None:
        paths = download_dataset(PLAIN, folder, base_url=self.url(), retry_wait_s=0)
        assert [path.read_bytes() for path in paths] == [CONTENT] * 2
        assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}

    def close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()


class FinishedDownload(Download):
    """What was downloaded is changed, or its recorded digest."""

    name = "finished download"
    damages = (("a.txt", damage), ("a.txt.sha256", damage))

    def make(self, folder: Path) -> Files:
        return {"a.txt": CONTENT, "a.txt.sha256": f"{DIGEST}  a.txt\n".encode()}


class ServerAnswers(Download):
    """The server's answers are changed, headers and body."""

    name = "server answers"
    damages = (("answer", damage, mutations.damage_http_head),)

    def make(self, folder: Path) -> Files:
        return {"answer": response(b"", CONTENT)}

    def answer(self, request: bytes) -> bytes:
        return self.answered

    def read(self, folder: Path, random: Random) -> None:
        self.answered = (folder / "answer").read_bytes()
        paths = download_dataset(PLAIN, folder / "data", base_url=self.url(), retry_wait_s=0)
        if f'\netag: "{DIGEST}"\r\n'.encode() in self.answered.partition(b"\r\n\r\n")[0].lower():
            assert [path.read_bytes() for path in paths] == [CONTENT] * 2


class Archive(Format):
    """An archive is changed before its digest was recorded: gzip's own checksum has to notice."""

    name = "gzip archive"
    damages = (("a.gz", damage, mutations.damage_archive),)

    def make(self, folder: Path) -> Files:
        return {"a.gz": gzip.compress(CONTENT, mtime=0)}

    def read(self, folder: Path, random: Random) -> None:
        archive = (folder / "a.gz").read_bytes()
        (folder / "a.gz.sha256").write_text(f"{hashlib.sha256(archive).hexdigest()}  a.gz\n")
        paths = download_dataset(ZIPPED, folder, base_url="http://127.0.0.1:9", retry_wait_s=0)
        assert [path.read_bytes() for path in paths] == [gzip.decompress(archive)] * 2
        assert {path.name for path in folder.iterdir()} == {".lock", "a.txt", "a.txt.sha256"}


FORMATS: dict[str, Callable[[Path], Format]] = {
    form.name: form
    for form in (
        RecipeFile, TokenizerFile, Gpt2Files, TokenFiles, CheckpointFiles, Manifest, ForgedCheckpoint, VerifiedRun,
        MetricsLines, Stages, Corpus, Results, ChromeTrace, NsysDatabase, Download, FinishedDownload, ServerAnswers,
        Archive,
    )
}  # fmt: skip
