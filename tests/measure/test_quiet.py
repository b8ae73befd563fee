import os
import subprocess
import sys

import pytest

from lmkit.measure.ranges import quietly

MARK = "USDT:2026-01-01 12:00:00 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n"


class Profiler:
    """Says at its start and end what torch.profiler says, on the descriptor as C++ does."""

    def __init__(self, said: str) -> None:
        self._said = said
        self.ended = False

    def __enter__(self) -> None:
        os.write(2, self._said.encode())

    def __exit__(self, *_: object) -> None:
        self.ended = True
        os.write(2, self._said.encode())


def test_errors_at_the_start_and_the_end_are_passed_on_and_the_marks_are_not(capfd):
    with quietly(Profiler(f"before\n{MARK}ERROR: no USDT: no room\n")):
        print("in the middle", file=sys.stderr)
        os.write(2, MARK.encode())  # the work's own affair
    passed_on = "before\nERROR: no USDT: no room\n"
    assert capfd.readouterr().err == f"{passed_on}in the middle\n{MARK}{passed_on}"


def test_work_that_fails_ends_the_profiler_and_leaves_stderr_as_it_was(capfd):
    profiler = Profiler(MARK)
    with pytest.raises(ZeroDivisionError), quietly(profiler):
        raise ZeroDivisionError
    assert profiler.ended
    os.write(2, b"still heard\n")
    assert capfd.readouterr().err == "still heard\n"


def test_a_closed_stderr_is_no_obstacle(tmp_path):
    script = "import os\nos.close(2)\nimport torch\nfrom lmkit.measure.ranges import quietly\n"
    (tmp_path / "closed.py").write_text(
        f"{script}with quietly(torch.profiler.profile()):\n    print('done')\n"
    )
    done = subprocess.run([sys.executable, "closed.py"], cwd=tmp_path, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"done\n")
