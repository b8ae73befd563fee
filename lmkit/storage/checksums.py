"""SHA-256 of files, in constant memory."""

from __future__ import annotations

import hashlib
import os

_BLOCK = 1 << 20


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
