import getpass
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import torch

import lmkit
from lmkit.measure import environment
from lmkit.measure.environment import describe_environment, git_state, usable_cpus


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


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_that_lmkit_runs_from(tmp_path, monkeypatch):
    """git looks for another repository in the folders above."""
    package = tmp_path / "ours" / "lmkit" / "measure"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("ours")
    for folder in (tmp_path, tmp_path / "ours"):
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "all")):
            git(folder, *words)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    commit = git(tmp_path / "ours", "rev-parse", "HEAD")
    assert git_state() == {"commit": commit, "dirty": False}
    (package / "environment.py").write_text("changed")
    assert git_state() == {"commit": commit, "dirty": True}
    shutil.rmtree(tmp_path / "ours" / ".git")
    (tmp_path / "ours" / ".git").mkdir()
    assert git_state() is None
