"""Write files that are whole or absent, hash them, and lock them."""

from typing import TYPE_CHECKING

import lmkit.lazy

if TYPE_CHECKING:
    from lmkit.storage.atomic import FolderLock as FolderLock
    from lmkit.storage.atomic import atomic_folder as atomic_folder
    from lmkit.storage.atomic import atomic_path as atomic_path
    from lmkit.storage.atomic import keep_damaged as keep_damaged
    from lmkit.storage.atomic import remove_partials as remove_partials
    from lmkit.storage.atomic import scratch_folder as scratch_folder
    from lmkit.storage.atomic import sha256_file as sha256_file
    from lmkit.storage.atomic import write_atomic as write_atomic
else:
    _NAMES = "FolderLock atomic_folder atomic_path keep_damaged remove_partials scratch_folder write_atomic"
    _NAMES += " sha256_file"
    __getattr__, __dir__, __all__ = lmkit.lazy.exports(__name__, dict.fromkeys(_NAMES.split(), "atomic"))
