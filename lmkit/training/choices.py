"""Judge a model by multiple choice: which continuation of a question is the likeliest. As lm-eval computes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.data.corpora import opened
from lmkit.data.json_lines import json_records
from lmkit.errors import UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.training.evaluation import Scored, log_likelihoods
from lmkit.training.judging import ids_before, open_trained, refuse_not_finite, refuse_pipe_of_ranks

_HINT = 'each line is {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}; or "answer": "4"'


@dataclass(frozen=True)
class Question:
    """A question; `answer` is the index of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Answered:
    """What a model says to a question.

    Attributes:
        log_likelihoods: of each choice after the question, in nats.
        chosen: index of the likeliest choice.
        chosen_norm: index of the likeliest per character.
    """

    answer: int
    chosen: int
    chosen_norm: int
    log_likelihoods: tuple[float, ...]


@dataclass(frozen=True)
class ChoicesResult:
    """Accuracies over all questions, with their standard errors (None of a single question), and every answer."""

    checkpoint: str
    step: int | None
    questions_file: str
    questions: int
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None
    answers: tuple[Answered, ...]

    def __str__(self) -> str:
        def shown(name: str, value: float, error: float | None) -> str:
            return f"{name:<12}{value:.4f}" + ("" if error is None else f" +- {error:.4f}")

        return (
            f"checkpoint  {self.checkpoint}\n"
            f"questions   {self.questions:,} of {self.questions_file}\n"
            f"{shown('acc', self.acc, self.acc_stderr)}\n"
            f"{shown('acc_norm', self.acc_norm, self.acc_norm_stderr)}, of log-likelihoods per character"
        )


def evaluate_choices(path: Path, file: Path, *, device: str = "auto") -> ChoicesResult:
    """Let a trained model answer the questions of a JSON lines file.

    A choice's log-likelihood is that of " " + choice after the question. `acc` counts the questions whose likeliest
    choice is the answer, `acc_norm` those where it is the likeliest after division by its number of characters; of
    equal ones the first counts. Tokens, windows and figures are those of lm-eval's `multiple_choice` tasks with
    `doc_to_text: question` (Gao et al., lm-evaluation-harness 0.4).

    Args:
        path: a run folder, a checkpoint folder, or a Hugging Face folder.
        file: JSON lines with `question`, `choices` and `answer`: an index from 0, or one of the choices.

    Raises:
        UsageError: a line is not such a question, or a choice is longer than the model's context.
        LmkitError: a file is damaged.
    """
    refuse_pipe_of_ranks(file, "--choices")
    questions = list(read_questions(file))
    trained = open_trained(path)
    tokenizer = trained.open_tokenizer()
    texts = []
    for number, question in enumerate(questions, 1):
        for choice in question.choices:
            scored = _pair(tokenizer, question.question, f" {choice}", trained.path)
            if scored.num_scored < 1:
                message = f"{file}, question {number}: a choice without a token of its own"
                hint = "the tokenizer joins the end of the question with it; end the question in another way"
                raise UsageError("evaluate.no_choice", message, hint=hint)
            if scored.num_scored > trained.config.context_length:
                message = f"{file}, question {number}: a choice of {scored.num_scored} tokens"
                hint = f"the model sees {trained.config.context_length} at once"
                raise UsageError("evaluate.long_choice", message, hint=hint)
            texts.append(Scored(scored.ids[-trained.config.context_length - 1 :], scored.num_scored))
    with trained.loaded(device) as (model, ranks):
        found_sums = log_likelihoods(model, texts, ranks, precision=trained.precision)
    refuse_not_finite(found_sums, trained.path, file)
    sums = iter(found_sums)
    answers = []
    for question in questions:
        found = [next(sums) for _ in question.choices]
        per_character = [value / len(choice) for value, choice in zip(found, question.choices, strict=True)]
        answers.append(Answered(question.answer, _largest(found), _largest(per_character), tuple(found)))
    acc = [answer.chosen == answer.answer for answer in answers]
    acc_norm = [answer.chosen_norm == answer.answer for answer in answers]
    return ChoicesResult(
        str(trained.path),
        trained.step,
        str(file),
        len(questions),
        *_mean_and_error(acc),
        *_mean_and_error(acc_norm),
        tuple(answers),
    )


def _largest(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _mean_and_error(right: list[bool]) -> tuple[float, float | None]:
    count, mean = len(right), sum(right) / len(right)
    return mean, math.sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else None


def _pair(tokenizer: Tokenizer, context: str, continuation: str, path: Path) -> Scored:
    """Encode both together; white space at the end of the context counts to what follows.

    Where a token of both holds the end of the context, the ids are those that lm-eval takes: those of the context
    alone, then those of both from this length on.
    """
    kept = context.rstrip()
    if not kept:
        ids = tokenizer.encode(context + continuation, add_special_tokens=False)
        return Scored([*ids_before(tokenizer, path), *ids], len(ids))
    before, whole = _encode(tokenizer, kept), _encode(tokenizer, context + continuation)
    return Scored([*before, *whole[len(before) :]], len(whole) - len(before))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    prefix = list(tokenizer.prefix)
    return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]


def read_questions(file: Path) -> Iterator[Question]:
    """Yield the questions of a JSON lines file, which may be compressed.

    Raises:
        UsageError: there is none, or a line is not a question.
        LmkitError: a line is not JSON, or not UTF-8.
    """
    where = ""
    with opened(file) as (_, stream):
        for where, record in json_records(stream, file):
            yield _question(record, where)
    if not where:
        raise UsageError("evaluate.no_questions", f"{file}: holds no question", hint=_HINT)


def _question(record: Any, where: str) -> Question:
    match record:
        case {"question": str(question), "choices": [*choices], "answer": int(answer) | str(answer)}:
            pass
        case _:
            raise UsageError("evaluate.question", f"{where}: not question, choices and answer", hint=_HINT)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise UsageError("evaluate.question", f"{where}: choices are texts that are not empty", hint=_HINT)
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        why = f"answer {json.dumps(answer)[:80]} is none of the {len(choices)} choices"
        raise UsageError("evaluate.question", f"{where}: {why}", hint=_HINT)
    return Question(question, tuple(choices), answer)
