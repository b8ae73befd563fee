"""`lmkit evaluate`: loss, perplexity and bits per byte of a trained model on held-out tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lmkit.data.token_files import open_tokens
from lmkit.errors import UsageError
from lmkit.parallel.process_group import process_group
from lmkit.recipe.load import validate
from lmkit.training.checkpoint_folder import STATE
from lmkit.training.checkpoints import Checkpoint, newest_checkpoint, plain_model
from lmkit.training.evaluation import evaluate
from lmkit.training.numerics import numerics
from lmkit.training.run_data import held_out_of, resolved_tables


@dataclass(frozen=True)
class EvaluateResult:
    """Loss in nats per token over a whole token file; bits per byte of the text behind it."""

    checkpoint: str
    step: int
    tokens_file: str
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"checkpoint  {self.checkpoint}\n"
            f"tokens      {self.tokens:,} of {self.tokens_file}\n"
            f"result      loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{bits}"
        )


def run(path: Path, *, tokens: Path | None = None, device: str = "auto") -> EvaluateResult:
    """Evaluate a run's newest good checkpoint, or one checkpoint, in the precision it was trained in.

    Args:
        path: a run folder or a checkpoint folder.
        tokens: a token file; None: the run's held-out one.

    Raises:
        UsageError: there is no checkpoint or no token file, or the file was made with another tokenizer.
        LmkitError: something is damaged.
    """
    checkpoint = newest_checkpoint(path)
    recipe = validate(checkpoint.state.recipe, origin=str(checkpoint.path / STATE), resolved=True)
    model_config, train = resolved_tables(recipe)
    file = tokens or recipe.data.valid or _run_folder(checkpoint) / "tokens" / "valid.npy"
    if not file.exists():
        raise UsageError(
            f"{file}: no held-out token file", hint="name one: lmkit evaluate RUN --tokens FILE.npy"
        )
    saved = checkpoint.state.data
    opened = open_tokens(file, tokenizer_sha256=None if saved is None else saved.tokenizer_sha256)
    held_out = held_out_of(opened, model_config, rows=train.batch_size // train.accumulation)
    with process_group(device) as ranks, numerics(recipe.run, ranks):
        model = plain_model(checkpoint, device=ranks.device)
        evaluation = evaluate(model, held_out, ranks, precision=train.precision)
    assert evaluation is not None
    return EvaluateResult(
        checkpoint=str(checkpoint.path),
        step=checkpoint.state.step,
        tokens_file=str(file),
        tokens=evaluation.tokens,
        loss=evaluation.loss,
        perplexity=evaluation.perplexity,
        bits_per_byte=evaluation.bits_per_byte,
    )


def _run_folder(checkpoint: Checkpoint) -> Path:
    return Path(os.path.relpath(checkpoint.path.resolve().parent.parent))
