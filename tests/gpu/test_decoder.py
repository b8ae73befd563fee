"""Generation on a GPU: graphs, late reading, refilled rows; texts do not depend on their company.

`kernels` is True (the kernels' step, for any number of rows) or False (PyTorch's operations).
"""

import gc
import itertools

import pytest
import torch
from raising import raises

pytest.importorskip("triton", reason="Triton is not installed")

import decoder_checks as checks

from lmkit.core.sampling import Sampling
from lmkit.errors import LmkitError
from lmkit.generation import GenerateConfig, generate, generate_tokens
from lmkit.generation.decoder import decoder_needs
from lmkit.generation.generate import Interrupted
from lmkit.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu


FIELDS = [{}, {"num_kv_heads": 2, "tie_embeddings": True}]
SWITCHES = [{"qk_norm": True, "num_kv_heads": 2}, {"qkv_bias": True}, {"qkv_bias": True, "qk_norm": True}]


GREEDY, DRAWN = Sampling(0.0), Sampling(0.9, top_p=0.8, repetition_penalty=1.3)


@pytest.mark.parametrize(
    ("sampling", "rows", "fields", "weights"),
    [
        *itertools.product((GREEDY, DRAWN), (1, 3, 16, 64, 256), FIELDS + SWITCHES, ["same"]),
        *itertools.product([GREEDY], (1, 3, 16), FIELDS, ["fp8"]),
    ],
    ids=str,
)
def test_500_tokens_equal_the_plain_step_in_float64(sampling, rows, fields, weights):
    options = {"new": 500, "context_length": 1024, "weights": weights}
    checks.check_equals_plain_step(rows, (1, 66, 280)[:rows], sampling, "cuda", **options, **fields)


def texts(model, prompts, kernels=True, **options):
    made: list[list[int]] = [[] for _ in prompts]
    settings = {"stops": (100,), "kernels": kernels}
    for number, token, _ in generate_tokens(model, prompts, GenerateConfig(**options), **settings):
        made[number].append(token)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_size", [16, 64, 256])
def test_a_text_does_not_depend_on_its_company(dtype, batch_size):
    """Alone, in a full batch, and in a queue of 1,000 whose rows are refilled; beyond the context, too. Prompts are
    read with and without a graph, up to four at once."""
    model = checks.model_of("cuda", dtype, context_length=96)
    prompts = checks.prompts_of(tuple(1 + i * 7 % 95 for i in range(1000)))
    options = {"max_new_tokens": 130, "temperature": 1.0, "top_p": 0.9, "batch_size": batch_size}
    queued = texts(model, prompts, **options)
    assert len({len(text) for text in queued}) > 20
    assert texts(model, prompts[:batch_size], **options) == queued[:batch_size]
    for number in (0, 77, 999):
        assert texts(model, prompts[number : number + 1], **options, seed=number) == [queued[number]]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("batch_size", [1, 16, 64, 256])
def test_a_queue_is_what_a_cpu_writes_in_float64(kernels, batch_size):
    """Greedy texts of different lengths that end early, slide and are refilled."""
    model = checks.model_of("cuda", context_length=96, num_kv_heads=2)
    prompts = checks.prompts_of(tuple(1 + i * 7 % 95 for i in range(80 if batch_size < 80 else 300)))
    options = {"max_new_tokens": 130, "temperature": 0.0, "batch_size": batch_size}
    mine = texts(model, prompts, kernels, **options)
    exact = texts(model.double().cpu(), prompts, False, **options | {"batch_size": len(prompts)})
    # float32 rounds: where two logits are equal but for that, a text goes another way. Hardly one does.
    assert sum(a != b for a, b in zip(mine, exact, strict=True)) <= 2


@pytest.mark.parametrize("weights", ["same", "fp8"])
def test_2_to_16_rows_write_the_same(weights):
    model = checks.model_of("cuda", torch.bfloat16)
    prompts = checks.prompts_of(tuple(range(1, 40)))
    made = [texts(model, prompts, max_new_tokens=40, batch_size=rows, weights=weights) for rows in (2, 5, 16)]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(("kernels", "weights"), [(True, "same"), (False, "same"), (True, "fp8")])
def test_predictions_that_are_not_finite_are_refused(kernels, weights):
    for batch_size in (1, 8, 64 if weights == "same" else 16):
        model = checks.model_of("cuda")
        with torch.no_grad():
            model.lm_head.weight[3] = torch.nan
        with raises(LmkitError, "generate.not_finite"):
            texts(model, [[1, 2]], kernels, batch_size=batch_size, weights=weights)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_ctrl_c_keeps_what_there_is(batch_size):
    """SIGINT comes while the host reads tokens some steps late."""
    model, ends = checks.model_of("cuda", vocab_size=260), []

    def on_end(number, generation):
        ends.append(generation)
        if len(ends) == 3:
            raise KeyboardInterrupt

    options = GenerateConfig(max_new_tokens=40, batch_size=batch_size, stop_at_end=False)
    with pytest.raises(Interrupted) as caught:
        generate(model, Tokenizer.from_merges([]), ["abc"] * 20, options, on_end=on_end)
    assert ": 3 of " in str(caught.value)
    texts_begun = caught.value.generations
    assert [texts_begun[number] for number in range(3)] == ends
    assert [len(texts_begun[number].tokens) for number in range(3)] == [40, 40, 40]
    assert 3 <= len(texts_begun) <= 3 + batch_size
    assert generate(model, Tokenizer.from_merges([]), ["abc"], options)[0] == ends[0]


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated():
    model = checks.model_of("cuda", context_length=200_000)
    before = torch.cuda.max_memory_allocated()
    with raises(LmkitError, "generate.out_of_memory", " GB") as caught:
        texts(model, [[1, 2]], batch_size=65_536)
    assert 0 < int(caught.value.hint.split()[-1]) < 65_536
    assert torch.cuda.max_memory_allocated() - before < 1e9


def test_fault_165_a_decoder_takes_no_more_than_was_counted():
    model, rows, sampling = checks.model_of("cuda", torch.bfloat16, vocab_size=20_000), 4096, Sampling(0.0)
    cache, others, once = decoder_needs(model, rows, sampling, kernels=True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    texts(model, [[5] * 299] * rows, batch_size=rows, max_new_tokens=4)
    taken = torch.cuda.max_memory_reserved() - before
    assert 0.8 * rows * (cache + others) < taken <= once + rows * (cache + others)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_old_graphs_are_not_collected_while_another_is_recorded(batch_size):
    """A decoder and its step refer to each other, so only the garbage collector frees their graphs."""
    model, prompts = checks.model_of("cuda"), checks.prompts_of((40,) * 3)
    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    try:
        made = [texts(model, prompts, max_new_tokens=20, batch_size=batch_size) for _ in range(6)]
    finally:
        gc.set_threshold(*thresholds)
    assert all(some == made[0] for some in made)
