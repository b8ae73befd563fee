"""Which operations a model runs, and that all of them go through the set. The kernels' numbers: tests/kernels."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raising import raises

from lmkit.errors import UsageError
from lmkit.model import ModelConfig, Operations, TransformerLM, choose_operations, compile_model
from lmkit.model.operations import PLAIN
from lmkit.optim.adamw import _Kind
from lmkit.registry import OPERATIONS

NAMES = {"embedding", "add_rms_norm", "rotated", "swiglu", "linear_cross_entropy"}


class Watched(Operations):
    """Writes down what is called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in NAMES:
            self.called.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def watched() -> str:
    OPERATIONS.register("watched", devices=("cpu",))(Watched)
    return "watched"


def test_a_set_from_outside_runs_everything_around_the_matrix_products(make_model, watched):
    model, plain = make_model(operations=watched), make_model()
    ids = torch.randint(61, (2, 9))
    loss = model.loss(ids, ids)
    assert isinstance(model.operations, Watched)
    once = ["add_rms_norm", "rotated", "add_rms_norm", "swiglu"]
    assert model.operations.called == ["embedding", *once, *once, "add_rms_norm", "linear_cross_entropy"]
    assert torch.equal(loss, plain.loss(ids, ids))


def test_auto_takes_what_runs():
    assert OPERATIONS.names[:2] == ("fused", "plain")
    for weight in (torch.empty(1), torch.empty(1).double(), torch.empty(1, device="meta")):
        assert type(choose_operations("auto", weight)) is Operations
    assert type(choose_operations("fused", torch.empty(1, device="meta"))) is Operations  # nothing runs yet


def test_a_named_set_that_does_not_run_is_refused():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs kernels on CPUs")
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    with raises(UsageError, "operations.unsupported") as caught:
        TransformerLM(ModelConfig(vocab_size=5, operations="fused"))
    assert "model.operations" in str(caught.value)


def test_auto_is_plain_on_a_gpu_that_is_too_old_for_triton(monkeypatch):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    weight: Any = SimpleNamespace(
        is_cuda=True, is_meta=False, device=torch.device("cuda", 0), dtype=torch.float16
    )
    for capability, expected in (((7, 5), "plain"), ((8, 0), "fused")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert choose_operations("auto", weight).name == expected
        kind = _Kind(weight.device, torch.float32, torch.float32, None, contiguous=True)
        assert kind.fits_one_pass == (expected == "fused")


def test_a_model_chooses_again_where_it_is_moved(make_model, watched):
    model = make_model(operations=watched)
    before = model.operations
    assert model.float().operations is not before
    assert isinstance(model.operations, Watched)


def test_compiled_blocks_are_left_to_the_compiler(make_model, watched):
    """Unless a set is named."""
    for name, expected in (("auto", PLAIN), (watched, None)):
        model = make_model(operations=name)
        compile_model(model, "whole", backend="eager")
        assert model.layers.operations is expected
