"""Generation against a plain loop without cache, and its promises at the edges."""

import logging

import pytest
import torch
from plain_text import plain_text
from raising import raises

from lmkit.attention import attention
from lmkit.core.sampling import Sampling
from lmkit.errors import LmkitError, UsageError
from lmkit.generation import Decoder, GenerateConfig, Interrupted, generate, generate_tokens
from lmkit.model.transformer import compile_model
from lmkit.registry import ATTENTION
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.marks import Marks

END = 259


def sampling(temperature=1.0, top_k=0, top_p=1.0, *, new=20, seed=0):
    return GenerateConfig(max_new_tokens=new, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def greedy(new, **more):
    return GenerateConfig(max_new_tokens=new, temperature=0.0, **more)


def plain_loop(model, prompt, options, seed):
    settings = Sampling(**{key: getattr(options, key) for key in Sampling._fields})
    return plain_text(model, prompt, options.max_new_tokens, settings, seed)


def rows(model, prompts, options, stops=()):
    texts: list[list[int]] = [[] for _ in prompts]
    for row, token, _ in generate_tokens(model, prompts, options, stops=stops):
        texts[row].append(token)
    return texts


@pytest.mark.parametrize(("settings", "kv_heads"), [((0.0,), 4), ((1.0,), 2), ((1.5, 50, 0.95), 4)], ids=str)
def test_equals_the_loop_without_cache_far_beyond_the_context(make_model, settings, kv_heads):
    """Four texts of different lengths in one batch, each as if it were alone; they slide at different times."""
    model = make_model(num_kv_heads=kv_heads)
    torch.manual_seed(3)
    prompts = [torch.randint(260, (length,)).tolist() for length in (1, 4, 15, 16)]
    options = sampling(*settings, new=28, seed=5)
    got = rows(model, prompts, options)
    for row, prompt in enumerate(prompts):
        # float64: rounding decides no draw.
        assert got[row] == plain_loop(model, prompt, options, seed=5 + row)
    if options.temperature:
        assert len({tuple(text) for text in got}) == 4


def window_of_three(q, k, v, *, causal, scale=None):
    """Each query sees three keys."""
    assert causal
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    return attention(q, k, v, mask=(distance >= 0) & (distance < 3), scale=scale)


def test_a_kernel_that_does_not_see_all_keys_generates_as_it_was_trained(make_model, tokenizer):
    ATTENTION.register("window_of_three", sees_all=False)(window_of_three)
    model = make_model(attention="window_of_three")
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8]]
    expected = [plain_loop(model, prompt, greedy(20), seed=0) for prompt in prompts]
    assert rows(model, prompts, greedy(20)) == expected


def test_a_context_of_one_token_sees_the_last_alone(make_model, tokenizer):
    model = make_model(context_length=1)
    options = sampling(new=12, seed=5)
    (got,) = rows(model, [[7]], options)
    assert got == plain_loop(model, [7], options, seed=5)
    assert len(set(got)) > 2
    texts = [generate(model, tokenizer, prompt, greedy(3))[0].text for prompt in ("abc", "c")]
    assert texts[0] == texts[1]


def test_a_compiled_model_generates_without_compiling(make_model):
    plain = make_model()
    expected = rows(plain, [[1, 2], [3]], sampling())

    def refuse(*_):
        raise AssertionError("a graph was compiled")

    for how in ("block", "whole"):
        model = make_model()
        compile_model(model, how, backend=refuse)  # type: ignore[arg-type]
        assert rows(model, [[1, 2], [3]], sampling()) == expected


@pytest.mark.parametrize("settings", [(0.0,), (1.0, 0, 0.9)], ids=str)
def test_a_text_does_not_depend_on_its_company(make_model, settings):
    """Alone, among 16, and in a queue whose rows are refilled as texts end."""
    model = make_model()
    torch.manual_seed(4)
    prompts = [torch.randint(260, (1 + i % 15,)).tolist() for i in range(30)]
    options = sampling(*settings, new=24, seed=3)
    stop = rows(model, prompts[:1], options)[0][5]
    together = rows(model, prompts[:16], options.model_copy(update={"batch_size": 16}), (stop,))
    queued = rows(model, prompts, options.model_copy(update={"batch_size": 7}), (stop,))
    # float64: matrix products of other shapes round otherwise, which decides no draw.
    assert queued[:16] == together
    assert len({len(text) for text in together}) > 1, "no row was refilled early"
    for row in (0, 15):
        alone = options.model_copy(update={"seed": 3 + row})
        assert rows(model, prompts[row : row + 1], alone, (stop,)) == [together[row]]


def test_logprobs_are_those_of_the_model(make_model, tokenizer):
    model = make_model()
    options = sampling(0.7, 20, new=8).model_copy(update={"logprobs": True})
    (made,) = generate(model, tokenizer, "ab", options)
    text = torch.tensor([[*b"ab", *made.tokens]])
    exact = model(text)[0, 1:-1].log_softmax(-1).gather(1, text[0, 2:, None])[:, 0]
    # Kept in float32.
    torch.testing.assert_close(torch.tensor(made.logprobs).double(), exact.detach(), rtol=1e-6, atol=1e-6)
    assert generate(model, tokenizer, "ab", sampling(new=2))[0].logprobs is None


def test_text_tokens_and_pieces_agree(make_model, tokenizer):
    heard: list[list[str]] = [[], []]
    options = GenerateConfig(max_new_tokens=60)
    hear = lambda row, piece: heard[row].append(piece)  # noqa: E731
    made = generate(make_model(), tokenizer, ["ab", "cde"], options, on_text=hear)
    for one, pieces in zip(made, heard, strict=True):
        assert one.text == "".join(pieces) == tokenizer.decode(one.tokens)
        assert all(pieces)
        assert one.ended == (len(one.tokens) < 60)
    assert [one.prompt for one in made] == ["ab", "cde"]
    assert generate(make_model(), tokenizer, []) == []


def test_a_text_ends_at_end_of_text_and_at_any_of_the_stops_or_goes_on(scripted, tokenizer):
    """Those of `generation_config.json`, a list with end-of-text and ordinary tokens; ids beyond the model's are
    never drawn."""
    content = {name: getattr(tokenizer, name) for name in ("vocab", "merges", "special_tokens")}
    several = Tokenizer(**content, marks=Marks(stops=(END, ord("!"), ord("?"), 100_000)))
    for each, stop in ((tokenizer, END), *((several, stop) for stop in (END, ord("!"), ord("?")))):
        model = scripted([*b"one", stop, *b"two"])
        for prompts in (["x"], ["x", "x"]):  # a single row has a step of its own
            for made in generate(model, each, prompts, greedy(7)):
                assert (made.text, made.tokens, made.ended) == ("one", tuple(b"one"), True)
        (going_on,) = generate(model, each, "x", greedy(7, stop_at_end=False))
        assert (going_on.text, going_on.ended) == (f"one{tokenizer.decode([stop])}two", False)


def test_a_long_prompt_is_cropped_to_its_end_with_a_warning(scripted, tokenizer, caplog):
    model = scripted(b"zz", context_length=8)
    with caplog.at_level(logging.WARNING, logger="lmkit"):
        generate(model, tokenizer, ["0123456789"], greedy(1))
    assert model.read == [list(b"3456789")]  # context_length - 1
    assert "10 tokens" in caplog.text
    assert "last 7" in caplog.text
    caplog.clear()
    generate(model, tokenizer, ["0123456"], greedy(1))
    assert not caplog.records


def test_beyond_the_context_the_last_half_is_read_anew(scripted, tokenizer):
    model = scripted(list(b"abcdefg"), context_length=8)
    (made,) = generate(model, tokenizer, ["0123456"], greedy(7))
    assert made.text == "abcdefg"
    read = [bytes(ids) for ids in model.read]
    assert read == [b"0123456", b"56ab"]


def test_fault_91_special_tokens_in_a_prompt_are_plain_text_unless_allowed(scripted, tokenizer):
    model = scripted(b"zz")
    prompt = "a<|endoftext|>b"
    generate(model, tokenizer, [prompt], greedy(1))
    assert model.read == [tokenizer.encode(prompt, allowed_special=frozenset())]
    assert END not in model.read[0]
    model.read.clear()
    generate(model, tokenizer, [prompt], greedy(1, allow_special=True))
    assert model.read == [[ord("a"), END, ord("b")]]


def test_prompts_have_the_prefix_of_the_tokenizer_and_empty_ones_start_where_texts_begin(scripted, tokenizer):
    """No prompt ends with the tokenizer's suffix."""
    content = {"vocab": tokenizer.vocab, "merges": tokenizer.merges}
    content["special_tokens"] = ["<|endoftext|>", "<s>"]
    begun = Tokenizer(**content, marks=Marks(begin="<s>"))
    around = Tokenizer(**content, prefix=[7, END], suffix=[8])
    for each, prompt, first in (
        *(
            (begun, "", [260]),
            (around, "", [7, END]),
            (around, "ab", [7, END, *b"ab"]),
            (tokenizer, "", [END]),
        ),
    ):
        model = scripted(list(b"hi"), vocab_size=261)
        assert generate(model, each, [prompt], greedy(2))[0].text == "hi"
        assert model.read[0] == first
    without = Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[], special_tokens=())
    with raises(UsageError, "generate.empty_prompt"):
        generate(scripted(b"zz"), without, [""], greedy(1))


@pytest.mark.parametrize("ids", [range(256), [*range(256), 900]], ids=["beyond the tokenizer", "gaps"])
def test_ids_without_a_token_are_never_drawn(make_model, ids):
    tokenizer = Tokenizer(vocab={i: bytes([i]) if i < 256 else b"the end" for i in ids}, merges=[])
    options = GenerateConfig(max_new_tokens=200, temperature=50.0, stop_at_end=False)
    (made,) = generate(make_model(vocab_size=1000), tokenizer, "ab", options)
    assert set(made.tokens) <= tokenizer.vocab.keys()


@pytest.mark.parametrize("weight", [float("nan"), 1.5e308, -1.5e308])
@pytest.mark.parametrize("settings", [(0.0,), (1.0,), (1.0, 5), (1.0, 0, 0.9)], ids=str)
def test_predictions_that_are_not_finite_are_refused(make_model, weight, settings):
    """Of a single id, too; -inf is an id that is never taken, and may be."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3] = weight
        predicted = model(torch.tensor([[1]]))[0, -1, 3]
    make = lambda: rows(model, [[1]], sampling(*settings, new=1))  # noqa: E731
    if predicted == -torch.inf:
        assert make() != [[3]]
    else:
        assert not torch.isfinite(predicted)
        with raises(LmkitError, "generate.not_finite"):
            make()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_ctrl_c_at_any_step_leaves_what_there_is(make_model, tokenizer, monkeypatch, batch_size):
    """Of three prompts: whole texts, the beginnings of others, and nothing of those that have not begun."""
    model = make_model()
    options = sampling(new=5).model_copy(update={"batch_size": batch_size})
    whole = generate(model, tokenizer, ["ab", "c", "def"], options)
    for steps in range(16):
        left = iter(range(steps))

        def stop(decoder, longest, left=left, step=Decoder.step):
            if next(left, None) is None:
                raise KeyboardInterrupt
            step(decoder, longest)

        completed: dict[int, object] = {}
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "step", stop)
            try:
                generate(model, tokenizer, ["ab", "c", "def"], options, on_end=completed.__setitem__)
                break
            except Interrupted as interrupted:
                found, said = interrupted.generations, str(interrupted)
        assert f" {len(completed)} of {len(found)} texts" in said
        assert all(found[number] == whole[number] for number in completed)
        assert sum(len(one.tokens) for one in found.values()) >= steps
        for number, one in found.items():
            assert one.tokens
            assert one.tokens == whole[number].tokens[: len(one.tokens)]
            assert one.text == tokenizer.decode(one.tokens)
    assert steps == (15 if batch_size == 1 else 10)


def test_memory_that_runs_out_on_the_way_says_which_batch_fits(make_model, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has much.")

    monkeypatch.setattr(Decoder, "step", fail)
    with raises(LmkitError, "generate.out_of_memory", "2.00 GiB") as caught:
        rows(make_model(), [[1]] * 9, greedy(3, batch_size=8))
    assert caught.value.hint.endswith(" 4")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(make_model):
    model = make_model()
    merges = [(bytes([i]), b" ") for i in range(model.config.vocab_size - 255)]
    with pytest.raises(ValueError, match="embeddings"):
        generate(model, Tokenizer.from_merges(merges), "a")
