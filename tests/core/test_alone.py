"""The core stands alone: it imports nothing else of lmkit, also when it runs."""

import subprocess
import sys
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "lmkit" / "core"
FILES = sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")


def test_the_core_runs_without_the_rest():
    script = "import sys\n" + "".join(f"import lmkit.core.{name}\n" for name in FILES)
    script += "print(*(name for name in sys.modules if name.split('.')[0] == 'lmkit'))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert set(done.stdout.split()) == {"lmkit", "lmkit.core", *(f"lmkit.core.{name}" for name in FILES)}
