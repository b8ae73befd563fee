"""Formats of run folders."""

import contextlib
import functools
import hashlib
import io
import json
import logging
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from formats import TEXT, Files, Format, content_of, form, safetensors_header
from mutations import damage
from tiny import RANDOM_TOKENS, TINY

from lmkit.cli.pipeline import STAGES, StageRecord
from lmkit.errors import LmkitError
from lmkit.optim.adamw import AdamW
from lmkit.recipe.load import load_recipe, validate
from lmkit.training import checkpoint as ckpt
from lmkit.training import session
from lmkit.training.metrics import MetricsFile, read_metrics
from lmkit.training.resume import load_optimizer_tensors
from lmkit.training.verify import verify_path
from lmkit.training.weights import weights_of

STEP = "run/checkpoints/step-00000002"
TENSORS = {f"{STEP}/{name}": (safetensors_header, damage) for name in (ckpt.MODEL, ckpt.shard_name(0, 1))}


@functools.cache
def tiny_run() -> Files:
    folder = Path(tempfile.mkdtemp())
    log = logging.getLogger("lmkit")
    before = log.level
    log.setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        changes = (f"run.folder={folder}", "train.steps=2", "train.batch_size=2")
        session.train(load_recipe(None, [*TINY, *RANDOM_TOKENS, *changes]))
    log.setLevel(before)
    names = ("recipe.toml", "environment.json", "metrics.jsonl")
    files = [*(folder / "run" / name for name in names), *(folder / STEP).iterdir()]
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    shutil.rmtree(folder)
    return contents


@form("checkpoint")
def checkpoint(folder: Path) -> Format:
    """A file is changed and the manifest is not, or the manifest, which has its own checksum: nothing is read."""

    def read(folder: Path, good: Files, random: Random) -> None:
        opened = ckpt.open_checkpoint(ckpt.newest_valid(folder / "run" / "checkpoints").path)
        dict(weights_of(opened))
        opened.optimizer_tensors()
        for name in (*TENSORS, f"{STEP}/{ckpt.STATE}"):
            assert (folder / name).read_bytes() == good[name], f"{name} was changed, and read"
        manifest = f"{STEP}/{ckpt.MANIFEST}"
        assert json.loads((folder / manifest).read_bytes()) == json.loads(good[manifest])

    kinds = TENSORS | dict.fromkeys((f"{STEP}/{ckpt.STATE}", f"{STEP}/{ckpt.MANIFEST}"), TEXT)
    return Format([tiny_run()], kinds, read)


@form("forged checkpoint")
def forged_checkpoint(folder: Path) -> Format:
    """A file is changed and the manifest fits: what is read must still be sound."""

    def read(folder: Path, good: Files, random: Random) -> None:
        step = folder / STEP
        (step / ckpt.MANIFEST).unlink()
        contents = content_of(step)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        entries = {
            name: ckpt.FileEntry(sha256=digests[name], bytes=len(data)) for name, data in contents.items()
        }
        ckpt.write_manifest(step, entries)
        opened = ckpt.newest_checkpoint(step)
        given = weights_of(opened)
        model = given.model("cpu")
        weights = plain_tensors(contents[ckpt.MODEL])
        for name, tensor in model.state_dict().items():
            shape, raw = weights[name]
            assert list(tensor.shape) == shape
            assert tensor.numpy().tobytes() == raw or given.specs[name].dtype != tensor.dtype
        validate(opened.state.recipe, origin="state.json")
        optimizer = AdamW(model.parameters())
        shards, layout = opened.all_optimizer_shards(), opened.state.optimizer_layout
        load_optimizer_tensors(optimizer, model, shards, layout, origin=str(step))
        for parameter, state in optimizer.state.items():
            shapes = [value.shape for value in state.values() if hasattr(value, "shape")]
            assert all(shape in (parameter.shape, ()) for shape in shapes)
        ckpt.restore_rng(opened.state.rng[0], parameter.device)

    return Format([tiny_run()], TENSORS | {f"{STEP}/{ckpt.STATE}": TEXT}, read)


def plain_tensors(data: bytes) -> dict[str, tuple[list[int], bytes]]:
    """Return name -> (shape, bytes) of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    rest = data[8 + length :]
    return {name: (entry["shape"], rest[slice(*entry["data_offsets"])]) for name, entry in header.items()}


@form("lmkit verify")
def verified_run(folder: Path) -> Format:
    def read(folder: Path, good: Files, random: Random) -> None:
        result = verify_path(folder / "run")
        assert all("\n" not in str(check) for check in result.checks)
        if not result.ok:
            raise LmkitError("fuzz.refused", "a check failed")
        for name in (*TENSORS, f"{STEP}/{ckpt.STATE}"):
            assert (folder / name).read_bytes() == good[name], f"{name} was changed, and verified"

    good = tiny_run()
    return Format([good], {name: TENSORS.get(name, TEXT) for name in good}, read)


@form("metrics.jsonl")
def metrics(folder: Path) -> Format:
    records: list[dict[str, Any]] = []
    for step in range(1, 21):
        records.append({"kind": "train", "step": step, "loss": 4.0 / step, "lr": 1e-3, "seconds": 0.5})
        if step % 5 == 0:
            records.append({"kind": "valid", "step": step, "loss": 4.5 / step, "perplexity": 9.0})

    def read(folder: Path, good: Files, random: Random) -> None:
        path = folder / "metrics.jsonl"
        found = read_metrics(path)
        lines = set(path.read_bytes().split(b"\n"))
        untouched = [record for record in records if json.dumps(record).encode() in lines]
        assert [record for record in found if record in untouched] or not untouched
        MetricsFile(path, after_step=12).close()
        assert [r["step"] for r in read_metrics(path)] == [r["step"] for r in found if r["step"] <= 12]

    text = "".join(json.dumps(record) + "\n" for record in records)
    return Format([{"metrics.jsonl": text.encode()}], {"metrics.jsonl": TEXT}, read)


@form("stages.json")
def stages(folder: Path) -> Format:
    def record_of(folder: Path) -> Any:
        flags = {"run.folder": str(folder.parent), "run.name": folder.name}
        return StageRecord(folder, load_recipe("quickstart", flags=flags))

    def read(folder: Path, good: Files, random: Random) -> None:
        record = record_of(folder)
        for stage in STAGES:
            record.damaged(stage)
            if record.entries.get(stage, {}).get("done") is True:
                outputs = [path for paths in record.outputs(stage).values() for path in paths]
                assert all(isinstance(path, Path) for path in outputs)
        record.finish("train", {})
        assert record_of(folder).damaged("train") == []

    for stage in ("corpus", "tokenizer"):
        record_of(folder).finish(stage, {"train": [Path("train.txt")], "valid": []})
    return Format([{"stages.json": (folder / "stages.json").read_bytes()}], {"stages.json": TEXT}, read)


# ---- results of benches
