"""Little memory under the real commands (`ulimit -v`): bounded where it has to be, one line where it cannot be."""

import sys

import pytest
from programs import run_program

pytestmark = pytest.mark.full
LINE_BYTES = 200_000_000
# Address space of Python, numpy with its BLAS threads, and two workers; a copy of the line would not fit beside it.
ROOM_KB = 270_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces a limit on address space")
def test_fault_23_one_line_of_200_mb_in_bounded_memory(tmp_path):
    def limited(kilobytes: int, *arguments: str) -> None:
        script = f'ulimit -v {kilobytes}; exec {sys.executable} -m lmkit "$@"'
        # Threads and the arenas of malloc take address space by the number of CPUs.
        done = run_program("sh", "-c", script, "lmkit", *arguments, cwd=tmp_path, MALLOC_ARENA_MAX="2")
        assert done.returncode == 0, done.stderr

    (tmp_path / "small.txt").write_text("one fish two fish red fish blue fish " * 50)
    limited(1_000_000, "tokenizer", "train", "small.txt", "t.json", "--vocab-size", "270")
    line = b"one fish two fish, red fish blue fish; it's a fish of 12 colours " * 1000
    with open(tmp_path / "line.txt", "wb") as file:
        for _ in range(-(-LINE_BYTES // len(line))):
            file.write(line)
    workers = ("--workers", "2")
    limited(ROOM_KB, "data", "encode", "line.txt", "x.npy", "--tokenizer", "t.json", *workers)
    limited(ROOM_KB, "tokenizer", "train", "line.txt", "y.json", "--vocab-size", "280", *workers)
    # The limit is real: as much as the line itself more, and it would be reached.
    copy = f"import numpy; bytearray({LINE_BYTES})"
    taken = run_program("sh", "-c", f"ulimit -v {ROOM_KB}; exec {sys.executable} -c '{copy}'", cwd=tmp_path)
    assert "MemoryError" in taken.stderr
