"""Files are data: nothing in lmkit unpickles, evaluates or unpacks what it reads."""

from __future__ import annotations

import ast
import hashlib
import io
import pickle
from pathlib import Path

import pytest
import torch

import lmkit
from lmkit.errors import LmkitError
from lmkit.recipe.load import load_recipe
from lmkit.training import session
from lmkit.training.checkpoint import MANIFEST, MODEL, FileEntry, open_checkpoint, shard_name
from lmkit.training.checkpoint_writer import write_manifest
from lmkit.training.model_state import plain_model

RUNS_CODE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "torch.jit.load", "torch.hub.load",
    "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "dill.load", "yaml.load", "eval", "exec",
    "runpy.run_path", "np.load", "np.fromfile",
}  # fmt: skip
UNPACKS = {"extractall", "extract", "unpack_archive"}


def dangers(source: str) -> list[tuple[int, str]]:
    """(line, what): calls that run or unpack what a file holds, and switches that allow it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in RUNS_CODE or name.rpartition(".")[2] in UNPACKS:
            found.append((node.lineno, name))
        for keyword in node.keywords:
            if (keyword.arg, ast.unparse(keyword.value)) in (
                ("allow_pickle", "True"),
                ("weights_only", "False"),
            ):
                found.append((node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch", "marshal", "numpy"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [(node.lineno, name) for name in sorted(names & RUNS_CODE)]
    return found


def test_no_module_runs_what_a_file_holds() -> None:
    package = Path(lmkit.__file__).parent
    modules = sorted(package.rglob("*.py"))
    assert len(modules) > 100
    found = {
        (str(module.relative_to(package)), what): line
        for module in modules
        for line, what in dangers(module.read_text("utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    "planted",
    [
        "import torch\ntorch.load(path)", "import pickle\npickle.loads(data)", "from pickle import loads",
        "np.load(path)", "np.memmap(path, allow_pickle=True)", "eval(text)", "torch.load(path, weights_only=False)",
        "tarfile.open(path).extractall(folder)", "shutil.unpack_archive(path)", "pickle.Unpickler(file).load()",
    ],
)  # fmt: skip
def test_the_search_finds_what_is_planted(planted: str) -> None:
    assert dangers(planted)


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple:
        return (Path.mkdir, (self.sentinel,))


def raw_pickle(trap: Trap) -> bytes:
    return pickle.dumps(trap)


def torch_file(trap: Trap) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": trap}, buffer)
    return buffer.getvalue()


def pickle_in_safetensors(trap: Trap) -> bytes:
    """A whole safetensors file whose tensor and metadata are pickles."""
    data = pickle.dumps(trap)
    header = (
        '{"__metadata__":{"x":"'
        + data.hex()
        + '"},"weight":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    )
    text = (header % (len(data), len(data))).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = (
        "run.device=cpu", "run.threads=1", "data.source=random", "model.vocab_size=64", "model.context_length=8",
        "model.d_model=16", "model.d_ff=32", "model.num_layers=1", "model.num_heads=2", "train.steps=1",
        "train.batch_size=2", f"run.folder={folder}",
    )  # fmt: skip
    session.train(load_recipe(None, settings))
    return folder / "run" / "checkpoints" / "step-00000001"


@pytest.mark.parametrize("make", [raw_pickle, torch_file, pickle_in_safetensors])
@pytest.mark.parametrize("name", [MODEL, shard_name(0, 1)])
def test_a_pickle_in_a_checkpoint_with_a_fitting_manifest_is_not_executed(
    make, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    sentinel = tmp_path / "sentinel"
    good = (checkpoint / name).read_bytes()
    data = make(Trap(sentinel))
    try:
        (checkpoint / name).write_bytes(data)
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != MANIFEST}
        entries = {
            n: FileEntry(hashlib.sha256(content).hexdigest(), len(content)) for n, content in files.items()
        }
        write_manifest(checkpoint, entries)
        if name == MODEL:
            with pytest.raises(LmkitError, match=name):
                plain_model(open_checkpoint(checkpoint), device="cpu")
        elif make is pickle_in_safetensors:
            assert (
                open_checkpoint(checkpoint).optimizer_tensors()["weight"].dtype == torch.uint8
            )  # bytes, no more
        else:
            with pytest.raises(LmkitError, match="not a safetensors file"):
                open_checkpoint(checkpoint).optimizer_tensors()
    finally:
        (checkpoint / name).write_bytes(good)
    assert not sentinel.exists()
    pickle.loads(raw_pickle(Trap(sentinel)))  # the trap itself works
    assert sentinel.exists()
