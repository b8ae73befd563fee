"""Named sizes, and counts against real models."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmkit import model as lm
from lmkit.model.accounting import step_work, update_bytes

SIZES = {"vocab_size": 97, "d_model": 48, "d_ff": 80, "num_layers": 3, "num_heads": 6}


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 2, "d_head": 12},
        {"tie_embeddings": True, "qkv_bias": True},
        {"qk_norm": True, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_counts_are_those_of_the_model(fields: dict[str, Any]) -> None:
    config = lm.ModelConfig(**SIZES, **fields)
    named = dict(lm.TransformerLM(config).named_parameters())
    counts = lm.count_parameters(config)
    assert counts.total == sum(parameter.numel() for parameter in named.values())
    assert counts.vectors == sum(parameter.numel() for parameter in named.values() if parameter.dim() == 1)
    added = sum(parameter.numel() for name, parameter in named.items() if name.endswith("bias"))
    looked_up = 0 if config.tie_embeddings else named["token_embeddings.weight"].numel()
    assert bool(added) == config.qkv_bias
    assert counts.multiplying == counts.total - added - looked_up
    memory = lm.training_memory(config)
    shares = (memory.weights, memory.gradients, memory.optimizer, memory.total)
    assert shares == tuple(times * counts.total for times in (4, 4, 8, 16))


def test_a_window_saves_flops() -> None:
    config = lm.ModelConfig(**SIZES, context_length=64, attention_window=16, attention_pattern="SL")
    whole = config.model_copy(update={"attention_window": None})
    seen = [sum(min(i + 1, window) for i in range(64)) for window in (16, 64)]  # by all tokens of a layer
    saved = lm.flops_per_token(whole, 64, causal=True) - lm.flops_per_token(config, 64, causal=True)
    # A short layer of three (the last is long); the formula counts a token as half of itself.
    assert 64 * saved == pytest.approx(12 * 48 * (seen[1] - seen[0]), rel=0.03)


@pytest.mark.parametrize("width", [48, 72])
def test_flops_of_the_matrix_products_are_counted(width: int) -> None:
    """PyTorch's own counter over a real forward pass; gains of norms are not matrix products."""
    config = lm.ModelConfig(**SIZES, context_length=32, attention="vectorized", d_head=width // 6)
    model = lm.TransformerLM(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(97, (2, 32)))
    gains = (2 * config.num_layers + 1) * config.d_model
    assert counter.get_total_flops() == 2 * 32 * (lm.forward_flops_per_token(config, 32) - 2 * gains)
    assert lm.flops_per_token(config, 32) == 6 * lm.count_parameters(config).multiplying + 12 * 3 * width * 32
    assert lm.flops_per_token(config, 32, causal=True) == lm.flops_per_token(config, 32) - 6 * 3 * width * 32


def test_work_of_a_step_by_class() -> None:
    """Counted by hand for 2 x 32 tokens: 3 layers, d 48, 4 heads of 12, 2 of them of keys and values."""
    config = lm.ModelConfig(**SIZES | {"num_heads": 4}, num_kv_heads=2, context_length=32)
    work = step_work(config, 2, element_bytes=2)
    gains = (2 * 3 + 1) * 48
    products = 6 * 64 * (lm.count_parameters(config).multiplying - gains)
    attention = work["attention forward"].flops
    assert work["matrix products"].flops == products
    # q k^T and weights v: 4 heads of 12, 32 x 32 / 2 pairs in each of 2 rows, 2 operations each
    assert attention == 3 * 2 * 2 * (2 * 4 * 12 * 32 * 32 // 2)
    assert work["attention backward"].flops * 2 == attention * 5
    # MFU counts the backward pass as two forward passes, and gains as if they were products.
    assert products + 6 * 64 * gains + 3 * attention == 64 * lm.flops_per_token(config, 32, causal=True)
    num_bytes = {name: part.num_bytes for name, part in work.items() if part.num_bytes}
    assert num_bytes == {
        "SwiGLU, GELU": 3 * 64 * (3 + 5) * config.d_ff * 2,
        "norm": 7 * 64 * (4 + 4) * 48 * 2,
        "cross-entropy": 64 * 2 * 97 * 2,
        "clipping, optimizer": lm.count_parameters(config).total * 30,
        "RoPE": 3 * 64 * 4 * (48 + 24) * 2,
        "embedding": 64 * 4 * 48 * 2,
    }
    assert (update_bytes(2), update_bytes(4)) == (30, 32)


@pytest.mark.parametrize(("name", "sizes"), [("small", (768, 3072, 12, 12)), ("2.7b", (2560, 10240, 32, 32))])
def test_presets(name: str, sizes: tuple[int, int, int, int]) -> None:
    config = lm.preset_config(name, vocab_size=1003, context_length=1024, attention="reference")
    assert (config.d_model, config.d_ff, config.num_layers, config.num_heads) == sizes
    assert (config.vocab_size, config.context_length) == (1003, 1024)
    assert config.attention == "reference"
