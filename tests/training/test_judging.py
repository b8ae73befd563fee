"""Models judged on text and on questions, against sums taken token by token."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizers import of_bytes
from raising import raises
from their_models import log_p, spoil, their_folder, write_lines

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.ranks import Ranks
from lmkit.tokenizer import Tokenizer
from lmkit.training import judging
from lmkit.training.exchange import import_model
from lmkit.training.judging import evaluate_choices, evaluate_documents, evaluate_run
from lmkit.training.weights import open_weights

CONTEXT = 16
END = "<|endoftext|>"
TEXTS = ("one fish two fish", "red fish, blüe fish and a much longer line of fish", "ok")


TOKENIZER = of_bytes(END, merges=[(b"f", b"i"), (b"fi", b"s"), (b"fis", b"h"), (b" ", b"fish")])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder. Its weights are large enough for unlike log-likelihoods."""
    monkeypatch.chdir(tmp_path)
    path = their_folder(Path(), changes={"max_position_embeddings": CONTEXT}, scale=0.3)
    TOKENIZER.save(path / "tokenizer.json")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def test_a_text_shorter_than_the_context_is_one_window(folder):
    Path("short.txt").write_text("ok")
    result = evaluate_run(folder, text=Path("short.txt"))
    assert (result.step, result.tokens) == (None, 2)
    with raises(LmkitError, "data.no_tokens", folder):
        evaluate_run(folder)


def test_ranks_share_the_batches(folder, monkeypatch):
    monkeypatch.setattr(judging, "TOKENS_AT_ONCE", 20)
    model = open_weights(folder).model("cpu")
    texts = [judging.Scored(list(range(2 + number)), 1 + number) for number in range(12)]
    alone = judging.log_likelihoods(model, texts)
    shares: list[dict[int, float]] = []

    def all_gather_object(parts: list[dict[int, float]], found: dict[int, float]) -> None:
        shares.append(found)
        parts[:] = [dict(enumerate(alone)), {}]

    monkeypatch.setattr(judging, "dist", SimpleNamespace(all_gather_object=all_gather_object))
    for rank in range(2):
        assert judging.log_likelihoods(model, texts, Ranks(rank=rank, world_size=2)) == alone
    assert not shares[0].keys() & shares[1].keys()
    assert shares[0] | shares[1] == dict(enumerate(alone))
    assert min(map(len, shares)) >= 4


QUESTIONS: list[dict[str, Any]] = [
    {"question": "one fish", "choices": ["two fish", "red", "a fish of many"], "answer": 0},
    {"question": "two fish ", "choices": ["x", "fishfish"], "answer": "fishfish"},  # a blank at the end
    {"question": "", "choices": ["fish", "ünd"], "answer": 1},
    {"question": " ", "choices": ["fish", "ünd"], "answer": 1},
    {"question": "longer than what the model sees at once: " * 2, "choices": ["fish", "no"], "answer": 0},
]


def test_choices_are_scored_one_by_one(folder):
    result = evaluate_choices(folder, write_lines("questions.jsonl", QUESTIONS))
    model = open_weights(folder).model("cpu")
    right = right_norm = 0
    for question, answered in zip(QUESTIONS, result.answers, strict=True):
        context, sums = question["question"], []
        for choice in question["choices"]:
            before = TOKENIZER.encode(context.rstrip()) or [260]  # end-of-text
            whole = TOKENIZER.encode(f"{context} {choice}")
            if before == [260]:
                whole = before + whole
            new = len(whole) - len(before)
            sums.append(math.fsum(log_p(model, whole[-CONTEXT - 1 :])[-new:]))
        assert answered.log_likelihoods == pytest.approx(sums, rel=1e-5)  # float32
        norms = [value / len(choice) for value, choice in zip(sums, question["choices"], strict=True)]
        answer = question["answer"]
        answer = question["choices"].index(answer) if isinstance(answer, str) else answer
        assert (answered.chosen, answered.chosen_norm) == (sums.index(max(sums)), norms.index(max(norms)))
        right += answered.chosen == answer
        right_norm += answered.chosen_norm == answer
    assert (result.acc, result.acc_norm) == (right / 5, right_norm / 5)
    assert result.acc_stderr == pytest.approx(math.sqrt(result.acc * (1 - result.acc) / 4))


def without_letter_x(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    vocab = {i: bytes([i]) for i in range(256) if i != ord("X")} | {ord("X"): b"th"}
    Tokenizer(vocab=vocab, merges=[(b"t", b"h")], special_tokens=[END]).save(folder / "tokenizer.json")


def test_a_question_that_the_tokenizer_loses_is_a_text_without_context(folder):
    without_letter_x(folder)
    choices = {"choices": ["the boat", "a fish"], "answer": 0}
    lost, empty, other = ({"question": text, **choices} for text in ("X", "", "one two three"))
    result = evaluate_choices(folder, write_lines("questions.jsonl", [lost, empty, other]))
    log_likelihoods = [answered.log_likelihoods for answered in result.answers]
    assert log_likelihoods[0] == pytest.approx(log_likelihoods[1], rel=1e-5)


def test_documents_that_the_tokenizer_loses_are_left_out(folder, caplog):
    without_letter_x(folder)
    file = write_lines("documents.jsonl", [{"text": "X"}, {"text": "the boat"}])
    (score,) = evaluate_documents(folder, text=file).documents
    assert (score.number, score.bytes) == (2, 8)
    assert "1 of 2 documents" in caplog.text


@pytest.mark.parametrize(
    ("choices", "answer"),
    [(["b"], None), (["b", ""], 0), ([], 0), (["b", "c"], 2), (["b", "c"], True), (["b", "c"], "d")],
)
def test_what_is_no_question_is_named(choices, answer, folder):
    file = write_lines(
        "questions.jsonl", [*QUESTIONS, {"question": "a", "choices": choices, "answer": answer}]
    )
    with raises(UsageError, "evaluate.question", file, "6"):
        evaluate_choices(folder, file)


def test_a_choice_that_the_question_swallows_or_that_is_too_long_is_refused(folder):
    """The words "!!" and a new line are one token, "!!" is two: the choice would be left without a token, and lm-eval
    asserts."""
    question = {"question": "a", "choices": ["b", "long " * 9], "answer": 0}
    with raises(UsageError, "evaluate.choice_length", "questions.jsonl, question 6"):
        evaluate_choices(folder, write_lines("questions.jsonl", [*QUESTIONS, question]))
    merges = [(b"!", b"\n"), (b"!", b"!\n"), (b" ", b"x")]
    (folder / "tokenizer_config.json").unlink()
    of_bytes(END, merges=merges, pattern="llama3").save(folder / "tokenizer.json")
    question = {"question": "a!!\n", "choices": ["no", "x"], "answer": 0}
    with raises(UsageError, "evaluate.choice_length", "questions.jsonl, question 6"):
        evaluate_choices(folder, write_lines("questions.jsonl", [*QUESTIONS, question]))


def test_more_ids_than_the_model_has_are_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    Tokenizer.from_merges([], [f"<{i}>" for i in range(60)]).save(folder / "tokenizer.json")
    with raises(LmkitError, "weights.more_ids", "315", "300"):
        evaluate_choices(folder, write_lines("questions.jsonl", QUESTIONS))


# lm-eval


def test_the_harness_gets_an_exported_folder(folder, monkeypatch, terminal):
    import_model(folder, Path("run"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)  # not installed
        terminal.refuses("evaluate run --harness fish", code="evaluate.no_harness")
    asked: list[Any] = []

    def simple_evaluate(*, model: Path, tasks: list[str], log_samples: bool) -> dict[str, Any]:
        print("a table that belongs to stderr")
        asked.append((model, {path.name for path in model.iterdir()}, tasks))
        if tasks == ["nothing"]:
            raise KeyError("nothing")
        acc = math.nan if tasks == ["nan"] else 0.5
        return {"results": {"fish": {"alias": "fish", "acc,none": acc, "acc_stderr,none": 0.25}}}

    found = SimpleNamespace(simple_evaluate=simple_evaluate, __version__="0.4")
    monkeypatch.setitem(sys.modules, "lm_eval", found)
    monkeypatch.setattr("lmkit.training.judging._model", lambda folder, device, path: folder)
    result = json.loads(terminal("evaluate run --harness fish --harness other --device cpu --json"))
    assert result["results"]["fish"]["acc,none"] == 0.5
    assert "fish  acc 0.5000 +- 0.2500" in terminal("evaluate theirs --harness fish")
    (_, held, tasks), (model, *_) = asked
    assert (tasks, model) == (["fish", "other"], Path("theirs"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= held
    terminal.refuses("evaluate theirs --harness nothing", code="evaluate.harness", exit_code=1)
    terminal.refuses("evaluate theirs --harness nan", code="evaluate.not_finite", exit_code=1)


def test_a_model_that_predicts_nan_is_not_judged(folder):
    spoil(folder)
    Path("text.txt").write_text(END.join(TEXTS))
    question = {"question": "one", "choices": ["fish", "two"], "answer": 0}
    Path("questions.jsonl").write_text(json.dumps(question))
    for judge in (
        lambda: evaluate_run(folder, text=Path("text.txt")),
        lambda: evaluate_documents(folder, text=Path("text.txt")),
        lambda: evaluate_choices(folder, Path("questions.jsonl")),
    ):
        with raises(LmkitError, "evaluate.not_finite", "theirs") as refused:
            judge()
        assert refused.value.exit_code == 1
