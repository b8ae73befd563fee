"""What a `config.json` means: the defaults of transformers, and nulls."""

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lmkit.errors import UsageError
from lmkit.model.hugging_face import ARCHITECTURES, read_config

transformers = pytest.importorskip("transformers")


def config(folder: Path, kind: str, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **keys}))
    return path


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_missing_keys_have_the_defaults_of_transformers(kind, tmp_path):
    path = config(tmp_path, kind)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    length = 4096 if kind == "mistral" else min(theirs.max_position_embeddings, 999)
    ours = read_config(path, context_length=length)
    sizes = (theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size)
    assert (ours.vocab_size, ours.d_model, ours.d_ff) == sizes
    assert (ours.num_layers, ours.num_heads, ours.kv_heads) == (
        *(theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads),
    )
    assert (ours.norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert (ours.rope_theta, ours.rope_scaling) == (theirs.rope_parameters["rope_theta"], "none")
    with raises(UsageError, "import.context_length", path, theirs.max_position_embeddings):
        read_config(path, context_length=theirs.max_position_embeddings + 1)
    if kind == "mistral":
        with raises(UsageError, "import.unsupported", path, f"sliding_window {theirs.sliding_window}"):
            read_config(path, context_length=4097)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_nulls_mean_what_a_missing_key_of_no_default_means(kind, tmp_path):
    nulls = dict.fromkeys(
        (
            *("num_key_value_heads", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"),
            "architectures",
        )
    )
    nulls |= dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "is_causal")
    )
    ours = read_config(config(tmp_path, kind, **nulls), context_length=999)
    assert ours.kv_heads == ours.num_heads == 32
    assert not ours.tie_embeddings
    assert ours.qkv_bias == (kind == "qwen2")
