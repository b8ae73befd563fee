"""The one-pass AdamW in Triton's interpreter. The checks are in adamw_checks.py, which runs on GPUs too."""

import importlib
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
sys.path.insert(0, str(Path(__file__).parent))
CHECKS = importlib.import_module("adamw_checks").CHECKS

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter computes 0 / 0 in the masked lanes of a block's end, and NumPy says so.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_one_pass_adamw(name, monkeypatch):
    from lmkit.optim import adamw

    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setattr(adamw, "ONE_PASS_DEVICES", {"cpu"})
    CHECKS[name]("cpu")
