"""Judge a trained model on text, wherever the model lies: a run, a checkpoint or a Hugging Face folder:
by documents, by multiple choice as lm-eval computes it, and by lm-eval itself (the extra `lmkit[eval]`)."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lmkit.core.ranges import range_
from lmkit.data.corpora import PathOrPaths, as_paths
from lmkit.data.encoding import encode_corpus
from lmkit.data.formats import opened
from lmkit.data.json_lines import json_records
from lmkit.data.overlap import Overlap, overlap_of, shown
from lmkit.data.shards import name_of, open_tokens, shard_paths, with_num_bytes
from lmkit.data.token_files import TokenFile, check_length, document_starts
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.tables import Column, terminal_table
from lmkit.model.memory import tokens_per_slice
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.ranks import Ranks, local_device, process_group
from lmkit.recipe.load import validate
from lmkit.recipe.run_folder import RECIPE, placed_in, run_folder_of, token_file
from lmkit.recipe.tables import RunConfig
from lmkit.tokenizer import Tokenizer
from lmkit.training.checkpoint import STATE
from lmkit.training.evaluation import TOKENS_AT_ONCE, EvaluateResult, evaluate, held_out_of, summarise
from lmkit.training.precision import autocast, hold_weights
from lmkit.training.process import numerics
from lmkit.training.run_data import refuse_changed_files
from lmkit.training.weights import GivenWeights, is_hugging_face, open_weights

_HINTS = {  # of errors in a text named on the command line, where no option replaces invalid bytes
    "text.not_utf8": "convert the text to UTF-8 first, for example with iconv",
    "corpus.no_field": "name the key that holds the text: --field",
    "tokens.too_short": "use a longer text",
}
_SHOWN = 40
log = logging.getLogger("lmkit")


def evaluate_run(
    path: Path,
    *,
    tokens: PathOrPaths | None = None,
    text: Path | None = None,
    field: str | None = None,
    device: str = "auto",
    strict: bool = False,
) -> EvaluateResult:
    """Evaluate a trained model in the precision it was trained in, on consecutive windows of its context's length.

    Args:
        path: a run folder, whose newest good checkpoint counts; a checkpoint folder; or a Hugging Face folder.
        tokens: a token file, a glob, or several; None: the run's own held-out file.
        text: a text file instead, or JSON objects, which the model's tokenizer encodes.
        field: the key of a JSON object, or the column of a Parquet file, that holds the text; None: "text".
        strict: refuse a text that stands in the training text, or of which it is not known; see `overlap_of`.

    Raises:
        UsageError: there is no model or no token file, or the file was made with another tokenizer.
        LmkitError: something is damaged.
    """
    trained = open_trained(path)
    with (
        _opened_text(trained, tokens, text, field, strict) as (file, name, overlap),
        trained.loaded(device) as (model, ranks),
    ):
        check_length(file.tokens, 1)
        length = min(trained.weights.config.context_length, len(file.tokens) - 1)
        held_out = held_out_of(file, trained.weights.config, context_length=length, rows=trained.rows)
        evaluation = evaluate(model, held_out, ranks, precision=trained.precision)
    assert evaluation is not None
    if not evaluation.tokens:
        hint = "name conversations with words of the assistant"
        raise UsageError("evaluate.nothing_counts", f"{name}: none of its tokens counts", hint=hint)
    refuse_not_finite([evaluation.loss], trained.weights.path, name)
    checkpoint, step = trained.place
    place: Any = {"checkpoint": checkpoint, "step": step, "tokens_file": name}
    return EvaluateResult(**asdict(evaluation), **place, overlap=overlap)


@contextmanager
def _opened_text(
    trained: TrainedModel, tokens: PathOrPaths | None, text: Path | None, field: str | None, strict: bool
) -> Iterator[tuple[TokenFile, str, Overlap | None]]:
    """Yield the token file to judge on, the name of what the user named, and how much of it the model learned."""
    if text is None:
        paths = tokens or trained.held_out
        shards = [] if paths is None else shard_paths(paths)
        missing = [trained.weights.path] if paths is None else [path for path in shards if not path.exists()]
        if missing:
            hint = "name a token file or a text: lmkit evaluate RUN --tokens FILE.npy, or --text FILE"
            raise UsageError("data.no_tokens", f"{missing[0]}: no held-out token file", hint=hint)
        weights = trained.weights
        known: Any = {"tokenizer_sha256": weights.tokenizer_sha256, "vocab_size": weights.config.vocab_size}
        is_bin = any(path.suffix == ".bin" for path in shards)
        if weights.tokenizer is not None and (is_bin or weights.tokenizer_sha256 is None):
            known = {"tokenizer": weights.open_tokenizer()}
        opened = with_num_bytes(open_tokens(shards, **known), known.get("tokenizer"))
        if tokens is None:
            refuse_changed_files(shards, other="--tokens FILE.npy")
        trained.weights.refuse_more_ids(opened.meta.vocab_size, shards[0])
        name = name_of(shards)
        yield opened, name, overlap_of(trained.learned, shards, name=name, strict=strict)
        return
    if tokens is not None:
        message = "--tokens and --text: two files to evaluate on"
        raise UsageError("evaluate.two_files", message, hint="leave out one of them")
    with tempfile.TemporaryDirectory() as made:
        encoded = Path(made, "text.npy")
        try:
            encode_corpus(text, encoded, trained.weights.open_tokenizer(), field=field)
            overlap = overlap_of(trained.learned, [encoded], name=text, strict=strict)
            yield open_tokens(encoded), str(text), overlap
        except LmkitError as error:
            message = error.message.replace(str(encoded), str(text))
            hint = _HINTS.get(error.code, error.hint)
            raise type(error)(error.code, message, hint=hint) from error


def refuse_not_finite(nats: Sequence[float], model: Path, text: object) -> None:
    """Refuse log-likelihoods or losses that are no numbers, before anything is concluded from them."""
    wrong = [value for value in nats if not math.isfinite(value)]
    if wrong:
        message = f"{model}: {len(wrong)} of {len(nats)} losses on {text} are not finite ({wrong[0]})"
        hint = "it predicts no finite numbers; use an older checkpoint"
        raise LmkitError("evaluate.not_finite", message, hint=hint)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model that is not yet loaded, and what is needed to judge it."""

    weights: GivenWeights
    precision: str
    rows: int
    run: RunConfig
    held_out: PathOrPaths | None
    learned: Sequence[Path] = ()

    @property
    def place(self) -> tuple[str, int | None]:
        """The checkpoint or the folder, and the step of the checkpoint."""
        return str(self.weights.path), None if self.weights.state is None else self.weights.state.step

    @contextmanager
    def loaded(self, device: str) -> Iterator[tuple[TransformerLM, Ranks]]:
        """Yield the model as it computes in its precision, and this process's place."""
        with process_group(device) as ranks, numerics(self.run, ranks):
            model = self.weights.model(ranks.device)
            hold_weights(model, self.precision)
            yield model, ranks


def open_trained(path: Path) -> TrainedModel:
    """Open a run's newest good checkpoint, a checkpoint, or a Hugging Face folder."""
    weights = open_weights(path)
    state, rows = weights.state, max(1, TOKENS_AT_ONCE // weights.config.context_length)
    if state is None:
        narrow = {spec.dtype for spec in weights.specs.values() if spec.dim() == 2} == {torch.bfloat16}
        return TrainedModel(weights, "bf16" if narrow else "fp32", rows, RunConfig(), None)
    run = Path(os.path.relpath(weights.path.resolve().parent.parent))
    tables, place = state.recipe, run_folder_of(run / RECIPE)
    if place is not None:
        tables = placed_in(place, tables)
    recipe = validate(tables, origin=str(weights.path / STATE), resolved=True)
    precision = "fp32"
    if recipe.train is not None:  # imported models have none
        precision, rows = recipe.train.precision, recipe.train.batch_size // recipe.train.accumulation
    of_mixture = tuple(path for source in recipe.data.sources for path in as_paths(source.train))
    learned = shard_paths(of_mixture or recipe.data.train or token_file(run, "train"))
    return TrainedModel(
        weights, precision, rows, recipe.run, recipe.data.valid or token_file(run, "valid"), learned
    )


@dataclass(frozen=True)
class DocumentScore:
    """How well a model predicts one document; loss in nats per token. `number` counts the documents of the token
    file from 1 (texts that are empty when they are encoded are no documents); `begins` holds the first characters."""

    number: int
    bytes: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    begins: str


@dataclass(frozen=True)
class DocumentsResult:
    """The scores of documents, and of all of them together."""

    checkpoint: str
    step: int | None
    tokens_file: str
    documents: tuple[DocumentScore, ...]
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    overlap: Overlap | None = None

    def __str__(self) -> str:
        specs = {"number": "d", "bytes": ",d", "tokens": ",d", "loss": ".4f", "perplexity": ".2f"}
        specs |= {"bits_per_byte": ".4f", "begins": ""}
        columns = [Column(key, key.replace("_", " "), spec) for key, spec in specs.items()]
        return (
            terminal_table([asdict(document) for document in self.documents], columns)
            + f"checkpoint  {self.checkpoint}\n"
            f"tokens      {self.tokens:,} of {len(self.documents):,} documents of {self.tokens_file}\n"
            f"result      loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, "
            f"{self.bits_per_byte:.4f} bits per byte" + shown(self.overlap)
        )


def evaluate_documents(
    path: Path,
    *,
    tokens: PathOrPaths | None = None,
    text: Path | None = None,
    field: str | None = None,
    device: str = "auto",
    strict: bool = False,
) -> DocumentsResult:
    """Evaluate a trained model on each document by itself; arguments and errors are those of `evaluate_run`.

    A document is read from its beginning, behind `ids_before`, in windows (`windows_of`); its own end-of-text
    token is not scored.
    """
    trained = open_trained(path)
    with _opened_text(trained, tokens, text, field, strict) as (file, name, overlap):
        if file.mask is not None:
            message = f"{name}: only some of its tokens count, and --by-document scores all"
            raise UsageError("evaluate.masked", message, hint="evaluate without --by-document")
        tokenizer = trained.weights.open_tokenizer()
        before, context = ids_before(tokenizer, trained.weights.path), trained.weights.config.context_length
        documents = list(_documents(file, tokenizer))
        windows = [list(windows_of(before, ids, context)) for _, ids, _, _ in documents]
        with trained.loaded(device) as (model, ranks):
            flat = [window for some in windows for window in some]
            found = log_likelihoods(model, flat, ranks, precision=trained.precision)
        refuse_not_finite(found, trained.weights.path, name)
        nats = iter(found)
        losses = [-math.fsum(next(nats) for _ in some) for some in windows]
    if not documents:
        raise UsageError("text.empty", f"{name}: holds no document", hint="name a text with words in it")
    scores = []
    for (number, ids, num_bytes, data), loss in zip(documents, losses, strict=True):
        begins = " ".join(data[: 4 * _SHOWN].decode("utf-8", "replace").split())[:_SHOWN]
        figures = _figures(loss, len(ids), num_bytes)
        scores.append(DocumentScore(number, num_bytes, **figures, begins=begins))
    num_bytes = sum(size for _, _, size, _ in documents)
    together = _figures(math.fsum(losses), sum(score.tokens for score in scores), num_bytes)
    return DocumentsResult(*trained.place, name, tuple(scores), **together, overlap=overlap)


def _figures(nats: float, tokens: int, num_bytes: int) -> dict[str, Any]:
    figures = asdict(summarise(nats / tokens, tokens, num_bytes / tokens))
    del figures["bytes_per_token"]
    return figures


def _documents(file: TokenFile, tokenizer: Tokenizer) -> Iterator[tuple[int, np.ndarray, int, bytes]]:
    """Yield the number of each document with text, from 1; its ids without prefix, suffix and end-of-text; the bytes
    of its text; and the letters of all its tokens."""
    end, prefix, suffix = tokenizer.end_of_text_id, tokenizer.prefix, tokenizer.suffix
    if suffix[-1:] == (end,):
        suffix = suffix[:-1]
    starts, empty = document_starts(file).tolist(), 0
    for number, (first, last) in enumerate(zip(starts, [*starts[1:], len(file.tokens)], strict=True)):
        ids = file.tokens[first:last].astype(np.int64)
        if len(ids) and ids[-1] == end:
            ids = ids[:-1]
        if suffix and tuple(ids[-len(suffix) :].tolist()) == suffix:
            ids = ids[: -len(suffix)]
        if prefix and tuple(ids[: len(prefix)].tolist()) == prefix:
            ids = ids[len(prefix) :]
        data = tokenizer.decode_bytes(ids.tolist())
        size = len(data) - tokenizer.specials_in(ids)[1] if file.sizes is None else int(file.sizes[number])
        if size and len(ids):
            yield number + 1, ids, size, data
        else:
            empty += 1
    if empty:
        log.warning("%d of %d documents are without text or tokens, and left out", empty, len(starts))


def ids_before(tokenizer: Tokenizer, path: Path) -> list[int]:
    """Return the ids before the first token of a text: the tokenizer's prefix, else its `start_id`."""
    start = tokenizer.start_id
    if start is None:
        message = f"{path}: its tokenizer has no token that begins or ends a text"
        hint = "evaluate without --by-document; of a choice, ask a question"
        raise UsageError("evaluate.no_start", message, hint=hint)
    return [*tokenizer.prefix] or [start]


# The probability of texts


class Scored(NamedTuple):
    """Ids of which the last `num_scored` are scored, but not the first; at most `context_length + 1`."""

    ids: Sequence[int] | np.ndarray
    num_scored: int


def windows_of(before: Sequence[int], ids: np.ndarray, context_length: int) -> Iterator[Scored]:
    """Cut a document into windows that score each of its ids once, as lm-eval's `loglikelihood_rolling` does.

    Windows do not overlap, but the last one sees a whole context.
    """
    whole = np.concatenate((before, ids)).astype(np.int64)
    for first in range(0, len(ids), context_length):
        last = min(first + context_length, len(ids))
        end = len(before) + last
        yield Scored(whole[max(0, end - context_length - 1) : end], last - first)


@torch.no_grad()
def log_likelihoods(
    model: TransformerLM, texts: Sequence[Scored], ranks: Ranks | None = None, *, precision: str = "fp32"
) -> list[float]:
    """Return the sum of log p(id | ids before it), in nats, over the scored ids of each text.

    Every rank calls it and gets all results. Texts of similar length share a batch; the logits of ids that are not
    scored are not computed.
    """
    ranks = ranks or Ranks.current()
    found: dict[int, float] = {}
    with range_("likelihood"), autocast(ranks.device, precision):
        for number, batch in enumerate(_batches(texts)):
            if number % ranks.world_size == ranks.rank:
                sums = _sums(model, [texts[i] for i in batch], ranks.device)
                found |= zip(batch, sums.tolist(), strict=True)
    if ranks.world_size > 1:
        parts: list[dict[int, float]] = [{}] * ranks.world_size
        dist.all_gather_object(parts, found)
        found = {i: value for part in parts for i, value in part.items()}
    return [found[i] for i in range(len(texts))]


def _batches(texts: Sequence[Scored]) -> Iterator[list[int]]:
    """Yield indices of texts, the longest first: if memory does not suffice, the first batch shows it."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids), reverse=True)
    while order:
        rows = max(1, TOKENS_AT_ONCE // len(texts[order[0]].ids))
        yield order[:rows]
        order = order[rows:]


def _sums(model: TransformerLM, texts: Sequence[Scored], device: torch.device) -> torch.Tensor:
    """Return the log-likelihood of each text of a batch, (texts) in float64 on the CPU."""
    width = max(len(text.ids) for text in texts) - 1
    inputs = np.zeros((len(texts), width), np.int64)  # padding comes last: no token before it sees it
    rows, places, targets = [], [], []
    for number, text in enumerate(texts):
        ids = np.asarray(text.ids, np.int64)
        inputs[number, : len(ids) - 1] = ids[:-1]
        rows.append(np.full(text.num_scored, number))
        places.append(np.arange(len(ids) - 1 - text.num_scored, len(ids) - 1))
        targets.append(ids[len(ids) - text.num_scored :])
    row, place, target = (
        torch.from_numpy(np.concatenate(parts)).to(device) for parts in (rows, places, targets)
    )
    hidden = model.hidden_states(torch.from_numpy(inputs).to(device))[row, place]  # (scored, d_model)
    losses = []
    most = tokens_per_slice(len(model.lm_head.weight), device.type)
    for some, wanted in zip(hidden.split(most), target.split(most), strict=True):
        logits = model.lm_head(some)  # (slice, vocab_size)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(wide, wanted, reduction="none"))
    sums = torch.zeros(len(texts), dtype=torch.float64)
    return sums.index_add_(0, row.cpu(), -torch.cat(losses).double().cpu())


# Multiple choice

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
    overlap: Overlap | None = None

    def __str__(self) -> str:
        def accuracy(name: str, value: float, error: float | None) -> str:
            return f"{name:<12}{value:.4f}" + ("" if error is None else f" +- {error:.4f}")

        return (
            f"checkpoint  {self.checkpoint}\n"
            f"questions   {self.questions:,} of {self.questions_file}\n"
            f"{accuracy('acc', self.acc, self.acc_stderr)}\n"
            f"{accuracy('acc_norm', self.acc_norm, self.acc_norm_stderr)}, of log-likelihoods per character"
            + shown(self.overlap)
        )


def evaluate_choices(path: Path, file: Path, *, device: str = "auto", strict: bool = False) -> ChoicesResult:
    """Let a trained model answer the questions of a JSON lines file.

    A choice's log-likelihood is that of " " + choice after the question. `acc` counts the questions whose likeliest
    choice is the answer, `acc_norm` those where it is the likeliest after division by its number of characters; of
    equal ones the first counts. Tokens, windows and figures are those of lm-eval's `multiple_choice` tasks with
    `doc_to_text: question` (Gao et al., lm-evaluation-harness 0.4).

    Args:
        path: a run folder, a checkpoint folder, or a Hugging Face folder.
        file: JSON lines with `question`, `choices` and `answer`: an index from 0, or one of the choices.
        strict: refuse questions that stand in the training text with their answers; see `overlap_of`.

    Raises:
        UsageError: a line is not such a question, or a choice is longer than the model's context.
        LmkitError: a file is damaged.
    """
    questions = list(read_questions(file))
    trained = open_trained(path)
    solved = [f"{question.question} {question.choices[question.answer]}" for question in questions]
    overlap = overlap_of(trained.learned, questions=solved, name=file, strict=strict)
    tokenizer = trained.weights.open_tokenizer()
    texts, context = [], trained.weights.config.context_length
    for number, question in enumerate(questions, 1):
        for choice in question.choices:
            scored = _pair(tokenizer, question.question, f" {choice}", trained.weights.path)
            # 0: the tokenizer joins it with the end of the question
            if not 1 <= scored.num_scored <= context:
                message = f"{file}, question {number}: a choice of {scored.num_scored} tokens of its own"
                hint = f"it needs 1 to {context}, the model's context; change it, or the end of the question"
                raise UsageError("evaluate.choice_length", message, hint=hint)
            texts.append(Scored(scored.ids[-context - 1 :], scored.num_scored))
    with trained.loaded(device) as (model, ranks):
        found_sums = log_likelihoods(model, texts, ranks, precision=trained.precision)
    refuse_not_finite(found_sums, trained.weights.path, file)
    sums, answers = iter(found_sums), []
    for question in questions:
        found = [next(sums) for _ in question.choices]
        norms = [value / len(choice) for value, choice in zip(found, question.choices, strict=True)]
        chosen, chosen_norm = (values.index(max(values)) for values in (found, norms))
        answers.append(Answered(question.answer, chosen, chosen_norm, tuple(found)))
    return ChoicesResult(
        *trained.place,
        str(file),
        len(questions),
        *_mean_and_error([answer.chosen == answer.answer for answer in answers]),
        *_mean_and_error([answer.chosen_norm == answer.answer for answer in answers]),
        tuple(answers),
        overlap,
    )


def _mean_and_error(right: list[bool]) -> tuple[float, float | None]:
    count, mean = len(right), sum(right) / len(right)
    return mean, math.sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else None


def _pair(tokenizer: Tokenizer, context: str, continuation: str, path: Path) -> Scored:
    """Encode both together; white space at the end of the context counts to what follows.

    Where a token of both holds the end of the context, the ids are those that lm-eval takes: those of the context
    alone, then those of both from this length on.
    """
    if not context.rstrip():
        ids = tokenizer.encode(context + continuation, add_special_tokens=False)
        return Scored([*ids_before(tokenizer, path), *ids], len(ids))
    prefix, encoded = [*tokenizer.prefix], []
    for text in (context.rstrip(), context + continuation):
        ids = tokenizer.encode(text, add_special_tokens=False)
        encoded.append(ids if ids[: len(prefix)] == prefix else [*prefix, *ids])
    before, whole = encoded
    # A tokenizer without some bytes may lose all of the context.
    return Scored([*(before or ids_before(tokenizer, path)), *whole[len(before) :]], len(whole) - len(before))


def read_questions(file: Path) -> Iterator[Question]:
    """Yield the questions of a JSON lines file, which may be compressed."""
    where = ""
    with opened(file) as (_, stream):
        for where, record in json_records(stream, file):
            keys = record if isinstance(record, dict) else {}
            question, choices, answer = (keys.get(key) for key in ("question", "choices", "answer"))
            if not isinstance(question, str):
                wrong = "question is not a text"
            elif not isinstance(choices, list) or not all(isinstance(text, str) and text for text in choices):
                wrong = "choices is not a list of texts"
            elif answer in choices:
                yield Question(question, tuple(choices), choices.index(answer))
                continue
            elif type(answer) is int and 0 <= answer < len(choices):
                yield Question(question, tuple(choices), answer)
                continue
            else:
                wrong = f"answer {answer!r} is neither one of the choices nor its number, counted from 0"
            raise UsageError("evaluate.question", f"{where}: {wrong}", hint=_HINT)
    if not where:
        raise UsageError("evaluate.no_questions", f"{file}: holds no question", hint=_HINT)


ROWS = 8
_SUMS = (ArithmeticError, AssertionError)  # a perplexity beyond all floats; a blank question without a prefix


@dataclass(frozen=True)
class HarnessResult:
    """What lm-eval found. `results`: task -> its metrics by lm-eval's names, such as "acc_norm,none"."""

    model: str
    lm_eval: str
    results: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        lines = [f"model  {self.model}, by lm-eval {self.lm_eval}"]
        for task, metrics in self.results.items():
            for name, value in metrics.items():
                if isinstance(value, float) and not name.partition(",")[0].endswith("_stderr"):
                    error = metrics.get(name.replace(",", "_stderr,", 1))
                    spread = f" +- {error:.4f}" if isinstance(error, float) else ""
                    lines.append(f"{task}  {name.partition(',')[0]} {value:.4f}{spread}")
        return "\n".join(lines)


def run_harness(path: Path, tasks: Sequence[str], *, device: str = "auto") -> HarnessResult:
    """Let lm-eval evaluate a model on its tasks.

    A document that lm-eval scores stands behind one begin-of-text token, as with `--by-document`. lm-eval by itself
    puts two there if the tokenizer puts one before every text.

    Args:
        path: a Hugging Face folder; or a run or a checkpoint, which is exported to a temporary folder.
        tasks: names of lm-eval's tasks, or .yaml files of tasks. lm-eval downloads what they need.
    """
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        message, hint = f"--harness: {error.name} is not installed", "pip install 'lmkit[eval]'"
        raise UsageError("evaluate.no_harness", message, hint=hint) from error
    place, folder = str(local_device(device, local_rank=0)), path
    with tempfile.TemporaryDirectory() as made, redirect_stdout(sys.stderr):  # stdout is for the result
        if not is_hugging_face(path):
            from lmkit.training.exchange import export_model

            folder = Path(made, "exported")
            export_model(path, folder)
        try:
            model = _model(folder, place, path)
            found = lm_eval.simple_evaluate(model=model, tasks=list(tasks), log_samples=False)
        except (OSError, LookupError, ValueError, TypeError, RuntimeError, ImportError, *_SUMS) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            hint = "--debug shows where; `lm_eval ls tasks` lists tasks, most of which are downloaded"
            raise LmkitError("evaluate.harness", f"lm-eval: {why}", hint=hint) from error
    assert found is not None
    for task, metrics in found["results"].items():
        figures = {name: value for name, value in metrics.items() if "_stderr" not in name}
        refuse_not_finite([value for value in figures.values() if isinstance(value, float)], path, task)
    return HarnessResult(str(path), lm_eval.__version__, {**found["results"]})


def _model(folder: Path, device: str, path: Path) -> Any:
    """Return lm-eval's model of a Hugging Face folder; it refuses log-likelihoods that are not finite."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="auto", batch_size=ROWS, device=device)
    of_ends, of_documents = model.loglikelihood, model.loglikelihood_rolling

    def loglikelihood(requests: Any, **options: Any) -> Any:
        found = of_ends(requests, **options)
        refuse_not_finite([nats for nats, _ in found], path, "a task")
        return found

    def loglikelihood_rolling(requests: Any, **options: Any) -> Any:
        model.add_bos_token, kept = False, model.add_bos_token
        found = of_documents(requests, **options)
        model.add_bos_token = kept
        refuse_not_finite(found, path, "a task")
        return found

    model.loglikelihood, model.loglikelihood_rolling = loglikelihood, loglikelihood_rolling
    return model
