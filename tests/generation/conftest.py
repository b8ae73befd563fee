"""A small random model and a byte-level tokenizer."""

import itertools

import pytest
import torch
from plain_text import opinionated_model

from lmkit.generation.prefill import HEADER, Prefill
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig
from lmkit.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The 256 bytes, a few merges that cut characters in two, and end-of-text (259)."""
    snowman, accent = "☃".encode(), "é".encode()
    merges = [(b"h", b"e"), (accent[:1], accent[1:]), (snowman[:1], snowman[1:2])]
    return Tokenizer.from_merges(merges, ["<|endoftext|>"])


@pytest.fixture
def make_model():
    return opinionated_model


@pytest.fixture
def scripted(monkeypatch):
    """scripted(ids) -> a model that says exactly that, and whose `read` lists the texts that it reads from their
    beginning.

    It knows which id follows which; after an id that the script does not hold it begins the script.
    """
    read = Prefill._read

    def note(prefill, packed):
        prefill.decoder.model.read += [text[HEADER : HEADER + text[1]] for text in packed.tolist()]
        read(prefill, packed)

    monkeypatch.setattr(Prefill, "_read", note)

    def make(script, *, context_length=64, vocab_size=260):
        sizes = {"d_model": 264, "d_ff": 8, "num_heads": 2, "num_layers": 1, "context_length": context_length}
        model = TransformerLM(ModelConfig(vocab_size=vocab_size, **sizes))
        follows = dict(itertools.pairwise(script))
        with torch.no_grad():
            for weight in (model.layers[0].attn.output_proj.weight, model.layers[0].ffn.w2.weight):
                weight.zero_()  # the stream is the embedding
            model.token_embeddings.weight.copy_(torch.eye(vocab_size, 264))
            model.lm_head.weight.zero_()
            for token in range(vocab_size):
                model.lm_head.weight[follows.get(token, script[0]), token] = 1
        model.read = []
        return model

    return make
