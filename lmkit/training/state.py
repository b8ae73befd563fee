"""Define `state.json`, the part of a checkpoint that is not tensors, and save and restore random generators."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field

from lmkit.errors import LmkitError
from lmkit.recipe.tables import Count, Int64, ModelConfig, NonNegativeFloat, PositiveFloat, PositiveInt, Table

STATE_FORMAT: Final = 1


class RngState(Table):
    """torch's generators on one rank, in base64. Training draws from no others."""

    cpu: str
    cuda: str | None = None


class LossScaleState(Table):
    """Dynamic loss scaling (fp16)."""

    scale: PositiveFloat
    good_steps: Count


class DataIdentity(Table):
    """The token file that the batches come from. A resumed run must find the same one."""

    num_tokens: Int64
    vocab_size: PositiveInt
    source_sha256: str
    tokenizer_sha256: str


class TrainingState(Table):
    """A training run after `step` optimizer steps.

    The position in the data is `step` itself: a batch is a pure function of (seed, step).
    """

    format: Literal[1] = STATE_FORMAT
    """Of this file; the manifest has its own."""
    lmkit: str
    step: Count
    seconds: NonNegativeFloat
    """Time spent training so far, over all sessions."""
    time_fraction: NonNegativeFloat | None = None
    """Share of `train.max_minutes` that is used, where that is set."""
    tokens: Int64
    """Tokens seen by the optimizer."""
    skipped_in_a_row: Count = 0
    valid_loss: float | None = None
    """From an evaluation at exactly this step."""
    best_loss: float | None = None
    """The lowest held-out loss up to this step."""
    loss_scale: LossScaleState | None = None
    spikes: tuple[float, ...] | None = None
    """State of `SpikeGuard`."""

    world_size: PositiveInt
    strategy: str
    optimizer_shards: PositiveInt
    optimizer_layout: dict[str, Any] | None = None
    """How the optimizer state is cut into shards (`ShardLayout` of `lmkit.parallel`); None: it is whole."""
    rng: Annotated[tuple[RngState, ...], Field(min_length=1)]

    model: ModelConfig
    """With the vocabulary size filled in."""
    recipe: dict[str, Any]
    recipe_sha256: str
    data: DataIdentity | None = None


def capture_rng(device: torch.device) -> RngState:
    """Return the state of this rank's generators."""
    cuda = _encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
    return RngState(cpu=_encode(torch.get_rng_state()), cuda=cuda)


def restore_rng(state: RngState, device: torch.device) -> None:
    """Set this rank's generators to a saved state."""
    try:
        torch.set_rng_state(_decode(state.cpu))
        if device.type == "cuda" and state.cuda is not None:
            torch.cuda.set_rng_state(_decode(state.cuda), device)
    except (ValueError, RuntimeError) as error:
        raise LmkitError(
            "checkpoint.bad_rng",
            "the checkpoint's random generators cannot be restored",
            hint="it was saved by another version of PyTorch, or changed; use another checkpoint",
        ) from error


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
