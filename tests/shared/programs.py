"""Programs in processes of their own."""

import os
import subprocess
from pathlib import Path


def run_program(
    *command: str | Path, cwd: Path, stdin: str | None = None, timeout: float = 240.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on one thread and return what it wrote, as text, and its exit code."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
