"""A step with the cache has the logits of the model without one."""

from __future__ import annotations

import pytest
import torch

from lmkit.generation import Decoder
from lmkit.kernels.decode.reference import Ends, Sampling

GREEDY, ENDLESS = Sampling(temperature=0.0), Ends(stop=-1, most=1000)


def texts_of(decoder):
    places = decoder.state.place.tolist()
    return [text[: place + 1].tolist() for text, place in zip(decoder.state.text, places, strict=True)]


@pytest.mark.parametrize("attention", ["vectorized", "sdpa", "reference"])
@pytest.mark.parametrize(("kv_heads", "rows"), [(4, 3), (2, 3), (1, 3), (2, 1)])
def test_logits_equal_those_without_a_cache(make_model, kv_heads, rows, attention):
    model = make_model(num_kv_heads=kv_heads, attention=attention)
    decoder = Decoder(model, rows, sampling=GREEDY, ends=ENDLESS)
    torch.manual_seed(1)
    for row, length in enumerate((5, 1, 9)[:rows]):
        decoder.start(row, torch.randint(260, (length,)).tolist(), seed=0)
    for _ in range(7):
        texts = texts_of(decoder)
        with torch.inference_mode():
            logits = decoder._step.logits(max(map(len, texts)))
        for row, text in enumerate(texts):
            exact = model(torch.tensor([text]))[0, -1]
            # float64; matrix products of other shapes sum in another order.
            torch.testing.assert_close(logits[row], exact, rtol=1e-11, atol=1e-11)
        decoder.step(max(map(len, texts)))
        assert [text[:-1] for text in texts_of(decoder)] == texts


def test_rows_that_rest_do_not_change_the_others(make_model):
    """Row 1 is full and stands still while row 0 goes on; then it starts over."""
    model = make_model()
    decoder = Decoder(model, 2, sampling=GREEDY, ends=Ends(stop=-1, most=2))
    alone = Decoder(model, 1, sampling=GREEDY, ends=ENDLESS)
    torch.manual_seed(1)
    first, second, third = (torch.randint(260, (length,)).tolist() for length in (3, 15, 8))
    decoder.start(1, second, seed=0)
    decoder.step(15)
    decoder.step(16)
    assert decoder.state.done.tolist() == [1, 1]
    decoder.start(0, first, seed=0)
    alone.start(0, first, seed=0)
    for length in (3, 4):
        decoder.step(16)
        alone.step(length)
    assert decoder.state.drawn[0] == alone.state.drawn[0]
    decoder.start(1, third, seed=0)
    alone.start(0, third, seed=0)
    for length in (8, 9):
        decoder.step(max(5, length))
        alone.step(length)
    assert decoder.state.drawn[1] == alone.state.drawn[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_in_other_dtypes(make_model, dtype):
    model = make_model(num_kv_heads=2)
    text = torch.randint(260, (9,)).tolist()
    exact = model(torch.tensor([text]))[0, -1].detach()
    decoder = Decoder(model.to(dtype), 2, sampling=GREEDY, ends=ENDLESS)
    decoder.start(1, text, seed=0)
    with torch.inference_mode():
        logits = decoder._step.logits(9)[1]
    assert decoder.keys.dtype == decoder.values.dtype == logits.dtype == dtype
    # bfloat16 has 8 bits of mantissa, some twenty roundings deep: a percent or two of the norm.
    allowed = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert (logits.double() - exact).norm() < allowed * exact.norm()
