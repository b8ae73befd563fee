"""Open, load and retain checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError

from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.run_folder import CHECKPOINTS, TOKENIZER
from lmkit.recipe.tables import RunConfig
from lmkit.recipe.values import UnregisteredName
from lmkit.tokenizer import Tokenizer
from lmkit.training.atomic_checkpoint import (
    MANIFEST,
    MODEL,
    STATE,
    DamagedCheckpoint,
    FileEntry,
    NewerFormat,
    SavedStep,
    damaged,
    model_files,
    newer,
    newest_valid,
    read_manifest,
    read_verified,
    remove_folder,
    saved_steps,
    shard_name,
    verify,
)
from lmkit.training.state import STATE_FORMAT, TrainingState

log = logging.getLogger("lmkit")


def parse_tensors(data: bytes, *, path: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that was read into memory; they own their memory."""
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise damaged(path, f"not a safetensors file ({error})") from error


def parse_state(text: bytes, *, path: object) -> TrainingState:
    """Read `state.json`."""
    try:
        return TrainingState.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        found = next((mistake["input"] for mistake in wrong if mistake["loc"] == ("format",)), None)
        if isinstance(found, int) and found > STATE_FORMAT:
            raise newer(path, "state", found, STATE_FORMAT) from None
        key = ".".join(str(part) for part in wrong[0]["loc"])
        cause = wrong[0].get("ctx", {}).get("error")
        if isinstance(cause, UnregisteredName):
            hint = "the checkpoint is whole; it was made with a plugin: name its file with --plugin"
            raise UsageError("checkpoint.unregistered", f"{path}: {key}: {cause}", hint=hint) from None
        raise damaged(path, f"{key}: {cause or wrong[0]['msg']}") from None


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: manifest and state are read, tensors are read and verified on demand."""

    path: Path
    state: TrainingState
    entries: Mapping[str, FileEntry]

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by parameter name, on the CPU, in memory of their own."""
        return {name: tensor for file in self.model_files for name, tensor in self._tensors(file).items()}

    @property
    def model_files(self) -> list[str]:
        """The files with the weights: one, or one of each rank that saved some."""
        return model_files(self.entries)

    def optimizer_tensors(self, shard: int = 0) -> dict[str, torch.Tensor]:
        """Return one shard of the optimizer state, or all of it where it is not sharded."""
        return self._tensors(shard_name(shard, self.state.optimizer_shards))

    def all_optimizer_shards(self) -> list[dict[str, torch.Tensor]]:
        """Return every shard of the optimizer state, in the order of the ranks."""
        return [self.optimizer_tensors(rank) for rank in range(self.state.optimizer_shards)]

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        path = self.path / name
        return parse_tensors(read_verified(path, self.entries[name]), path=path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and state.

    Raises:
        LmkitError: it is damaged, lacks an optimizer shard, or has a newer format.
        UsageError: not a checkpoint folder.
    """
    if not (path / MANIFEST).is_file() and not (path / MODEL).is_file():
        raise UsageError(
            "checkpoint.not_found",
            f"{path}: not a checkpoint folder (no {MANIFEST})",
            hint="a checkpoint is a folder like <run>/checkpoints/step-00000100",
        )
    entries = read_manifest(path)
    state = parse_state(read_verified(path / STATE, entries[STATE]), path=path / STATE)
    for rank in range(state.optimizer_shards):
        name = shard_name(rank, state.optimizer_shards)
        if name not in entries or not (path / name).is_file():
            raise LmkitError(
                "checkpoint.incomplete",
                f"{path / name}: missing, the optimizer state of rank {rank}",
                hint="copy the whole checkpoint folder, or use an older one",
            )
    return Checkpoint(path, state, entries)


def newest_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest good checkpoint of a run folder.

    Newer checkpoints that are damaged are named in the log.

    Raises:
        UsageError: there is no checkpoint.
        LmkitError: there are checkpoints, but none is good.
    """
    if not path.is_dir():
        hint = hint_at_run(path, otherwise="name a run folder, a checkpoint or a Hugging Face folder")
        raise UsageError(
            "checkpoint.not_found", f"{path}: {'is a file' if path.exists() else 'no such folder'}", hint=hint
        )
    if (path / MANIFEST).exists() or (path / STATE).exists():
        return open_checkpoint(path)
    choice = newest_valid(path if path.name == CHECKPOINTS else path / CHECKPOINTS)
    if choice.path is None:
        hint = "train first: lmkit train, or lmkit run"
        raise UsageError("checkpoint.not_found", f"{path}: holds no checkpoint", hint=hint)
    for why in choice.skipped:
        log.warning("skipped %s", why)
    return open_checkpoint(choice.path)


def hint_at_run(path: Path, *, otherwise: str) -> str:
    """Return a hint at the run of that name in the default folder, if there is one."""
    run = RunConfig().folder / path
    return f"did you mean {run}?" if run.is_dir() else otherwise


def run_tokenizer(checkpoint: Path) -> Path | None:
    """Return `tokenizer.json` of the run that holds a checkpoint."""
    path = checkpoint.resolve().parent.parent / TOKENIZER
    return path if path.is_file() else None


def load_tokenizer(path: Path, trained_with: str | None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        trained_with: the SHA-256 of the tokenizer that made its token files; None: not known.

    Raises:
        UsageError: it is another one.
        LmkitError: the file is damaged.
    """
    tokenizer = Tokenizer.load(path)
    if trained_with not in (None, tokenizer.sha256):
        raise UsageError(
            "checkpoint.wrong_tokenizer",
            f"{path}: is tokenizer {tokenizer.sha256[:12]}, but the model was trained with {trained_with[:12]}",
            hint="use the tokenizer that encoded its token files",
        )
    return tokenizer


# Retain


class Retention:
    """Delete checkpoints that are no longer wanted.

    Damaged checkpoints do not count towards those to keep. Every checkpoint is read in full once before it counts,
    except those that this process wrote.

    Args:
        keep_last: keep this many checkpoints with the highest steps, at least 1.
        keep_best: also keep this many with the lowest validation loss.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._losses: dict[int, float | None] = {}  # of the good ones seen so far
        self._foreign: set[int] = set()  # whole or unread, and not for us to judge

    def remember(self, step: int, valid_loss: float | None) -> None:
        """Count this checkpoint as good: it was just written and synced."""
        self._losses[step] = valid_loss

    def prune(self) -> list[Path]:
        """Delete the checkpoints that are not kept, and return their paths.

        A damaged one stays while it is newer than the oldest of the last to keep.
        """
        saved = saved_steps(self._folder)
        good = [item.step for item in saved if self._is_good(item)]
        last = good[-self._keep_last :]
        kept = {*last} | self._foreign
        rated = [(loss, step) for step in good if (loss := self._losses[step]) is not None]
        kept.update(step for _, step in sorted(rated)[: self._keep_best])
        doomed = [item.path for item in saved if item.step not in kept and last and item.step < last[0]]
        for path in doomed:
            remove_folder(path)
        return doomed

    def _is_good(self, saved: SavedStep) -> bool:
        if saved.step in self._losses:
            return True
        try:
            with suppress(NewerFormat):  # which open_checkpoint raises again
                verify(saved.path)
        except DamagedCheckpoint:
            return False
        except LmkitError:  # it may be whole
            self._foreign.add(saved.step)
            return False
        try:
            self._losses[saved.step] = open_checkpoint(saved.path).state.valid_loss
        except LmkitError:  # the checksums are right: another version wrote it
            self._foreign.add(saved.step)
            return False
        return True
