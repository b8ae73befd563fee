import os
import stat
import sys

import pytest
from raising import raises

from lmkit.errors import LmkitError
from lmkit.profile.nsys import profile_command, read_nsys_file
from lmkit.profile.summary import summarize

FAKE = """#!{python}
import os, shutil, subprocess, sys
arguments = sys.argv[1:]
if arguments[0] == "export":
    output = next(a for a in arguments if a.startswith("--output=")).partition("=")[2]
    if "{broken}": sys.exit("no importer")
    shutil.copy("{database}", output)
    sys.exit(0)
first = next(i for i, a in enumerate(arguments[1:], 1) if not a.startswith("--"))
code = subprocess.run(arguments[first:]).returncode
output = next(a for a in arguments if a.startswith("--output=")).partition("=")[2]
open(output + ".nsys-rep", "w").write(os.environ["LMKIT_RANGES"])
sys.exit(code)
"""


@pytest.fixture
def install_fake(tmp_path, monkeypatch, two_steps):
    """An `nsys` on the PATH that runs the command and "exports" the synthetic database."""

    def install(*, broken: bool = False) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "nsys"
        database = two_steps.path
        text = FAKE.format(python=sys.executable, database=database, broken="yes" if broken else "")
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return install


def test_a_command_is_run_exported_and_summarised(install_fake, tmp_path, capfd):
    install_fake()
    code, database = profile_command([sys.executable, "-c", "print('hello')"], tmp_path / "out")
    assert code == 0
    assert database.with_suffix(".nsys-rep").read_text() == "nvtx"  # our ranges were on in the child
    assert summarize(read_nsys_file(database))["launches"] == 4
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", "hello")  # standard output is for results


@pytest.mark.parametrize("broken", [False, True])
def test_an_existing_report_is_exported_first(install_fake, tmp_path, broken):
    install_fake(broken=broken)
    report = tmp_path / "old.nsys-rep"
    report.write_text("x")
    (tmp_path / "old.sqlite").write_text("mine")
    if not broken:
        trace = read_nsys_file(report)
        assert (trace.source, len(trace.ranges)) == ("old.sqlite", 6)
        assert (tmp_path / "old.sqlite").read_text() == "mine"
        return
    with raises(LmkitError, "nsys.export_failed", "old.nsys-rep: no importer"):
        read_nsys_file(report)
