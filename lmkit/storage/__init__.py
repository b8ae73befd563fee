"""Files that are whole or absent: atomic writes, checksums, locks."""

from lmkit.storage.atomic import atomic_path, remove_partials, write_atomic
from lmkit.storage.checksums import sha256_file
from lmkit.storage.locks import FolderLock

__all__ = ["FolderLock", "atomic_path", "remove_partials", "sha256_file", "write_atomic"]
