"""A small random model and a byte-level tokenizer."""

from __future__ import annotations

import pytest
import torch

from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig
from lmkit.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The 256 bytes, a few merges that cut characters in two, and end-of-text (259)."""
    snowman, accent = "☃".encode(), "é".encode()
    merges = [(b"h", b"e"), (accent[:1], accent[1:]), (snowman[:1], snowman[1:2])]
    vocab = {i: bytes([i]) for i in range(256)} | {
        256 + i: left + right for i, (left, right) in enumerate(merges)
    }
    return Tokenizer(vocab=vocab, merges=merges, special_tokens=("<|endoftext|>",))


@pytest.fixture
def make_model():
    """make_model(**fields) -> float64, two layers, context of 16, opinionated enough for its guesses to differ."""

    def make(**fields):
        sizes = {
            "vocab_size": 260,
            "context_length": 16,
            "d_model": 32,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "attention": "vectorized",
        }
        torch.manual_seed(0)
        model = TransformerLM(ModelConfig(**{**sizes, **fields}), dtype=torch.float64)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)
            for layer in model.layers:
                layer.attn.output_proj.weight.mul_(3)
        return model

    return make


class Scripted(TransformerLM):
    """Says the ids of a script one after the other, whatever it reads, and notes what it reads."""

    def __init__(self, script, *, context_length):
        super().__init__(
            ModelConfig(vocab_size=260, context_length=context_length, d_model=8, d_ff=8, num_heads=2)
        )
        self.script = iter(script)
        self.read: list[list[int]] = []
        # The hidden state is the prediction itself, which the head hands on.
        self.lm_head.weight = torch.nn.Parameter(torch.eye(260))

    def hidden_states(self, ids, kv_cache=None):
        self.read.extend(ids.tolist())
        super().hidden_states(ids, kv_cache)  # the cache is filled as ever
        return (
            torch.nn.functional.one_hot(torch.tensor(next(self.script)), 260).float().expand(*ids.shape, -1)
        )


@pytest.fixture
def scripted():
    """scripted(ids) -> a model that says exactly that to a single prompt."""

    def make(script, *, context_length=64):
        return Scripted(script, context_length=context_length)

    return make
