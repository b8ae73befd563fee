"""What the README tells people to write has to work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
PYTHON = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_there_is_python_in_it() -> None:
    assert len(PYTHON) >= 2


@pytest.mark.parametrize("code", PYTHON)
def test_its_python_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stories.txt").write_text("Once upon a time there was a fox.\n<|endoftext|>\n" * 100)
    exec(compile(code, "README.md", "exec"), {})
