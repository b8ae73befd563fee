"""Programs in processes of their own, and limits of this one."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def run_program(
    *command: str | Path,
    cwd: Path,
    stdin: str | None = None,
    timeout: float | None = 240.0,
    **environment: str,
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


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writing more raises OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
