"""Numbers of NumPy in recipe tables, and token ids in whatever holds integers."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lmkit.core.batches import TokenBatches, evaluation_windows
from lmkit.model import ModelConfig, TransformerLM
from lmkit.recipe.tables import OptimizerConfig, TrainConfig


def test_numbers_of_numpy_in_tables_are_pythons():
    given = ModelConfig(
        vocab_size=np.int64(61), d_model=np.uint16(32), num_heads=np.array(4), rope_theta=np.float32(5e3),
        qk_norm=np.bool_(True), num_layers=1,
    )  # fmt: skip
    plain = ModelConfig(vocab_size=61, d_model=32, num_heads=4, rope_theta=5e3, qk_norm=True, num_layers=1)
    assert given == plain == plain.changed(vocab_size=np.int32(61))
    assert given.model_dump_json() == plain.model_dump_json()
    assert type(plain.changed(vocab_size=np.int32(61)).vocab_size) is int
    assert TransformerLM(given)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 61)
    optimizer = OptimizerConfig(betas=(np.float64(0.8), np.float32(0.5)), options={"steps": np.int64(3)})
    assert (optimizer.betas, optimizer.options) == ((0.8, 0.5), {"steps": 3})
    assert TrainConfig.model_validate_json('{"steps": 3}').steps == TrainConfig(steps=np.int64(3)).steps
    assert OptimizerConfig.model_validate_json('{"betas": [0.8, 0.5]}').betas == (
        0.8,
        0.5,
    )  # an array of TOML


@pytest.mark.parametrize(
    "wrong",
    ["61", np.str_("61"), True, np.bool_(True), 61.0, np.float64(61), np.array([61]), np.int64(-1), None],
)
def test_tables_stay_strict(wrong: Any):
    with pytest.raises(ValidationError):
        ModelConfig(num_layers=wrong)
    if wrong is not True and not isinstance(wrong, np.bool_):
        with pytest.raises(ValidationError):
            ModelConfig(qk_norm=wrong)


SIZES: dict[str, Any] = {"batch_size": 4, "context_length": 8, "seed": 0}


def test_token_ids_from_lists_and_tensors_make_the_same_batches():
    array = np.arange(100, dtype=np.uint16) % 61
    expected = TokenBatches(array, **SIZES).batch(3)
    starts = np.array([0, 30, 60])
    at_starts = TokenBatches(array, document_starts=starts, **SIZES).batch(3)
    for tokens in (
        array.tolist(),
        torch.tensor(array.tolist()),
        torch.tensor(array.tolist(), dtype=torch.int32),
    ):
        torch.testing.assert_close(TokenBatches(tokens, **SIZES).batch(3), expected)
        found = TokenBatches(tokens, document_starts=starts.tolist(), **SIZES).batch(3)
        torch.testing.assert_close(found, at_starts)
        windows = list(evaluation_windows(tokens, 8, 4))
        torch.testing.assert_close(windows, list(evaluation_windows(array, 8, 4)))
    held = np.arange(100)
    assert np.shares_memory(TokenBatches(torch.from_numpy(held), **SIZES).tokens, held)


@pytest.mark.parametrize(
    "tokens",
    [np.zeros((10, 100), int), torch.zeros(10, 100).long(), np.zeros(99), torch.zeros(99), ["a"] * 99, [], 5],
)
def test_other_token_ids_are_refused_in_one_line_that_says_what_to_do(tokens: Any):
    for call in (lambda: TokenBatches(tokens, **SIZES), lambda: list(evaluation_windows(tokens, 8, 4))):
        with pytest.raises(ValueError, match=r"^tokens must be integers in one dimension.*reshape\(-1\).*$"):
            call()
    with pytest.raises(ValueError, match="document_starts must be integers"):
        TokenBatches(np.arange(99), document_starts=np.zeros(3), **SIZES)


def test_negative_ids_are_not_taken_for_marks():
    ids = torch.full((99,), -100)  # the id that PyTorch's loss ignores
    with pytest.raises(ValueError, match="-100"):
        TokenBatches(ids, **SIZES).batch(0)
    with pytest.raises(ValueError, match="-100"):
        list(evaluation_windows(ids, 8, 4))
