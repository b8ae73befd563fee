"""Files are data: nothing in lmkit unpickles, evaluates or unpacks what it reads."""

import ast
from pathlib import Path

import lmkit

RUNS_CODE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "torch.jit.load", "torch.hub.load",
    "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "dill.load", "yaml.load", "eval", "exec",
    "runpy.run_path", "np.load", "np.fromfile",
}  # fmt: skip
UNPACKS = {"extractall", "extract", "unpack_archive"}
# Annotations of lmkit's own recipes and benches, so that help imports no torch.
OWN_SOURCE = ("recipe/keys.py", "eval")


def dangers(source):
    """(line, what): calls that run or unpack what a file holds, and switches that allow it. `exec` of a literal runs
    no file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch", "marshal", "numpy"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [(node.lineno, name) for name in sorted(names & RUNS_CODE)]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_literal = name == "exec" and all(isinstance(argument, ast.Constant) for argument in node.args)
        if (name in RUNS_CODE and not is_literal) or name.rpartition(".")[2] in UNPACKS:
            found.append((node.lineno, name))
        options = [(keyword.arg, ast.unparse(keyword.value)) for keyword in node.keywords]
        unsafe = [pair for pair in options if pair in (("allow_pickle", "True"), ("weights_only", "False"))]
        found += [(node.lineno, f"{key}={value}") for key, value in unsafe]
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
    assert list(found) == [OWN_SOURCE]
