"""`lmkit plan` as a user runs it."""

import json

import pytest

from lmkit.training import plan as planning
from lmkit.training.plan import Measured


def test_json_has_bytes(terminal):
    found = json.loads(terminal("plan llama_1b --gpu H100 --json"))
    assert found["fits"] is True
    assert found["peak_bytes"] == max(found["moments"].values())
    sizes = found["bytes"]
    assert sizes["weights"] + sizes["optimizer"] < found["peak_bytes"] < found["usable_bytes"]
    # Keys and values of 16 texts of 4096 tokens: 16 layers, 8 heads of 64, bf16
    assert found["bytes"]["kv_cache"] == 16 * 4096 * 2 * 16 * 8 * 64 * 2


def test_what_cannot_be_planned_is_refused(terminal, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    terminal.refuses("plan llama_1b --gpu H20", code="plan.unknown_gpu", says=["--gpu H20"])
    terminal.refuses("plan llama_1b --check --gpu H100", code="plan.options_exclude")
    terminal.refuses("plan llama_1b --check", code="plan.no_gpu", says=["--check"])


@pytest.mark.parametrize("found", [Measured(38_000_000_000, 0.25), Measured(None, None)])
def test_what_was_measured_stands_beside_the_plan(terminal, monkeypatch, found):
    monkeypatch.setattr(planning, "check", lambda recipe, *, ranks: found)
    fields = json.loads(terminal("plan llama_1b --check --json"))["measured"]
    assert fields == {"peak_bytes": found.peak_bytes, "seconds": found.seconds}
