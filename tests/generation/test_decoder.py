"""A step with the cache has the logits of the model without one."""

import pytest
import torch
from live_memory import LiveMemory
from marking import full_except
from raising import raises

from lmkit.core.sampling import Sampling
from lmkit.errors import LmkitError, UsageError
from lmkit.generation import Decoder
from lmkit.generation import decoder as decoders
from lmkit.generation.decoder import CPUStep, can_run_kernels, decoder_needs
from lmkit.generation.prefill import Prefill
from lmkit.model.memory import SWITCHES as KNOWN

GREEDY, ENDLESS = Sampling(temperature=0.0), 1000


def texts_of(decoder):
    places = decoder.state.place.tolist()
    return [text[: place + 1].tolist() for text, place in zip(decoder.state.text, places, strict=True)]


SWITCHES = {"qk_norm": True, "attention_window": 4}


SCALED = {"qkv_bias": True, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 32}


@pytest.mark.parametrize(
    "fields",
    [
        *({"num_kv_heads": heads, "attention": name} for heads, name in ((4, "sdpa"), (1, "reference"))),
        {"d_head": 20},
        *(*({key: value} for key, value in SWITCHES.items()), SWITCHES, SCALED),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_equal_those_without_a_cache(make_model, rows, fields):
    """A switch of the model that no faster step knows is computed by the model itself."""
    model = make_model(**{"num_kv_heads": 2, **fields})
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
    decoder = Decoder(model, rows, sampling=GREEDY, most=ENDLESS)
    assert not can_run_kernels(model)
    decoder.start(range(rows), [[1, 2, 3, 4, 5, 6], [9], [7, 8]][:rows], seeds=[0] * rows)
    for _ in range(7):
        texts = texts_of(decoder)
        with torch.inference_mode():
            logits = decoder._step(max(map(len, texts)))
        for row, text in enumerate(texts):
            exact = model(torch.tensor([text]))[0, -1]
            # float64; matrix products of other shapes sum in another order.
            torch.testing.assert_close(logits[row], exact, rtol=1e-11, atol=1e-11)
        decoder.step(max(map(len, texts)))
        assert [text[:-1] for text in texts_of(decoder)] == texts


def test_a_step_lists_the_switches_that_it_knows(make_model):
    """The switches above are all there are, but for the biases; the test above runs each by the step taken here."""
    assert make_model(**SWITCHES).config.switches == set(SWITCHES)
    for key, value in SWITCHES.items():
        decoder = Decoder(make_model(**{key: value}), 2, sampling=GREEDY, most=ENDLESS)
        assert isinstance(decoder._step, CPUStep) == (key in KNOWN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_in_other_dtypes(make_model, dtype):
    model = make_model(num_kv_heads=2)
    text = torch.randint(260, (9,)).tolist()
    exact = model(torch.tensor([text]))[0, -1].detach()
    decoder = Decoder(model.to(dtype), 2, sampling=GREEDY, most=ENDLESS)
    decoder.start([1], [text], seeds=[0])
    with torch.inference_mode():
        logits = decoder._step(9)[1]
    assert decoder.cache.keys.dtype == decoder.cache.values.dtype == logits.dtype == dtype
    # bfloat16 has 8 bits of mantissa, some twenty roundings deep: a percent or two of the norm.
    allowed = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert (logits.double() - exact).norm() < allowed * exact.norm()


@pytest.mark.parametrize("rows", full_except(2, 1))
@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(0.0), Sampling(0.7, repetition_penalty=1.3), Sampling(1.5, top_k=40)),
        *(Sampling(1.5, top_p=0.9, min_p=0.01), Sampling(1.5, top_k=40, top_p=0.9)),
    ],
    ids=str,
)
def test_the_fast_step_writes_what_the_model_writes(make_model, sampling, rows):
    """Also the state that it leaves, and where it ends: after 12 tokens, or at one of two tokens."""
    model = make_model(context_length=32, num_kv_heads=2)
    options = {"sampling": sampling, "vocab_size": 250, "never": [3, 5], "logprobs": True}
    for seed in range(0, 10, rows):
        fast, plain = (Decoder(model, rows, stops=(7, 11), most=12, **options) for _ in range(2))
        assert isinstance(fast._step, CPUStep)
        plain._step = plain.next_logits
        for decoder in (fast, plain):
            decoder.start(range(rows), [[1, 2, 9], [4] * 5][:rows], seeds=range(seed, seed + rows))
            for length in range(5, 19):
                decoder.step(length)
        assert fast.state.done.all()
        for mine, theirs in zip(fast.state[:-1], plain.state[:-1], strict=True):
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(fast.state.logprobs, plain.state.logprobs)
        assert torch.equal(fast.rules.seen, plain.rules.seen)


@pytest.mark.parametrize(
    "name", ["", "token_embeddings", "layers", "layers.1", "layers.1.attn", "ln_final", "lm_head"]
)
def test_a_hook_steers_the_text_that_it_steers_in_the_model(make_model, name):
    model, ids = make_model(context_length=32), [1, 2, 3]
    torch.manual_seed(3)
    steps = {}

    def steer(module, inputs, output):
        width = output.shape[-1]
        return output + steps.setdefault(width, 3 * torch.randn(width, dtype=output.dtype))

    def written() -> list[int]:
        decoder = Decoder(model, 1, sampling=GREEDY, most=ENDLESS)
        decoder.start([0], [ids], seeds=[0])
        for length in range(4, 10):
            decoder.step(length)
        return texts_of(decoder)[0]

    free = written()
    model.get_submodule(name).register_forward_hook(steer)
    expected = ids
    with torch.no_grad():
        for _ in range(6):
            expected = [*expected, int(model(torch.tensor([expected]))[0, -1].argmax())]
    assert written() == expected != free


def test_a_prompt_is_read_up_to_the_last_layers_keys(make_model):
    model, called = make_model(), []
    for number, layer in enumerate(model.layers):
        layer.ffn.register_forward_hook(lambda *_, number=number: called.append(number))
    Decoder(model, 2, sampling=GREEDY, most=ENDLESS).start([1], [[3, 1, 4]], seeds=[0])
    assert called == [*range(len(model.layers) - 1)]


def test_texts_that_are_read_padded_and_together_are_read_the_same(make_model):
    """As beside the kernels' step. Some groups are not full; the padding of short texts is cut at the capacity."""
    model = make_model(context_length=150, num_kv_heads=2)
    torch.manual_seed(1)
    prompts = [torch.randint(260, (length,)).tolist() for length in (1, 2, 64, 65, 66, 129, 150, 149, 70, 9)]
    written = []
    for padded in (False, True):
        decoder = Decoder(model, 48, sampling=GREEDY, most=ENDLESS)
        decoder._prefill = Prefill(decoder, padded=padded)
        assert decoder._prefill.together == (3 if padded else 1)
        rows = range(40, 30, -1)
        decoder.start(rows, prompts, seeds=[0] * 10)
        decoder.step(150)
        decoder.slide([34, 40])  # 150 and 1 tokens: the second slides too early, in the same way
        decoder.step(150)
        assert not decoder._prefill._graphs  # a CPU records none, and remembers no lengths for them
        written.append([decoder.state.text[row, : decoder.state.place[row] + 1].tolist() for row in rows])
    assert written[0] == written[1]
    assert [len(text) for text in written[0]] == [76, 4, 66, 67, 68, 131, 76, 151, 72, 11]


@pytest.mark.parametrize(("rows", "kernels", "said"), [(1, False, "kernels"), (17, True, "17")])
def test_fp8_weights_that_bring_nothing_are_refused_before_anything_is_allocated(
    make_model, monkeypatch, rows, kernels, said
):
    model = make_model()
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *_: pytest.fail("memory was allocated"))
    with raises(UsageError, "generate.weights", "fp8", said, hint='"same"'):
        Decoder(model, rows, sampling=GREEDY, most=ENDLESS, kernels=kernels, weights="fp8")


def test_rows_that_do_not_fit_are_refused_before_anything_is_allocated(make_model, monkeypatch):
    model = make_model()
    cache, others, once = decoder_needs(model, 3, GREEDY, kernels=False)
    monkeypatch.setattr(decoders, "available_memory", lambda: once + 3 * (cache + others))
    Decoder(model, 3, sampling=GREEDY, most=ENDLESS)
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *_: pytest.fail("memory was allocated"))
    with raises(LmkitError, "generate.out_of_memory", "generate.batch_size") as caught:
        Decoder(model, 4, sampling=GREEDY, most=ENDLESS)
    assert caught.value.hint.endswith(" 3")


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 2}, {"attention_window": 7}], ids=str)
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(0.9, top_k=5, top_p=0.8, repetition_penalty=1.3)], ids=str
)
def test_fault_165_the_batch_that_fits_has_all_that_a_decoder_allocates(make_model, sampling, fields):
    model, rows = make_model(**fields), 40
    cache, others, once = decoder_needs(model, rows, sampling, kernels=False)
    with LiveMemory() as memory_used:
        decoder = Decoder(model, rows, sampling=sampling, most=ENDLESS, kernels=False)
        decoder.start(range(rows), [[5] * 15] * rows, range(rows))
        decoder.step(15)
    assert 0.7 < memory_used.peak / (once + rows * (cache + others)) <= 1
