"""Weights of other people's folders: which tensors count, and what is said of those that do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from their_models import their_folder

from lmkit.errors import LmkitError, UsageError
from lmkit.training.exchange import import_model
from lmkit.training.verify import verify_path
from lmkit.training.weights import ONE_FILE, open_hugging_face, open_weights

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


def folder(parent: Path, change: Change | None = None, kind: str = "Llama", **config: Any) -> Path:
    """A folder of transformers whose tensors, by name, `change` has changed."""
    path = their_folder(parent, kind, config)
    if change is not None:
        tensors = load_file(path / ONE_FILE)
        change(tensors)
        save_file(tensors, path / ONE_FILE, metadata={"format": "pt"})
    return path


def test_a_bias_of_the_output_of_attention_is_refused(tmp_path):
    path = folder(tmp_path, attention_bias=True)
    with raises(UsageError, "import.unsupported", path, "self_attn.o_proj.bias"):
        import_model(path, tmp_path / "run")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.int8], ids=str
)
def test_dtypes_that_are_not_supported_are_named(tmp_path, dtype):
    path = folder(tmp_path, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    with raises(UsageError, "import.unsupported", path, NORM):
        open_hugging_face(path)


@pytest.mark.parametrize(
    ("narrow", "dtype"), [(NORM, torch.float32), (EMBEDDING, torch.float32), ("", torch.bfloat16)]
)
def test_matrices_are_bf16_only_where_all_of_them_are_given_so(tmp_path, narrow, dtype):
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.bfloat16 if narrow in ("", name) else torch.float32)

    model = open_weights(folder(tmp_path, cast)).model("cpu")
    assert {weight.dtype for weight in model.parameters() if weight.dim() > 1} == {dtype}


@pytest.mark.parametrize(
    ("value", "dtype"), [(torch.nan, torch.float32), (-torch.inf, torch.bfloat16)], ids=str
)
def test_weights_that_are_not_finite_are_named(tmp_path, value, dtype):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        for name in (NORM, EMBEDDING):
            tensors[name].view(-1)[7] = value

    path = folder(tmp_path, spoil)
    with raises(LmkitError, "weights.not_finite", path, NORM, EMBEDDING):
        import_model(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not verify_path(path).ok
    with raises(LmkitError, "weights.not_finite", path, NORM):
        open_weights(path).model("cpu")
