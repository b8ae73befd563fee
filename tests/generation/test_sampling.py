"""Sampling against exact probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmkit.errors import UsageError
from lmkit.generation import GenerateConfig, sample
from lmkit.recipe.load import load_recipe


def sampling(temperature=1.0, top_k=0, top_p=1.0):
    return GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)


LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0])


def shares(options, draws=20000):
    """How often each token is drawn when the random numbers are spread evenly over [0, 1)."""
    uniforms = (torch.arange(draws) + 0.5) / draws
    tokens = sample(LOGITS.expand(draws, -1), uniforms, options)
    return torch.bincount(tokens, minlength=5) / draws


def expected(kept, temperature=1.0):
    p = torch.zeros(5)
    p[kept] = (LOGITS[kept].double() / temperature).softmax(0).float()
    return p


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    # Evenly spread draws hit each share to within one draw at either end.
    torch.testing.assert_close(
        shares(sampling(temperature)), expected([0, 1, 2, 3, 4], temperature), rtol=0, atol=2e-4
    )


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])]
)
def test_top_k_keeps_the_likeliest(top_k, kept):
    torch.testing.assert_close(shares(sampling(1.0, top_k)), expected(kept), rtol=0, atol=2e-4)


# Probabilities in order: token 1 has 0.547, 3 has 0.332, 0 has 0.074, 4 has 0.027, 2 has 0.004. Of the best two
# alone, token 1 has 0.62.
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1e-9, [1]),
        (0, 0.54, [1]),
        (0, 0.56, [1, 3]),
        (0, 0.87, [1, 3]),
        (0, 0.9, [0, 1, 3]),
        (0, 0.6, [1, 3]),
        (2, 0.6, [1]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_k, top_p, kept):
    torch.testing.assert_close(shares(sampling(1.0, top_k, top_p)), expected(kept), rtol=0, atol=2e-4)


def test_a_set_that_reaches_p_exactly_is_large_enough():
    uniforms = (torch.arange(1000) + 0.5) / 1000
    logits = torch.tensor([0.0, -200.0, 0.0]).expand(1000, -1)  # exactly one half each
    assert set(sample(logits, uniforms, sampling(1.0, 0, 0.5)).tolist()) == {0}
    assert set(sample(logits, uniforms, sampling(1.0, 0, 0.5 + 1e-9)).tolist()) == {0, 2}
    # A draw of zero passes over a token of probability zero.
    assert sample(torch.tensor([[-1e9, 0.0, 0.0]]), torch.zeros(1), sampling()).item() == 1


def test_fault_93_temperature_zero_is_greedy():
    torch.manual_seed(0)
    logits = torch.randn(50, 7)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        tokens = sample(logits, torch.full((50,), uniform), sampling(0.0, top_k=3, top_p=0.5))
        assert torch.equal(tokens, logits.argmax(-1))
    nearly = sample(logits, torch.rand(50), sampling(1e-300))  # the division neither overflows nor gives nan
    assert torch.equal(nearly, logits.argmax(-1))


OUT_OF_RANGE = "temperature=-0.1 temperature=nan temperature=inf top_p=0.0 top_p=-1.0 top_p=1.01 top_k=-1"


@pytest.mark.parametrize("setting", OUT_OF_RANGE.split())
def test_fault_93_settings_out_of_range_are_wrong_use(setting):
    with pytest.raises(UsageError) as caught:
        load_recipe(None, [f"generate.{setting}"])
    assert caught.value.exit_code == 2
    assert "generate." + setting.split("=")[0] in caught.value.message
    assert caught.value.hint


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    uniform=st.floats(0, 1, width=32, exclude_max=True),
    temperature=st.floats(1e-3, 1e3),
    top_k=st.integers(0, 40),
    top_p=st.floats(1e-6, 1),
)
def test_an_excluded_token_is_never_drawn(logits, uniform, temperature, top_k, top_p):
    row = torch.tensor([logits])
    token = sample(row, torch.tensor([uniform]), sampling(temperature, top_k, top_p)).item()
    assert 0 <= token < len(logits)
    p = (row[0].double() / temperature).softmax(0)
    assert p[token] > 0
    likelier = p > p[token]
    if top_k:
        assert likelier.sum() < top_k
    if top_p < 1 and not top_k:
        assert p[likelier].sum() <= top_p + 1e-9  # sums of float64 in another order


def test_rows_are_drawn_independently():
    torch.manual_seed(0)
    logits, uniforms = torch.randn(9, 30), torch.rand(9)
    for options in (sampling(), sampling(0.7, 5), sampling(1.3, 0, 0.8)):
        alone = [sample(logits[i : i + 1], uniforms[i : i + 1], options).item() for i in range(9)]
        assert sample(logits, uniforms, options).tolist() == alone
