"""Write files that are whole or absent, hash them, and lock them."""

from lmkit.storage.atomic import (
    atomic_folder,
    atomic_path,
    keep_damaged,
    remove_partials,
    scratch_folder,
    sha256_file,
    write_atomic,
)
from lmkit.storage.locks import FolderLock

__all__ = [
    "FolderLock",
    "atomic_folder",
    "atomic_path",
    "keep_damaged",
    "remove_partials",
    "scratch_folder",
    "sha256_file",
    "write_atomic",
]
