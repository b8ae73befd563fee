"""Little memory under the real commands (`ulimit -v`): bounded where it has to be, one line where it cannot be."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program

pytestmark = pytest.mark.full
Limited = Callable[..., "subprocess.CompletedProcess[str]"]
LINE_BYTES = 200_000_000
# Address space of Python, numpy with its BLAS threads, and two workers; a copy of the line would not fit beside it.
ROOM_KB = 270_000


@pytest.fixture
def limited(tmp_path: Path) -> Limited:
    """Runs lmkit with that many kilobytes of address space."""

    def run(kilobytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = f'ulimit -v {kilobytes}; exec {sys.executable} -m lmkit "$@"'
        # Threads and the arenas of malloc take address space by the number of CPUs.
        return run_program("sh", "-c", script, "lmkit", *arguments, cwd=tmp_path, MALLOC_ARENA_MAX="2")

    return run


@pytest.fixture
def tokenizer(tmp_path: Path, limited: Limited) -> str:
    (tmp_path / "small.txt").write_text("one fish two fish red fish blue fish " * 50)
    done = limited(1_000_000, "tokenizer", "train", "small.txt", "t.json", "--vocab-size", "270")
    assert done.returncode == 0, done.stderr
    return "t.json"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on address space")
def test_fault_23_one_line_of_200_mb_in_bounded_memory(limited, tokenizer, tmp_path):
    line = b"one fish two fish, red fish blue fish; it's a fish of 12 colours " * 1000
    with open(tmp_path / "line.txt", "wb") as file:
        for _ in range(-(-LINE_BYTES // len(line))):
            file.write(line)
    workers = ("--workers", "2")
    encoded = limited(ROOM_KB, "data", "encode", "line.txt", "x.npy", "--tokenizer", tokenizer, *workers)
    assert encoded.returncode == 0, encoded.stderr
    trained = limited(ROOM_KB, "tokenizer", "train", "line.txt", "y.json", "--vocab-size", "280", *workers)
    assert trained.returncode == 0, trained.stderr
    # The limit is real: as much as the line itself more, and it would be reached.
    copy = f"import numpy; bytearray({LINE_BYTES})"
    taken = run_program("sh", "-c", f"ulimit -v {ROOM_KB}; exec {sys.executable} -c '{copy}'", cwd=tmp_path)
    assert "MemoryError" in taken.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on address space")
def test_a_worker_that_runs_out_of_memory_ends_the_command_in_one_line(limited, tokenizer, tmp_path):
    """One word of 20 MB cannot be cut into chunks: it takes more than there is."""
    letters = random.Random(29).choices(b"abcdefgh", k=20_000_000)
    (tmp_path / "word.txt").write_bytes(bytes(letters))
    before = sorted(tmp_path.iterdir())
    for command in (
        ("data", "encode", "word.txt", "x.npy", "--tokenizer", tokenizer),
        ("tokenizer", "train", "word.txt", "y.json", "--vocab-size", "280"),
    ):
        done = limited(ROOM_KB, *command, "--workers", "2")
        assert done.returncode == 1, done.stderr
        error, hint = done.stderr.splitlines()[-2:]
        assert error.startswith("error[memory.exhausted]: ")
        assert hint.startswith("hint: ")
        assert "Traceback" not in done.stderr
        assert sorted(tmp_path.iterdir()) == before
