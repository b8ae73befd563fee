"""Files are data: nothing in lmkit unpickles, evaluates or unpacks what it reads."""

import ast
import hashlib
import io
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import formats
import run_formats

import lmkit
from lmkit.errors import LmkitError
from lmkit.training.checkpoint import MANIFEST, MODEL, FileEntry, open_checkpoint, shard_name, write_manifest
from lmkit.training.weights import weights_of

RUNS_CODE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "torch.jit.load", "torch.hub.load",
    "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "dill.load", "yaml.load", "eval", "exec",
    "runpy.run_path", "np.load", "np.fromfile",
}  # fmt: skip
UNPACKS = {"extractall", "extract", "unpack_archive"}


def dangers(source):
    """(line, what): calls that run or unpack what a file holds, and switches that allow it. `exec` of a literal runs
    no file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_literal = name == "exec" and all(isinstance(argument, ast.Constant) for argument in node.args)
        if (name in RUNS_CODE and not is_literal) or name.rpartition(".")[2] in UNPACKS:
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


def test_no_module_runs_what_a_file_holds():
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
def test_the_search_finds_what_is_planted(planted):
    assert dangers(planted)


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return (Path.mkdir, (self.sentinel,))


def pickle_in_safetensors(trap):
    """A whole safetensors file whose tensor is a pickle."""
    data = pickle.dumps(trap)
    header = json.dumps(
        {"weight": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + data


def torch_file(trap):
    buffer = io.BytesIO()
    torch.save({"weight": trap}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("make", [pickle.dumps, torch_file, pickle_in_safetensors])
@pytest.mark.parametrize("name", [MODEL, shard_name(0, 1)])
def test_a_pickle_in_a_checkpoint_with_a_fitting_manifest_is_not_executed(make, name, tmp_path):
    sentinel, run = tmp_path / "sentinel", tmp_path / "run"
    formats.write(run_formats.tiny_run() | {f"{run_formats.STEP}/{name}": make(Trap(sentinel))}, run)
    step = run / run_formats.STEP
    (step / MANIFEST).unlink()
    contents = formats.content_of(step)
    write_manifest(
        step, {n: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for n, data in contents.items()}
    )
    checkpoint = open_checkpoint(step)
    if name != MODEL and make is pickle_in_safetensors:
        assert checkpoint.optimizer_tensors()["weight"].dtype == torch.uint8  # bytes, no more
    else:
        with pytest.raises(LmkitError):
            weights_of(checkpoint).model("cpu") if name == MODEL else checkpoint.optimizer_tensors()
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(Trap(sentinel)))  # the trap itself works
    assert sentinel.exists()
