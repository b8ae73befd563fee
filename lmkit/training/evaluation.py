"""Evaluate a model on held-out tokens: loss in nats per token, perplexity, bits per byte."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lmkit.data.batches import evaluation_windows
from lmkit.data.encoding import encode_corpus
from lmkit.data.token_files import TokenFile, open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.ranges import range_
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.collectives import agree
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.recipe.load import validate
from lmkit.recipe.run_folder import RECIPE, TOKENIZER, placed_in, run_folder_of, token_file
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.tokenizer import Tokenizer
from lmkit.training.atomic_checkpoint import STATE
from lmkit.training.checkpoint import newest_checkpoint, run_tokenizer
from lmkit.training.model_state import plain_model
from lmkit.training.precision import autocast, hold_weights
from lmkit.training.process import numerics

# Where a text is named on the command line: no option replaces invalid bytes or names another key, and the model has
# its context.
_HINTS_OF_TEXT = {
    "text.not_utf8": "convert the text to UTF-8 first, for example with iconv",
    "corpus.no_field": 'every line must hold its text under "text"',
    "tokens.too_short": "use a longer text",
}


@dataclass(frozen=True)
class HeldOut:
    """Held-out data.

    Attributes:
        tokens: one-dimensional token ids, usually a memory map.
        bytes_per_token: of the text of those that count; None if unknown.
        context_length: longest window.
        rows: windows per batch.
        mask: of a `TokenFile`: the tokens that count; None: all.
    """

    tokens: np.ndarray
    bytes_per_token: float | None
    context_length: int
    rows: int
    mask: np.ndarray | None = None


def held_out_of(file: TokenFile, model: ModelConfig, train: TrainConfig) -> HeldOut:
    """Return a token file as held-out data, in batches of one micro-batch."""
    meta = file.meta
    num_bytes, num_tokens = meta.num_bytes, meta.num_tokens
    if meta.counted_tokens is not None:
        num_bytes, num_tokens = meta.counted_bytes or 0, meta.counted_tokens
    bytes_per_token = num_bytes / num_tokens if num_bytes else None
    rows = train.batch_size // train.accumulation
    return HeldOut(file.tokens, bytes_per_token, model.context_length, rows, file.mask)


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per token. Bits per byte = loss / ln 2 x tokens / bytes; it compares across tokenizers."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int


def evaluate(
    model: TransformerLM,
    held_out: HeldOut,
    ranks: Ranks | None = None,
    *,
    precision: str = "fp32",
    max_batches: int | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the mean loss over consecutive, non-overlapping windows from the start of the held-out tokens; nan if
    none of their tokens counts.

    Every rank calls it and gets the same result. Batch b goes to rank b mod world_size.

    Args:
        model: the plain model. Every rank calls `model.loss` equally often, because it may gather weights.
        ranks: this process's place; None: as in torch.distributed's default group, alone without one.
        max_batches: only this many batches, over all ranks; None: the whole file.
        asked_to_stop: called once per batch; if true on any rank, all return None.
    """
    ranks = ranks or Ranks.current()
    windows = evaluation_windows(
        held_out.tokens, held_out.context_length, held_out.rows, max_batches, mask=held_out.mask
    )
    nats, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    with range_("evaluation"), torch.no_grad(), autocast(ranks.device, precision):
        for (rows, wanted), counts in _rounds(windows, ranks):
            if agree(ranks, stop=asked_to_stop()):
                model.train(was_training)
                return None
            inputs, targets = rows.to(ranks.device), wanted.to(ranks.device)  # (rows, seq)
            loss = model.loss(inputs, targets)
            if counts:
                counted = int((wanted >= 0).sum())
                nats += loss.item() * counted
                tokens += counted
    model.train(was_training)
    if ranks.world_size > 1:
        summed = torch.tensor([nats, tokens], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(summed)
        nats, tokens = summed.tolist()
    return summarise(nats / tokens if tokens else math.nan, int(tokens), held_out.bytes_per_token)


def _rounds(
    windows: Iterator[tuple[torch.Tensor, torch.Tensor]], ranks: Ranks
) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], bool]]:
    """Yield this rank's batch of every `world_size` batches, and whether it counts: where the last round is too short
    for a rank, the batch is another rank's."""
    while batches := list(islice(windows, ranks.world_size)):
        yield batches[min(ranks.rank, len(batches) - 1)], ranks.rank < len(batches)


def summarise(loss: float, tokens: int, bytes_per_token: float | None) -> Evaluation:
    """Add perplexity and bits per byte to a mean loss in nats per token."""
    # exp overflows a float above 709 nats.
    perplexity = math.exp(loss) if loss < 700 else math.inf
    bits_per_byte = None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
    return Evaluation(loss, perplexity, bits_per_byte, tokens)


@dataclass(frozen=True)
class EvaluateResult:
    """Result of evaluating a checkpoint on a whole token file; loss in nats per token."""

    checkpoint: str
    step: int
    tokens_file: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"checkpoint  {self.checkpoint}\n"
            f"tokens      {self.tokens:,} of {self.tokens_file}\n"
            f"result      loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{bits}"
        )


def evaluate_run(
    path: Path, *, tokens: Path | None = None, text: Path | None = None, device: str = "auto"
) -> EvaluateResult:
    """Evaluate a run's newest good checkpoint, or one checkpoint, in the precision it was trained in.

    Args:
        path: a run folder or a checkpoint folder.
        tokens: a token file; None: the run's own held-out file.
        text: a text file instead, which the run's tokenizer encodes.

    Raises:
        UsageError: there is no checkpoint or no token file, or the file was made with another tokenizer.
        LmkitError: something is damaged.
    """
    if text is not None:
        if tokens is not None:
            message = "--tokens and --text: two files to evaluate on"
            raise UsageError("evaluate.two_files", message, hint="leave out one of them")
        if text.is_fifo() and os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "evaluate.pipe_of_ranks",
                f"--text {text}: a pipe, of which each rank would read a part",
                hint="evaluate on one rank, or write the text to a file first",
            )
        tokenizer = run_tokenizer(newest_checkpoint(path).path)
        if tokenizer is None:
            hint = "encode the text with lmkit data encode, and name the token file: --tokens FILE.npy"
            raise UsageError("evaluate.no_tokenizer", f"{path}: the run has no {TOKENIZER}", hint=hint)
        with tempfile.TemporaryDirectory() as made:
            encoded = Path(made, "text.npy")
            try:
                encode_corpus(text, encoded, Tokenizer.load(tokenizer))
                result = evaluate_run(path, tokens=encoded, device=device)
            except LmkitError as error:
                message = error.message.replace(str(encoded), str(text))
                hint = _HINTS_OF_TEXT.get(error.code, error.hint)
                raise type(error)(error.code, message, hint=hint) from error
        return dataclasses.replace(result, tokens_file=str(text))
    checkpoint = newest_checkpoint(path)
    run = Path(os.path.relpath(checkpoint.path.resolve().parent.parent))
    tables, place = checkpoint.state.recipe, run_folder_of(run / RECIPE)
    if place is not None:
        tables = placed_in(place, tables)
    recipe = validate(tables, origin=str(checkpoint.path / STATE), resolved=True)
    train, saved = recipe.train or TrainConfig(), checkpoint.state.data  # imported models have no [train]
    file = tokens or recipe.data.valid or token_file(run, "valid")
    if not file.exists():
        hint = "name a token file: lmkit evaluate RUN --tokens FILE.npy"
        raise UsageError("data.no_tokens", f"{file}: no held-out token file", hint=hint)
    opened = open_tokens(file, tokenizer_sha256=None if saved is None else saved.tokenizer_sha256)
    held_out = held_out_of(opened, checkpoint.state.model, train)
    with process_group(device) as ranks, numerics(recipe.run, ranks):
        model = plain_model(checkpoint, device=ranks.device)
        hold_weights(model, train.precision)
        evaluation = evaluate(model, held_out, ranks, precision=train.precision)
    assert evaluation is not None
    return EvaluateResult(
        str(checkpoint.path), checkpoint.state.step, str(file), **dataclasses.asdict(evaluation)
    )
