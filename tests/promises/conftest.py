"""Make the modules of this folder importable by plain name, here and in spawned ranks (they inherit sys.path)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
