"""Weights of other people's folders: which tensors count, and what is said of those that do not."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from their_models import TIED, their_folder

from lmkit.errors import LmkitError, UsageError
from lmkit.training.exchange import export_model, import_model
from lmkit.training.verify import verify_path
from lmkit.training.weights import ONE_FILE, open_hugging_face, open_weights

transformers = pytest.importorskip("transformers")

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
IDS = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(0))
Change = Callable[[dict[str, torch.Tensor]], object]


def folder(parent: Path, change: Change | None = None, kind: str = "Llama", **config: Any) -> Path:
    """A folder of transformers whose tensors, by name, `change` has changed."""
    path = their_folder(parent, kind, config)
    if change is not None:
        tensors = load_file(path / ONE_FILE)
        change(tensors)
        save_file(tensors, path / ONE_FILE, metadata={"format": "pt"})
    return path


def check_logits(path: Path) -> Any:
    """Compare with transformers' own way to open the folder; return its model."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        # As in test_exchange.py.
        torch.testing.assert_close(
            open_weights(path).model("cpu")(IDS), theirs(IDS).logits, rtol=0, atol=1e-5
        )
    return theirs


# Tied matrices


def test_a_head_that_differs_from_the_embedding_stays(tmp_path, caplog):
    """`tie_word_embeddings` beside two matrices: transformers 5 does not tie them, and says so."""
    path = folder(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] * 2}), **TIED)
    theirs = check_logits(path)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="lmkit"):
        import_model(path, tmp_path / "run")
    assert "tie_word_embeddings" in caplog.text
    assert not open_weights(tmp_path / "run").config.tie_embeddings
    exported = tmp_path / "exported"
    export_model(tmp_path / "run", exported)
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(exported / ONE_FILE)[HEAD], load_file(path / ONE_FILE)[HEAD])


# Tensors beside the weights


def test_frequencies_of_rope_are_left_out(tmp_path):
    check_logits(folder(tmp_path, lambda tensors: tensors.update({FREQUENCIES: torch.ones(4)})))


def test_biases_of_attention_are_imported_and_that_of_its_output_is_refused(tmp_path):
    path = folder(tmp_path, attention_bias=True)
    with raises(UsageError, "import.unsupported", path, "self_attn.o_proj.bias"):
        import_model(path, tmp_path / "run")
    zero = lambda tensors: [value.zero_() for name, value in tensors.items() if name.endswith("o_proj.bias")]  # noqa: E731
    path = folder(tmp_path, zero, attention_bias=True)
    assert open_hugging_face(path).config.qkv_bias
    check_logits(path)


# Values


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.int8], ids=str
)
def test_dtypes_that_are_not_supported_are_named(tmp_path, dtype):
    path = folder(tmp_path, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    with raises(UsageError, "import.unsupported", path, NORM):
        open_hugging_face(path)


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
