"""The readable loop with a KV cache writes what the model without one writes, and what the product writes."""

from functools import partial

import pytest
import torch
from plain_text import opinionated_model, plain_text

from lmkit.core import kv_cache
from lmkit.core.sampling import Sampling

make_model = partial(opinionated_model, vocab_size=50, context_length=12)


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2, "attention_window": 4}], ids=str)
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.9, top_p=0.9), Sampling(1.2, repetition_penalty=1.4)], ids=str
)
def test_equals_the_loop_without_a_cache_beyond_the_context(fields, sampling):
    model = make_model(**fields)
    ids = torch.randint(50, (3, 5))
    made = kv_cache.generate(model, ids, 25, sampling, seed=7)
    for row, prompt in enumerate(ids.tolist()):  # float64: rounding decides no draw
        assert made[row].tolist() == plain_text(model, prompt, 25, sampling, 7 + row)


def test_a_prompt_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="13 tokens are longer than the context of 12"):
        kv_cache.generate(make_model(), torch.zeros(1, 13, dtype=torch.int64), 1)


def test_texts_of_different_lengths_are_read_in_parts():
    """Each text has its own length in the cache; a part sees itself and all that came before."""
    model = make_model(num_kv_heads=2)
    cache, ids = kv_cache.KVCache(model, 2), torch.randint(50, (2, 9))
    with torch.inference_mode():
        model(ids[:, :3], cache)
        cache.lengths += torch.tensor([3, 1])  # the second text keeps one token
        last = torch.stack([ids[0, 3:7], ids[1, 1:5]])
        logits = model(last, cache)
    for row, read in enumerate((ids[0, :7], ids[1, :5])):
        torch.testing.assert_close(logits[row], model(read[None])[0, -4:], rtol=1e-11, atol=1e-11)
