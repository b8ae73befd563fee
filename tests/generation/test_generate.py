"""Generation against a plain loop without cache, and its promises at the edges."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from lmkit.errors import LmkitError, UsageError
from lmkit.generation.generate import generate, generate_tokens
from lmkit.generation.sampling import Sampling, choose
from lmkit.model.compilation import compile_model
from lmkit.model.transformer import TransformerLM
from lmkit.tokenizer import Tokenizer

END = 259
MakeModel = Callable[..., TransformerLM]


def plain_loop(
    model: TransformerLM,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    seed: int,
    stop_id: int | None = None,
) -> list[int]:
    """One text, everything read anew for each token."""
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    context = model.config.context_length
    text, first = list(prompt), 0
    for uniform in uniforms:
        if len(text) - first > context:
            first = len(text) - context // 2
        with torch.no_grad():
            logits = model(torch.tensor([text[first:]]))[:, -1]
        text.append(choose(logits, uniform[None], sampling).item())
        if text[-1] == stop_id:
            break
    return text[len(prompt) :]


def rows(model: TransformerLM, prompts: list[list[int]], **options: object) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_tokens(model, prompts, **options):  # type: ignore[arg-type]
        texts[row].append(token)
    return texts


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(1.5, 50, 0.95)], ids=str)
def test_equals_the_loop_without_cache_far_beyond_the_context(
    make_model: MakeModel, sampling: Sampling, kv_heads: int
) -> None:
    """Four texts of different lengths in one batch, each as if it were alone; they slide at different times."""
    model = make_model(num_kv_heads=kv_heads)
    torch.manual_seed(3)
    prompts = [torch.randint(260, (length,)).tolist() for length in (1, 4, 15, 16)]
    got = rows(model, prompts, max_new_tokens=40, sampling=sampling, seed=5)
    for row, prompt in enumerate(prompts):
        # float64: rounding decides no draw.
        assert got[row] == plain_loop(model, prompt, 40, sampling, seed=5 + row)
    if sampling.temperature:
        assert len({tuple(text) for text in got}) == 4


def test_a_context_of_one_token_sees_the_last_alone(make_model: MakeModel, tokenizer: Tokenizer) -> None:
    model = make_model(context_length=1)
    (got,) = rows(model, [[7]], max_new_tokens=12, sampling=Sampling(), seed=5)
    expected = [7]
    for uniform in torch.rand(12, generator=torch.Generator().manual_seed(5)):
        with torch.no_grad():
            logits = model(torch.tensor([expected[-1:]]))[:, -1]
        expected.append(choose(logits, uniform[None], Sampling()).item())
    assert got == expected[1:]
    assert len(set(got)) > 2
    prompted = generate(model, tokenizer, ["abc"], max_new_tokens=3, sampling=Sampling(0.0))
    assert (
        prompted[0].text
        == generate(model, tokenizer, ["c"], max_new_tokens=3, sampling=Sampling(0.0))[0].text
    )


def test_generates_under_autocast(make_model: MakeModel) -> None:
    model = make_model().float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        likeliest = model(torch.tensor([[1, 2, 3]]))[0, -1].argmax().item()
        got = rows(model, [[1, 2, 3], [4]], max_new_tokens=30, sampling=Sampling(0.0))
    assert got[0][0] == likeliest
    assert [len(text) for text in got] == [30, 30]


def test_nothing_is_recorded_for_a_backward_pass(make_model: MakeModel) -> None:
    model = make_model()
    recorded = []
    model.ln_final.register_forward_hook(lambda _, __, out: recorded.append(out.requires_grad))
    rows(model, [[1, 2], [3]], max_new_tokens=30, sampling=Sampling())  # beyond the context, too
    assert len(recorded) > 30
    assert not any(recorded)


def test_a_row_that_ended_does_not_spoil_the_others(make_model: MakeModel) -> None:
    """What a text that has ended would go on with is of no interest: not a number, say."""
    model = make_model()
    stop = rows(model, [[1, 2, 3], [4]], max_new_tokens=1, sampling=Sampling(), seed=1)[0][0]
    original = model.forward

    def forward(ids: torch.Tensor, cache: object) -> torch.Tensor:
        logits = original(ids, cache)  # type: ignore[arg-type]
        logits[0] = float("nan")
        return logits

    model.forward = forward  # type: ignore[assignment]
    got = rows(model, [[1, 2, 3], [4]], max_new_tokens=5, sampling=Sampling(), seed=1, stop_id=stop)
    assert got == [[stop], plain_loop(make_model(), [4], 5, Sampling(), seed=2, stop_id=stop)]


def test_a_row_that_stops_early_leaves_the_others_alone(make_model: MakeModel) -> None:
    model = make_model()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    free = rows(model, prompts, max_new_tokens=30, sampling=Sampling(), seed=1)
    stop = free[0][6]
    expected = [plain_loop(model, prompt, 30, Sampling(), 1 + i, stop) for i, prompt in enumerate(prompts)]
    got = rows(model, prompts, max_new_tokens=30, sampling=Sampling(), seed=1, stop_id=stop)
    assert got == expected
    assert len(got[0]) < 30 < len(got[0]) + len(got[1])


def test_a_compiled_model_generates_without_compiling(make_model: MakeModel) -> None:
    plain = make_model()
    expected = rows(plain, [[1, 2], [3]], max_new_tokens=20, sampling=Sampling())

    def refuse(*_: object) -> None:
        raise AssertionError("a graph was compiled")

    for how in ("block", "whole"):
        model = make_model()
        compile_model(model, how, backend=refuse)  # type: ignore[arg-type]
        assert rows(model, [[1, 2], [3]], max_new_tokens=20, sampling=Sampling()) == expected


def test_the_same_seed_writes_the_same_and_another_something_else(
    make_model: MakeModel, tokenizer: Tokenizer
) -> None:
    model = make_model()

    def write(*prompts: str, seed: int) -> list[str]:
        made = generate(model, tokenizer, prompts, max_new_tokens=20, seed=seed)
        return [one.text for one in made]

    torch.manual_seed(1)
    first = write("ab", "ab", "xyz", seed=7)
    torch.manual_seed(2)  # the global generator plays no part
    assert write("ab", "ab", "xyz", seed=7) == first
    assert write("ab", seed=7) == first[:1]
    assert write("xyz", seed=9) == first[2:]
    assert first[0] != first[1]  # the same prompt twice: two texts
    assert write("ab", seed=8) != first[:1]


def test_text_tokens_and_pieces_agree(make_model: MakeModel, tokenizer: Tokenizer) -> None:
    heard: list[list[str]] = [[], []]
    made = generate(
        make_model(),
        tokenizer,
        ["ab", "cde"],
        max_new_tokens=60,
        on_text=lambda row, piece: heard[row].append(piece),
    )
    for one, pieces in zip(made, heard, strict=True):
        assert one.text == "".join(pieces) == tokenizer.decode(one.tokens)
        assert all(pieces)
        assert one.ended == (len(one.tokens) < 60)
    assert [one.prompt for one in made] == ["ab", "cde"]


def test_text_ends_at_end_of_text_or_goes_on(scripted: Callable, tokenizer: Tokenizer) -> None:
    script = [*b"one", END, *b"two"]
    (stopped,) = generate(scripted(script), tokenizer, ["x"], max_new_tokens=7, sampling=Sampling(0.0))
    assert (stopped.text, stopped.tokens, stopped.ended) == ("one", tuple(b"one"), True)
    (going_on,) = generate(
        scripted(script), tokenizer, ["x"], max_new_tokens=7, sampling=Sampling(0.0), stop_at_end=False
    )
    assert (going_on.text, going_on.ended) == ("one<|endoftext|>two", False)


def test_fault_90_a_long_prompt_is_cropped_to_its_end_with_a_warning(
    scripted: Callable, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    model = scripted([ord("z")] * 2, context_length=8)
    with caplog.at_level(logging.WARNING, logger="lmkit"):
        generate(model, tokenizer, ["0123456789"], max_new_tokens=1, sampling=Sampling(0.0))
    assert model.read == [list(b"3456789")]  # context_length - 1
    assert "10 tokens" in caplog.text
    assert "last 7" in caplog.text
    caplog.clear()
    generate(model, tokenizer, ["0123456"], max_new_tokens=1, sampling=Sampling(0.0))
    assert not caplog.records


def test_beyond_the_context_the_last_half_is_read_anew(scripted: Callable, tokenizer: Tokenizer) -> None:
    model = scripted(list(b"abcdefg"), context_length=8)
    (made,) = generate(model, tokenizer, ["0123456"], max_new_tokens=7, sampling=Sampling(0.0))
    assert made.text == "abcdefg"
    read = [bytes(ids) for ids in model.read]
    assert read == [b"0123456", b"a", b"56ab", b"c", b"d", b"e", b"f"]


def test_fault_91_special_tokens_in_a_prompt_are_plain_text_unless_allowed(
    scripted: Callable, tokenizer: Tokenizer
) -> None:
    model = scripted([ord("z")] * 2)
    prompt = "a<|endoftext|>b"
    generate(model, tokenizer, [prompt], max_new_tokens=1, sampling=Sampling(0.0))
    assert model.read == [tokenizer.encode(prompt, allowed_special=frozenset())]
    assert END not in model.read[0]
    model.read.clear()
    generate(model, tokenizer, [prompt], max_new_tokens=1, sampling=Sampling(0.0), allow_special=True)
    assert model.read == [[ord("a"), END, ord("b")]]


def test_fault_92_an_empty_prompt_starts_from_end_of_text(scripted: Callable, tokenizer: Tokenizer) -> None:
    model = scripted(list(b"hi"))
    (made,) = generate(model, tokenizer, [""], max_new_tokens=2, sampling=Sampling(0.0))
    assert model.read[0] == [END]
    assert made.text == "hi"


def test_fault_92_an_empty_prompt_needs_an_end_of_text(make_model: MakeModel) -> None:
    bare = Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[], special_tokens=())
    with pytest.raises(UsageError, match="empty prompt") as caught:
        generate(make_model(), bare, [""], max_new_tokens=1)
    assert caught.value.exit_code == 2


def test_fault_94_a_text_cut_inside_a_character_neither_crashes_nor_garbles(
    scripted: Callable, tokenizer: Tokenizer
) -> None:
    script = [*"é☃".encode(), *"😀".encode()[:2]]
    heard: list[str] = []
    (made,) = generate(
        scripted(script),
        tokenizer,
        ["x"],
        max_new_tokens=len(script),
        sampling=Sampling(0.0),
        on_text=lambda row, piece: heard.append(piece),
    )
    assert heard == ["é", "☃", "\ufffd"]
    assert made.text == "é☃\ufffd"


def test_ids_beyond_the_tokenizer_are_never_drawn(make_model: MakeModel, tokenizer: Tokenizer) -> None:
    model = make_model(vocab_size=1000)
    (made,) = generate(
        model, tokenizer, ["ab"], max_new_tokens=200, sampling=Sampling(50.0), stop_at_end=False
    )
    assert max(made.tokens) < tokenizer.vocab_size


def test_ids_that_are_no_tokens_are_never_drawn(make_model: MakeModel) -> None:
    gaps = Tokenizer(vocab={i: bytes([i]) for i in range(256)} | {900: b"the end"}, merges=[])
    model = make_model(vocab_size=1000)
    (made,) = generate(model, gaps, ["ab"], max_new_tokens=200, sampling=Sampling(50.0), stop_at_end=False)
    assert set(made.tokens) <= gaps.vocab.keys()


def test_no_prompts_no_text(make_model: MakeModel, tokenizer: Tokenizer) -> None:
    assert generate(make_model(), tokenizer, [], max_new_tokens=5) == []


def test_refusals(make_model: MakeModel, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="max_new_tokens"):
        generate(make_model(), tokenizer, ["a"], max_new_tokens=0)


@pytest.mark.parametrize("weight", [float("nan"), 1.5e308, -1.5e308])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(1.0, 5), Sampling(1.0, 0, 0.9)])
def test_predictions_that_are_not_finite_are_refused(
    make_model: MakeModel, weight: float, sampling: Sampling
) -> None:
    """Of a single id, too; -inf is an id that is never taken, and may be."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3] = weight
        predicted = model(torch.tensor([[1]]))[0, -1, 3]
    make = lambda: rows(model, [[1]], max_new_tokens=1, sampling=sampling)  # noqa: E731
    if predicted == -torch.inf:
        assert make() != [[3]]
    else:
        assert not torch.isfinite(predicted)
        with pytest.raises(LmkitError, match="not finite"):
            make()
