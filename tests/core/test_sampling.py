"""Draws against exact probabilities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from lmkit.core import sampling as core
from lmkit.core.sampling import Sampling, philox
from lmkit.errors import UsageError
from lmkit.recipe.load import load_recipe

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0])
DRAWS = 5000


def sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Sampling(temperature, top_k, top_p, min_p)


def draw(logits, options, seeds=None):
    """One token a row, from streams 0, 1..."""
    seeds = torch.arange(len(logits)) if seeds is None else seeds
    return core.draw(logits, seeds, torch.zeros_like(seeds), options)


# Probabilities in order: token 1 has 0.547, 3 has 0.332, 0 has 0.074, 4 has 0.027, 2 has 0.004. Of the best two
# alone, token 1 has 0.62. Against the likeliest, token 3 has 0.607, 0 has 0.135, 4 has 0.050 and 2 has 0.007.
ALL = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        *((sampling(temperature), ALL) for temperature in (0.3, 1.0, 2.0)),
        *((sampling(top_k=k), kept) for k, kept in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (99, ALL))),
        *(
            (sampling(top_p=p), kept)
            for p, kept in ((0.54, [1]), (0.56, [1, 3]), (0.87, [1, 3]), (0.9, [0, 1, 3]))
        ),
        *((sampling(top_k=2, top_p=p), kept) for p, kept in ((0.6, [1]), (0.63, [1, 3]))),
        *(
            (sampling(min_p=p), kept)
            for p, kept in ((1.0, [1]), (0.6, [1, 3]), (0.1, [0, 1, 3]), (0.001, ALL))
        ),
    ],
    ids=str,
)
def test_shares_are_those_of_the_softmax_over_what_is_kept(options, kept):
    """Chi-square."""
    tokens = draw(LOGITS.expand(DRAWS, -1), options)
    counts = torch.bincount(tokens, minlength=5).double()
    p = torch.zeros(5, dtype=torch.float64)
    p[kept] = (LOGITS[kept].double() / options.temperature).softmax(0)
    assert counts[p == 0].sum() == 0
    there = p > 0
    statistic = ((counts - DRAWS * p) ** 2 / (DRAWS * p))[there].sum()
    # Of at most 4 degrees of freedom: exceeded by chance once in 20,000; streams are fixed.
    assert statistic < 25


def test_a_set_that_reaches_p_exactly_is_large_enough():
    logits = torch.tensor([0.0, -200.0, 0.0]).expand(1000, -1)  # exactly one half each
    assert set(draw(logits, sampling(1.0, 0, 0.5)).tolist()) == {0}
    assert set(draw(logits, sampling(1.0, 0, 0.5 + 1e-9)).tolist()) == {0, 2}


def test_philox_is_philox():
    """Random123's known answers for a counter and key of zeros; a counter and key of ones for others."""
    assert philox(0, 0, 0) == 0x6627E8D5E169C58D
    bits = [philox(seed, number, attempt) for seed in (0, 1 << 40) for number in (0, 9) for attempt in (0, 1)]
    assert len(set(bits)) == 8


def test_temperature_zero_is_greedy():
    torch.manual_seed(0)
    logits = torch.randn(50, 7)
    assert torch.equal(draw(logits, sampling(0.0, top_k=3, top_p=0.5)), logits.argmax(-1))
    nearly = draw(logits, sampling(1e-300))  # the division neither overflows nor gives nan
    assert torch.equal(nearly, logits.argmax(-1))


OUT_OF_RANGE = (
    "temperature=-0.1 temperature=nan temperature=inf top_p=0.0 top_p=-1.0 top_p=1.01 top_k=-1 min_p=-0.1 min_p=1.1 "
    "repetition_penalty=0.0 batch_size=0"
)


@pytest.mark.parametrize("setting", OUT_OF_RANGE.split())
def test_settings_out_of_range_are_wrong_use(setting):
    with raises(UsageError, "recipe.wrong_value", "generate." + setting.split("=")[0]):
        load_recipe(None, [f"generate.{setting}"])


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    seed=st.integers(0, 2**62),
    temperature=st.floats(1e-3, 1e3),
    top_k=st.integers(0, 40),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
)
def test_an_excluded_token_is_never_drawn(logits, seed, temperature, top_k, top_p, min_p):
    row = torch.tensor([logits])
    token = draw(row, sampling(temperature, top_k, top_p, min_p), torch.tensor([seed])).item()
    assert 0 <= token < len(logits)
    p = (row[0].double() / temperature).softmax(0)
    # Logits that differ by a rounding of float32 may have equal weights.
    likelier = p > p[token] * (1 + 1e-5)
    if top_k:
        assert likelier.sum() < top_k
    if top_p < 1 and not top_k:
        assert p[likelier].sum() <= top_p + 1e-5
    assert p[token] >= min_p * p.max() * (1 - 1e-3) - 1e-11  # weights end at 2^-40


@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 3.0])
def test_rows_are_drawn_independently(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(30, 40, dtype=torch.float64).round(decimals=1)  # some are equal
    logits[::7, 3] = -torch.inf
    logits[1, 5], logits[2, 5] = torch.nan, torch.inf
    for min_p in (0.0, 0.2):
        options = sampling(temperature, top_k, top_p, min_p)
        tokens = draw(logits, options)
        alone = [draw(logits[i : i + 1], options, torch.tensor([i])).item() for i in range(30)]
        assert alone == tokens.tolist()
        assert tokens[1:3].tolist() == [-1, -1]
