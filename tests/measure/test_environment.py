import getpass
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import lmkit
from lmkit.measure import environment
from lmkit.measure.environment import describe_environment, device_name, git_state, gpu_state, usable_cpus


def test_the_environment_is_json_says_what_matters_and_does_not_name_this_machine():
    environment = describe_environment()
    text = json.dumps(environment)
    assert json.loads(text) == environment
    # The distribution's version may lack the build, "+cu132".
    assert environment["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert environment["cpu"]["usable"] == usable_cpus()
    assert environment["cpu"]["memory_bytes"] > 10**8
    assert len(environment["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for secret in (socket.gethostname(), str(Path(lmkit.__file__).parent), os.getcwd(), str(Path.home())):
        assert secret not in text or secret == "/"
    assert f"/{getpass.getuser()}/" not in text


def test_device_name_and_state_without_a_gpu():
    assert device_name("cpu")
    if not torch.cuda.is_available():
        assert gpu_state() == []


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkouts(tmp_path, monkeypatch):
    """Two repositories; lmkit runs from the first, and the second has changes."""
    for name in ("ours", "theirs"):
        package = tmp_path / name / "lmkit" / "measure"
        package.mkdir(parents=True)
        (package / "environment.py").write_text(name)
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", name)):
            git(tmp_path / name, *words)
    (tmp_path / "theirs" / "lmkit" / "measure" / "environment.py").write_text("changed")
    monkeypatch.setattr(
        environment, "__file__", str(tmp_path / "ours" / "lmkit" / "measure" / "environment.py")
    )
    return tmp_path / "ours", tmp_path / "theirs"


VARIABLES = {
    "GIT_DIR": ".git",
    "GIT_WORK_TREE": "",
    "GIT_INDEX_FILE": ".git/index",
    "GIT_OBJECT_DIRECTORY": ".git/objects",
    "GIT_COMMON_DIR": ".git",
}


@pytest.mark.parametrize("names", [[name] for name in VARIABLES] + [list(VARIABLES)], ids="+".join)
def test_variables_of_git_lead_to_no_other_repository(names, checkouts, monkeypatch):
    ours, theirs = checkouts
    commit = git(ours, "rev-parse", "HEAD")
    for name in names:
        monkeypatch.setenv(name, str(theirs / VARIABLES[name]))
    assert git_state() == {"commit": commit, "dirty": False}
    (ours / "lmkit" / "measure" / "environment.py").write_text("changed")
    assert git_state() == {"commit": commit, "dirty": True}


def test_a_broken_repository_is_not_its_parent(checkouts):
    """git looks for another one in the folders above."""
    ours, _ = checkouts
    git(ours.parent, "init", "-q")
    git(ours.parent, "commit", "-q", "--allow-empty", "-m", "parent")
    shutil.rmtree(ours / ".git")
    (ours / ".git").mkdir()
    assert git_state() is None
