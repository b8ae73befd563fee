"""Write files that are whole or absent, hash them, and lock them."""

from lmkit.storage.atomic import FolderLock as FolderLock
from lmkit.storage.atomic import atomic_folder as atomic_folder
from lmkit.storage.atomic import atomic_path as atomic_path
from lmkit.storage.atomic import keep_damaged as keep_damaged
from lmkit.storage.atomic import remove_partials as remove_partials
from lmkit.storage.atomic import scratch_folder as scratch_folder
from lmkit.storage.atomic import sha256_file as sha256_file
from lmkit.storage.atomic import write_atomic as write_atomic
