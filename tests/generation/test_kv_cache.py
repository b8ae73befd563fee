"""The cache changes the cost of a token, not its logits."""

from __future__ import annotations

import pytest
import torch

from lmkit.generation.kv_cache import KVCache


@pytest.mark.parametrize("attention", ["vectorized", "sdpa", "reference"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_equal_those_without_a_cache(make_model, kv_heads, attention):
    model = make_model(num_kv_heads=kv_heads, attention=attention)
    lengths = [5, 1, 9]
    texts = [torch.randint(260, (16,)) for _ in lengths]
    padded = torch.stack([text[:9] for text in texts])  # what follows a short text is not zero but wrong
    cache = KVCache(model.config, batch=3, dtype=torch.float64)
    with torch.no_grad():
        first = model(padded, cache.prefill([0, 1, 2], lengths))
        for row, length in enumerate(lengths):
            exact = model(texts[row][None, :length])[0]
            # float64; matrix products of other shapes sum in another order.
            torch.testing.assert_close(first[row, :length], exact, rtol=1e-11, atol=1e-11)
        for _ in range(7):
            ids = torch.stack([text[length] for text, length in zip(texts, lengths, strict=True)])[:, None]
            logits = model(ids, cache.decode([0, 1, 2]))
            lengths = [length + 1 for length in lengths]
            for row, length in enumerate(lengths):
                exact = model(texts[row][None, :length])[0, -1]
                torch.testing.assert_close(logits[row, 0], exact, rtol=1e-11, atol=1e-11)
    assert cache.lengths == lengths == [12, 8, 16]


def test_rows_that_rest_do_not_change_the_others(make_model):
    model = make_model()
    texts = torch.randint(260, (2, 16))
    cache = KVCache(model.config, batch=2, dtype=torch.float64)
    with torch.no_grad():
        model(texts[:, :14], cache.prefill([0, 1], [14, 16 - 2]))
        model(texts[:, 14:15], cache.decode([0, 1]))
        model(texts[:, 15:16], cache.decode([1]))  # row 1 is now full
        assert cache.lengths == [15, 16]
        garbage = torch.full((2, 1), 7)
        garbage[0] = texts[0, 15]
        logits = model(garbage, cache.decode([0]))
        # float64; matrix products of other shapes sum in another order.
        torch.testing.assert_close(logits[0, 0], model(texts[:1])[0, -1], rtol=1e-11, atol=1e-11)
        # Row 1 starts over while row 0 keeps what it has.
        again = model(texts[1:, 8:], cache.prefill([1], [8]))
        torch.testing.assert_close(again[0], model(texts[1:, 8:])[0], rtol=1e-11, atol=1e-11)
    assert cache.lengths == [16, 8]


@pytest.mark.parametrize("autocast", [True, False])
def test_the_cache_keeps_its_own_dtype(make_model, autocast):
    """Weights of float32 under autocast, or weights of bfloat16 themselves."""
    model = make_model(num_kv_heads=2)
    text = torch.randint(260, (1, 9))
    exact = model(text)[0].detach()
    model = model.float() if autocast else model.bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(model.config, batch=1, dtype=dtype)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = [model(text[:, :6], cache.prefill([0], [6]))[0]]
            logits += [model(text[:, i : i + 1], cache.decode([0]))[0] for i in range(6, 9)]
        # 8 bits of mantissa, some twenty roundings deep: a percent or two of the norm.
        assert (torch.cat(logits).float() - exact).norm() < 0.05 * exact.norm()
        assert cache.keys.dtype == cache.values.dtype == dtype
