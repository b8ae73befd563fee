"""Full and read-only disks under the real command: a small tmpfs in a mount namespace of its own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program
from tiny import RANDOM_TOKENS, tiny_recipe

RECIPE = tiny_recipe(
    *RANDOM_TOKENS,
    *('run.folder="disk"', "train.steps=20", "train.batch_size=2"),
    *("checkpoint.interval=1", "checkpoint.keep_last=20"),
)
pytestmark = pytest.mark.full
OnDisk = Callable[[str, str], list[str]]


@pytest.fixture
def on_disk(tmp_path: Path) -> OnDisk:
    """Mounts a tmpfs on `disk` and runs shell lines beside it; `lmkit` is the command. Returns what they print."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "tiny.toml").write_text(RECIPE)

    def run(options: str, script: str) -> list[str]:
        program = (
            f"mount -t tmpfs -o {options} none disk && echo mounted\n"
            f'lmkit() {{ {sys.executable} -m lmkit "$@" 2>&1; echo "-> $?"; }}\n{script}\n'
        )
        for namespace in (["--user", "--map-root-user", "--mount"], ["--mount"]):
            done = run_program("unshare", *namespace, "sh", "-c", program, cwd=tmp_path)
            if done.stdout.startswith("mounted"):
                assert "Traceback" not in done.stdout
                return done.stdout.splitlines()[1:]
        pytest.skip("no mount namespace for a small disk: neither root nor user namespaces")

    return run


def test_fault_48_training_on_a_disk_that_fills_up_keeps_what_was_saved(on_disk):
    lines = on_disk(
        "size=512k", "lmkit train tiny.toml; ls -a disk/run disk/run/checkpoints; lmkit verify disk/run"
    )
    failed = lines.index("-> 1")
    error, hint = lines[failed - 2 : failed]
    assert "]: disk/run/checkpoints/step-" in error
    assert error.endswith("no space left on device")
    assert "earlier checkpoints are intact" in hint
    assert not any(line.endswith(".lmkit-partial") for line in lines)
    assert sum(line.startswith("step-0") for line in lines) >= 2
    assert lines[-1] == "-> 0"


def test_fault_48_other_files_that_do_not_fit_leave_nothing(on_disk):
    lines = on_disk(
        "size=64k",
        "lmkit data synth story.txt --size-mb 1; lmkit tokenizer train story.txt story.json --vocab-size 260\n"
        "echo begin; lmkit data synth disk/s.txt --size-mb 1; lmkit data encode story.txt disk/t.npy --tokenizer "
        "story.json; ls -A disk; echo end; lmkit tokenizer train story.txt disk/t.json --vocab-size 4000; ls -A disk",
    )
    tried = lines[lines.index("begin") + 1 :]
    # Stories are refused before they fill the disk.
    assert [line for line in tried if line.startswith("->")] == ["-> 2", "-> 1", "-> 1"]
    assert sum("no space left on device" in line for line in tried) == 2
    assert sum(line.startswith("error") and "]: disk/" in line for line in tried) == 3, tried
    assert all(line.startswith(("error", "hint: ", "-> ", "end", "warning: ")) for line in tried), tried


def test_fault_50_a_read_only_disk_is_refused_before_training(on_disk):
    lines = on_disk("ro,size=64k", "lmkit train tiny.toml; ls -A disk")
    error, hint, code = lines
    assert "]: disk/run: " in error
    assert "read-only file system" in error
    assert "--set run.folder=" in hint
    assert code == "-> 2"
