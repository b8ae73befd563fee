"""What tests of recipes use."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
