"""Save a training in the background, and resume it: bit for bit, also on another number of ranks.

Nothing here restores the order of the data: the batch of a step is a pure function of (seed, step), see
`core/batches.py`.

`CheckpointWriter.save` returns at once. A thread copies the tensors to host memory during the next forward and
backward passes, which only read weights, and writes the files from that copy. Before the optimizer changes anything,
the trainer calls `release_weights`, which waits for the copy. Each rank writes its shards of weights and optimizer
state; rank 0 writes `state.json`, the manifest and what all ranks hold. The threads exchange messages through the
process group's key-value store: collectives could get out of order with those of training.

The optimizer's `exp_avg` of a parameter is called `layers.0.ffn.w1.weight.exp_avg`. In a sharded optimizer it is
`3.exp_avg`, for bucket 3 of the layout that the checkpoint's state describes. State moves freely between whole and
sharded optimizers and between numbers of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from torch import nn

from lmkit.core.adamw import AdamW
from lmkit.core.ranges import range_
from lmkit.core.step import has_slices
from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.model.transformer import parameter_names
from lmkit.optim.adamw import MASTER
from lmkit.parallel.collectives import on_any_rank
from lmkit.parallel.ranks import RankLost, Ranks, losses_named
from lmkit.recipe import recipe as rule
from lmkit.recipe.load import validate
from lmkit.recipe.recipe import Recipe, differences
from lmkit.recipe.run_folder import CHECKPOINTS, refuse_foreign_files
from lmkit.recipe.tables import CheckpointConfig, OptimizerConfig
from lmkit.storage.atomic import PARTIAL_SUFFIX, keep_damaged, remove_partials, write_atomic
from lmkit.storage.inputs import read_input
from lmkit.storage.outputs import refuse_unwritable
from lmkit.training.checkpoint import (
    MANIFEST,
    STATE,
    Checkpoint,
    Choice,
    DamagedCheckpoint,
    DataIdentity,
    RngState,
    TrainingState,
    clean_leftovers,
    damaged,
    holds_others,
    is_finite,
    model_name,
    newest_valid,
    open_checkpoint,
    publish,
    remove_folder,
    restore_rng,
    saved_steps,
    shard_name,
    step_name,
    verify,
    write_file,
    write_manifest,
    write_tensors,
)
from lmkit.training.step import Step
from lmkit.training.weights import GivenWeights, load_weights, model_weights, weights_of

_POLL_S = 0.02
"""How often a thread looks for a message, and the trainer for the other ranks while it waits."""
Tensors = Mapping[str, torch.Tensor]
Files = Mapping[str, Tensors]
"""file name -> its tensors by name"""
Layout = dict[str, Any]
_NUMBERS = (torch.int64, torch.float64)
"""What numbers among the states of an optimizer become, without dimensions."""
_NO_NUMBER = ":tensor"
"""End of the name of a state that looks like a saved number, and is a tensor."""
States = dict[str, dict[str, Any]]
"""parameter or bucket -> name of the state -> value"""
UNREPORTED = ("run.name", "run.folder", "checkpoint", "generate", "wandb", "corpus", "tokenizer", "data")
"""Tables and keys whose differences are not reported."""


# Optimizer state as named tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's live state tensors by name. Numbers become scalar tensors (int64, float64).

    Raises:
        LmkitError: a state is neither a tensor nor a number, or belongs to no parameter.
    """
    if optimizer_layout(optimizer) is not None:
        states: States = optimizer.state_dict()["state"]
    else:
        names = parameter_names(model).items()
        states = {name: optimizer.state[param] for param, name in names if param in optimizer.state}
    if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise _not_saved(optimizer, f"{some_of(others)}, which belongs to no parameter")
    tensors = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, Integral) and -(2**63) <= int(value) < 2**63:
                value = torch.tensor(int(value), dtype=torch.int64)
            elif isinstance(value, Real) and not isinstance(value, Integral):
                value = torch.tensor(float(value), dtype=torch.float64)
            elif not isinstance(value, torch.Tensor) or value.is_complex() or value.layout != torch.strided:
                kind = value.type() if isinstance(value, torch.Tensor) else type(value).__name__
                raise _not_saved(optimizer, f"{key} of {name}, of the type {kind}")
            elif not value.dim() and value.dtype in _NUMBERS:
                key += _NO_NUMBER
            tensors[f"{name}.{key}"] = value.detach()
    return tensors


def _not_saved(optimizer: torch.optim.Optimizer, what: str) -> LmkitError:
    message = f"checkpoints cannot hold the state of {type(optimizer).__name__}: {what}"
    hint = "keep dense real tensors and numbers for each parameter, and numbers in param_groups"
    return LmkitError("checkpoint.unsupported_state", message, hint=hint)


def group_numbers(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Return the numbers in an optimizer's groups that its steps may have changed: those that are neither its
    defaults nor what the recipe sets."""
    set_by_recipe = {*OptimizerConfig.model_fields, "is_matrix", "lr_factor"}
    found = []
    for group in optimizer.param_groups:
        numbers: dict[str, Any] = {}
        for key, value in group.items():
            is_number = isinstance(value, int | float) or (
                isinstance(value, torch.Tensor) and not value.dim()
            )
            if is_number and key not in set_by_recipe and optimizer.defaults.get(key) != value:
                numbers[key] = float(value) if isinstance(value, torch.Tensor) else value
        found.append(numbers)
    return tuple(found)


def own_files(step: Step) -> Files:
    """Return file name -> live tensors by name that a rank saves: its own, and on rank 0 those that all hold."""
    ranks, part, layout = step.ranks, step.sync.weights_to_save(), optimizer_layout(step.optimizer)
    weights = model_weights(step.model) if part is None else part
    state = optimizer_tensors(step.optimizer, step.model)
    files = {}
    if part is not None or ranks.is_first:
        files[model_name(ranks.rank, 1 if part is None else ranks.world_size)] = weights
    shards = 1 if layout is None else layout["world_size"]
    if ranks.rank < shards:  # further ranks keep copies
        files[shard_name(ranks.rank, shards)] = state
    return files


def optimizer_layout(optimizer: torch.optim.Optimizer) -> Layout | None:
    """Return how the state is cut into shards, as JSON; None if every rank holds all of it."""
    return getattr(optimizer, "shard_layout", None)


def load_optimizer_tensors(
    optimizer: Any,
    model: nn.Module,
    shards: Sequence[Tensors],
    layout: Layout | None,
    *,
    origin: str,
    own: int | None = None,
) -> None:
    """Load saved state into an optimizer, which may be sharded otherwise than the saved one.

    Args:
        shards, layout: the state of all ranks that saved it, or one part without a layout.
        origin: names the checkpoint in errors.
        own: the rank whose shard is just what this rank holds; `shards` is then that one alone.
    """
    if not any(shards):
        return  # of an imported model: the optimizer begins afresh
    saved: list[dict[str, Any]] = []
    for rank, tensors in enumerate(shards):
        states: States = {}
        for full_name, tensor in tensors.items():
            owner, _, key = full_name.rpartition(".")
            states.setdefault(owner, {})[key] = tensor
        saved.append({"rank": rank, "layout": layout, "state": states})
    try:
        if own is not None:
            saved[0] |= {"rank": own, "param_groups": [{} for _ in optimizer.param_groups]}
            optimizer.load_state_dict(saved[0])
        else:
            whole = saved[0]["state"]
            if layout is not None:
                from lmkit.parallel.shards import consolidate

                whole = consolidate(saved)
            if optimizer_layout(optimizer) is not None:
                optimizer.load_whole(whole)
            else:
                _load_into_whole(optimizer, model, whole, are_flat=layout is not None)
        for state in optimizer.state.values():
            for key, value in [*state.items()]:
                if key.endswith(_NO_NUMBER):
                    state[key.removesuffix(_NO_NUMBER)] = state.pop(key)
                elif isinstance(value, torch.Tensor) and not value.dim() and value.dtype in _NUMBERS:
                    state[key] = value.item()
    # Layouts are free-form JSON.
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        message = f"{origin}: optimizer state: {error}"
        hint = "the checkpoint belongs to another model or optimizer"
        raise LmkitError("checkpoint.other_optimizer", message, hint=hint) from error


def load_masters(optimizer: Any, model: nn.Module, weights: Tensors) -> None:
    """Load the masters of bf16 weights from whole weights; call it before the state, which may hold masters, too."""
    if optimizer_layout(optimizer) is not None:
        optimizer.load_masters(weights)
        return
    for parameter, name in _held(optimizer, model).items():
        master = optimizer.state.get(parameter, {}).get(MASTER)
        if master is not None:
            master.copy_(weights[name])


def _load_into_whole(
    optimizer: torch.optim.Optimizer, model: nn.Module, whole: States, *, are_flat: bool
) -> None:
    held = _held(optimizer, model)
    if unknown := sorted(set(whole) - set(held.values())):
        raise ValueError(f"unknown parameters {some_of(unknown)}")
    for parameter, name in held.items():
        if name not in whole:
            continue
        kept = optimizer.state.get(parameter, {}).get(MASTER)
        restored = {} if kept is None else {MASTER: kept}  # of `load_masters`
        for key, value in whole[name].items():
            if are_flat and value.dim() and value.numel() == parameter.numel():
                value = value.reshape(parameter.shape)
            restored[key] = value.clone()
        if MASTER in whole[name]:
            with torch.no_grad():
                parameter.copy_(restored[MASTER])
            if kept is None:
                del restored[MASTER]
        dtype = restored.get(MASTER, parameter).dtype
        device = getattr(optimizer, "state_device", parameter.device)
        casts = are_flat or isinstance(optimizer, AdamW)
        for key, value in restored.items():  # factored states have another shape, and their own dtype
            if casts and value.shape == parameter.shape and value.is_floating_point():
                restored[key] = value.to(device, dtype)
            elif value.dim():
                restored[key] = value.to(device)
        optimizer.state[parameter] = restored


def _held(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of the parameters that the optimizer updates."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if has_slices(held):
        raise ValueError("an optimizer of FSDP's slices loads no state of whole parameters")
    return {parameter: name for parameter, name in parameter_names(model).items() if parameter in held}


class CheckpointWriter:
    """Save the checkpoints of one run, at most one at a time.

    A failed write (a full disk, for example) leaves older checkpoints as they are. The next call of any method raises
    the error.

    Args:
        folder: `checkpoints/` of the run; made with the first checkpoint.
        keep: the table [checkpoint], which says how many checkpoints stay; used on rank 0.
    """

    def __init__(self, folder: Path, ranks: Ranks, keep: CheckpointConfig) -> None:
        self._folder, self._ranks, self._keep = folder, ranks, keep
        self._losses: dict[int, float | None] = {}  # of the good checkpoints, see `prune`
        # One PyTorch thread on a CPU: with more threads than CPUs, OpenMP lets those of the training sleep between
        # tasks, which makes steps slower.
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="lmkit-checkpoint-writer",
            initializer=partial(torch.set_num_threads, 1) if ranks.device.type == "cpu" else None,
        )
        self.writing: Future[Any] | None = None  # until `wait` has returned
        self._step = 0
        # Host memory that tensors are copied to, kept between saves: fresh pages cost more than the copy.
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._copied = threading.Event()  # on a GPU: the copies are launched
        self._copied.set()
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._launched: Any = None  # events of the stream of the training, and of that of the copies
        self._arrived: Any = None
        self._abandoned = threading.Event()
        self.stall_seconds = 0.0
        """How long training has waited for saving so far."""

    def reserve(self, files: Files) -> None:
        """Allocate host memory in the background, so that the first save is as fast as the others; see `save`."""
        self.wait()
        self.writing = self._thread.submit(self._allocate, files)

    def save(self, state: TrainingState, files: Files) -> None:
        """Begin to save. Every rank calls it at the same step.

        Args:
            state: with this rank's RNG state; those of the other ranks are added.
            files: that this rank writes, of the live tensors, on any device; see `own_files`.
        """
        started = time.perf_counter()
        self.wait()
        if self._stream is not None:  # what is launched so far on the GPU belongs into the copy
            self._launched = torch.cuda.current_stream(self._ranks.device).record_event()
        self._copied.clear()
        self._step = state.step
        self.writing = self._thread.submit(self._write, state, files)
        self.stall_seconds += time.perf_counter() - started

    def release_weights(self) -> None:
        """Return once the tensors of a save in flight may change again."""
        if self.writing is None:
            return
        started = time.perf_counter()
        with range_("checkpoint.release"):
            self._copied.wait()
            if self._arrived is not None:  # kernels launched from now on run after the copies
                torch.cuda.current_stream(self._ranks.device).wait_event(self._arrived)
        self.stall_seconds += time.perf_counter() - started
        if self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Return once this rank writes nothing any more."""
        writing, self.writing = self.writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            message = f"{self._folder / step_name(self._step)}: cannot be saved: {reason(error)}"
            hint = "earlier checkpoints are intact; make room, then train again to resume from the newest"
            raise LmkitError("checkpoint.write_failed", message, hint=hint) from error

    def wait_for_all(self) -> None:
        """Return once no rank writes any more; RankLost: another rank cannot save, and its own error says why.
        Collective: a dead rank breaks it at once, not at the timeout."""
        started = time.perf_counter()
        writing = [] if self.writing is None else [self.writing]
        patience = 0.0
        with losses_named(self._ranks, f"saving step {self._step}"):
            while True:
                done, busy = wait_for_futures(writing, timeout=patience)
                failed = bool(done) and writing[0].exception() is not None
                busy_somewhere, failed_somewhere = on_any_rank(self._ranks, bool(busy), failed)
                if failed_somewhere or not busy_somewhere:
                    break
                patience = _POLL_S
        self.stall_seconds += time.perf_counter() - started
        if failed_somewhere and not failed:
            message = f"rank {self._ranks.rank}, saving step {self._step}: another rank cannot write its part"
            hint = "look for that rank's own error; earlier checkpoints are intact"
            raise RankLost("ranks.lost", message, hint=hint)
        self.wait()

    def abandon(self) -> None:
        """Finish the write in progress after an error, without waiting for a lost rank."""
        self._abandoned.set()
        self._thread.shutdown()

    # The methods below run in the thread.

    def _allocate(self, files: Files) -> Files:
        """Return host memory for tensors, which is kept for the next checkpoint: file name -> name -> tensor."""
        buffers: dict[str, dict[str, torch.Tensor]] = {}
        for file, tensors in files.items():
            buffers[file] = {}
            for name, tensor in tensors.items():
                kept = self._buffers.get((file, name))
                if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                    pinned = self._stream is not None and tensor.is_cuda
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                    self._buffers[file, name] = kept.zero_()  # writing makes the system provide the pages
                buffers[file][name] = kept
        return buffers

    def _write(self, state: TrainingState, live: Files) -> None:
        """Copy, release the weights, write this rank's files; on rank 0 collect those of the others and publish."""
        try:
            copies = self._allocate(live)
            with torch.cuda.stream(self._stream):  # None: nothing changes
                if self._stream is not None:
                    self._stream.wait_event(self._launched)
                for file, tensors in live.items():
                    for name, tensor in tensors.items():
                        copies[file][name].copy_(tensor.detach(), non_blocking=self._stream is not None)
                if self._stream is not None:
                    self._arrived = self._stream.record_event()
        finally:
            self._copied.set()
        if self._arrived is not None:
            self._arrived.synchronize()
        for file, tensors in copies.items():
            # The very last update may have made weights NaN: they must not replace a good checkpoint.
            for name, tensor in tensors.items():
                if not is_finite(tensor):
                    message = f"step {state.step}: {file}: {name} is not finite; not saved"
                    hint = "resume from the newest checkpoint with a lower optimizer.lr"
                    raise LmkitError("checkpoint.nonfinite", message, hint=hint)
        partial = self._folder / (step_name(state.step) + PARTIAL_SUFFIX)
        if not self._ranks.is_first:
            self._write_part(state, copies, partial)
            return
        try:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            self._send("folder", {})
            self._write_all(state, copies, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._losses[state.step] = state.valid_loss  # good: it was just written and synced
        prune(self._folder, self._losses, keep_last=self._keep.keep_last, keep_best=self._keep.keep_best)

    def _write_part(self, state: TrainingState, copies: Files, partial: Path) -> None:
        """On every rank but the first: write its files, if it has some; send the RNG state."""
        message: dict[str, object] = {"error": "an error of its own"}
        try:
            if copies:
                self._receive("folder", 0)
            entries = {name: write_tensors(partial / name, part) for name, part in copies.items()}
            message = {"rng": state.rng[0].model_dump(), "entries": entries}
        except OSError as error:
            message = {"error": reason(error)}
            raise
        finally:
            self._send("part", message)

    def _write_all(self, state: TrainingState, copies: Files, partial: Path) -> None:
        """On rank 0: write its own files, collect the parts of the others, write the manifest, publish."""
        entries = {name: write_tensors(partial / name, part) for name, part in copies.items()}
        rng = list(state.rng)
        for rank in range(1, self._ranks.world_size):
            sent = self._receive("part", rank)
            if "error" in sent:
                message = f"{partial}: rank {rank} cannot save its part: {sent['error']}"
                raise LmkitError("checkpoint.write_failed", message, hint="earlier checkpoints are intact")
            rng.append(RngState.model_validate(sent["rng"]))
            entries |= sent["entries"]
        complete = state.changed(rng=tuple(rng))
        entries[STATE] = write_file(partial / STATE, f"{complete.model_dump_json(indent=1)}\n".encode())
        write_manifest(partial, entries)
        publish(partial, self._folder / step_name(state.step))

    def _send(self, topic: str, message: dict[str, object]) -> None:
        """Send a small JSON message to the writers of all ranks, in place of that about the checkpoint before."""
        if self._ranks.store is not None:
            text = json.dumps({**message, "step": self._step})
            self._ranks.store.set(f"checkpoint/{topic}/{self._ranks.rank}", text)

    def _receive(self, topic: str, sender: int) -> dict[str, Any]:
        """Wait for a message. Poll, because a blocking wait would lock the store for the trainer."""
        assert self._ranks.store is not None
        key, deadline = f"checkpoint/{topic}/{sender}", time.monotonic() + self._ranks.timeout_s
        while True:
            if self._ranks.store.check([key]):
                message = json.loads(self._ranks.store.get(key))
                if message["step"] == self._step:
                    return message
            if self._abandoned.wait(_POLL_S) or time.monotonic() > deadline:
                missing = f"{step_name(self._step)}: rank {sender} did not deliver its part of the checkpoint"
                hint = "look for that rank's own error; earlier checkpoints are intact"
                raise LmkitError("checkpoint.rank_missing", missing, hint=hint)


def prune(folder: Path, losses: dict[int, float | None], *, keep_last: int, keep_best: int) -> list[Path]:
    """Delete the checkpoints that are no longer wanted, and return their paths.

    A damaged one does not count towards those to keep, but stays while it is newer than the oldest of the last to
    keep. A folder without a manifest, or with other files, always stays.

    Args:
        losses: step -> validation loss of the checkpoints known to be good. Others are read in full, and added.
        keep_last, keep_best: as in the table [checkpoint].
    """
    saved = saved_steps(folder)
    kept = set()
    for step, path in saved:
        if not os.path.lexists(path / MANIFEST) or holds_others(path):  # somebody's folder or files
            kept.add(step)
            continue
        if step in losses:
            continue
        try:
            verify(path)
            losses[step] = open_checkpoint(path, is_verified=True).state.valid_loss
        except DamagedCheckpoint:
            continue
        except LmkitError:  # not read, or of another version: it may be whole
            kept.add(step)
    good = [step for step, _ in saved if step in losses]
    rated = [(loss, step) for step in good if (loss := losses[step]) is not None]
    kept.update(good[-keep_last:], (step for _, step in sorted(rated)[:keep_best]))
    doomed = [path for step, path in saved if step not in kept and good and step < good[-keep_last:][0]]
    for path in doomed:
        remove_folder(path)
    return doomed


# Resume


@dataclass
class Counters:
    """The counters of a run that a checkpoint saves. The fields are fields of `TrainingState`."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped_in_a_row: int = 0
    valid_loss: float | None = None
    best_loss: float | None = None


def open_folder(recipe: Recipe, hold: Callable[[], object]) -> tuple[Path | None, list[str]]:
    """On rank 0: lock the run folder, remove leftovers of a killed session, choose the checkpoint."""
    folder, checkpoints = recipe.run.path, recipe.run.path / CHECKPOINTS
    refuse_unwritable(folder, option="--set run.folder=...")
    refuse_foreign_files(folder)
    hold()
    removed = remove_partials(folder)
    if checkpoints.is_dir():
        removed += clean_leftovers(checkpoints)
    path, skipped = choose_start(recipe)
    notes = [f"removed {left}, left by a session that was killed" for left in removed]
    notes += [f"skipped {why}" for why in skipped]
    # The steps since are made again: their checkpoints would replace the damaged ones, of which parts may be whole.
    for saved in reversed(saved_steps(checkpoints)) if skipped else ():
        if saved.path == path:
            break
        notes.append(f"kept a damaged checkpoint as {keep_damaged(saved.path)}")
    return path, notes


def choose_start(recipe: Recipe) -> Choice:
    """Find the checkpoint that `checkpoint.resume` asks for; reads it in full. `path` is None from scratch."""
    folder = recipe.run.path / CHECKPOINTS
    wish = recipe.checkpoint.resume
    if wish == "auto":
        return newest_valid(folder)
    present = saved_steps(folder)
    if wish == "never":
        if present:
            message = f'{folder}: holds {present[-1].path.name}, but checkpoint.resume is "never"'
            hint = "choose another run.name, delete the checkpoints, or resume"
            raise UsageError("resume.refused", message, hint=hint)
        return Choice(None, ())
    path = Path(wish)
    checkpoint = open_checkpoint(path)
    verify(path)
    newer = [saved for saved in present if saved.step > checkpoint.state.step]
    if newer:
        message = f"checkpoint.resume: {path} is older than {newer[-1].path} of the same run"
        hint = "choose another run.name for the new branch, or delete the newer checkpoints"
        raise UsageError("resume.refused", message, hint=hint)
    return Choice(path, ())


def check_agreement(
    checkpoint: Checkpoint, recipe: Recipe, data: DataIdentity | None, world_size: int
) -> list[str]:
    """Refuse to continue with another model or other batches; return lines about other changes."""
    path = checkpoint.path / STATE
    old = validate(checkpoint.state.recipe, origin=str(path), resolved=True)
    changes = differences(old, recipe)
    if old.train is None:  # an imported model: no step has been made
        changes = tuple(line for line in changes if rule.is_under(line, ("model",)))
    refused = rule.refused(changes)
    allowed = [
        f"changed since that checkpoint: {line}"
        for line in changes
        if line not in refused and not rule.is_under(line, UNREPORTED)
    ]
    if checkpoint.state.data is not None and data is not None and checkpoint.state.data != data:
        differing = [
            f"{name}: {_short(before)} -> {_short(getattr(data, name))}"
            for name, before in checkpoint.state.data
            if before != getattr(data, name)
        ]
        key, what = ("data.sources", "mixture") if data.weights else ("data.train", "token file")
        refused.append(f"{key}: another {what} ({', '.join(differing)})")
    if refused:
        message = f"{checkpoint.path}: made by another recipe: {'; '.join(refused)}"
        hint = "go back to those values, or name a new run: --set run.name=..."
        raise UsageError("resume.other_recipe", message, hint=hint)
    before, now = old.optimizer.name, recipe.optimizer.name
    if old.train is not None and not rule.keeps_state(before, now):
        allowed.append(f"optimizer.name: {now} begins without the state of {before}")
    assert recipe.train is not None
    step = checkpoint.state.step
    lost = [line for line in changes if rule.is_under(line, rule.NEED_STEPS)]
    if lost and step >= recipe.train.steps:
        raise UsageError(
            "resume.no_effect",
            f"{checkpoint.path}: the training ended at step {step}, and no step would use {'; '.join(lost)}",
            hint=f"to train on: --set train.steps=N, N above {step}; or name a new run: --set run.name=...",
        )
    ranks = checkpoint.state.world_size
    if ranks != world_size:
        plural = "s" if ranks > 1 else ""
        allowed.append(
            f"saved by {ranks} rank{plural}, resuming on {world_size}: same batches, same state, resharded"
        )
    return allowed


def _short(value: object) -> object:
    return value[:12] if isinstance(value, str) else value


def begin_with(given: GivenWeights, step: Step) -> None:
    """Load weights into the model of a step, and into the masters of its optimizer."""
    if not step.sync.load_weights(given):
        weights = dict(given)
        load_weights(step.model, weights, origin=given.path)
        load_masters(step.optimizer, step.model, weights)


def restore(checkpoint: Checkpoint, step: Step, optimizer: str) -> Counters:
    """Load weights, optimizer state and this rank's generators; return the position of the run.

    Of the state of another optimizer than `optimizer`, only the masters are loaded.
    """
    state, ranks = checkpoint.state, step.ranks
    begin_with(weights_of(checkpoint), step)
    layout = optimizer_layout(step.optimizer)
    is_own = layout is not None and layout == state.optimizer_layout
    own = int(step.optimizer.state_dict()["rank"]) if is_own else None
    shards = checkpoint.all_optimizer_shards() if own is None else [checkpoint.optimizer_tensors(own)]
    before = state.recipe.get("optimizer") or {}  # an imported model has no optimizer
    if rule.keeps_state(before.get("name", OptimizerConfig().name), optimizer):
        for group, numbers in zip(step.optimizer.param_groups, state.optimizer_groups, strict=False):
            for key, number in numbers.items():
                now = group.get(key)
                group[key] = torch.full_like(now, number) if isinstance(now, torch.Tensor) else number
    else:
        shards = [{n: value for n, value in shard.items() if n.endswith(f".{MASTER}")} for shard in shards]
    load_optimizer_tensors(
        step.optimizer,
        step.model,
        shards,
        state.optimizer_layout,
        origin=str(checkpoint.path),
        own=own,
    )
    restore_rng(state.rng[ranks.rank if ranks.rank < len(state.rng) else 0], ranks.device)
    step.skipped.fill_(state.skipped_in_a_row)
    if step.loss_scale is not None and state.loss_scale is not None:
        step.loss_scale.restore(state.loss_scale)
    if step.spikes is not None and state.spikes is not None:
        step.spikes.state.copy_(torch.tensor(state.spikes, dtype=torch.float64))
    return Counters(**{field.name: getattr(state, field.name) for field in fields(Counters)})


def is_finished(state: TrainingState, recipe: Recipe, stop_at_step: int | None) -> bool:
    """Return whether a checkpoint has reached the end of the run, or `stop_at_step`."""
    assert recipe.train is not None
    ends = recipe.train.steps if stop_at_step is None else min(recipe.train.steps, stop_at_step)
    time_is_up = recipe.train.max_minutes is not None and state.seconds >= recipe.train.max_minutes * 60
    return state.step >= ends or time_is_up


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    out: str | os.PathLike[str] | IO[bytes],
) -> None:
    """Save a model, an optimizer and a step number to one safetensors file.

    Args:
        model: any module. Compiled, DDP-wrapped and `FSDP` modules are saved as the plain module; of `FSDP`, every
            rank must call it, and rank 0 writes the path.
        optimizer: any `torch.optim.Optimizer` whose state consists of tensors and numbers; None: save none.
        out: a path (written atomically) or a binary file object.

    Raises:
        ValueError: the optimizer's state is sharded over several ranks.
        OSError: the file cannot be written.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_weights(model).items()}
    metadata = {"step": json.dumps(step)}
    if optimizer is not None:
        layout = optimizer_layout(optimizer)
        parts = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if (layout is not None and layout["world_size"] > 1) or has_slices(parts):
            raise ValueError("this optimizer holds one shard of several; lmkit train saves all of them")
        tensors |= {f"optimizer.{name}": value for name, value in optimizer_tensors(optimizer, model).items()}
        metadata["layout"] = json.dumps(layout)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        metadata["groups"] = json.dumps(groups, default=float)  # a learning rate may be a tensor
    # The format allows neither entries that share memory nor strides.
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    content = safetensors.torch.save(tensors, metadata)
    if not isinstance(out, str | os.PathLike):
        out.write(content)
    elif Ranks.current().is_first or not has_slices(model.parameters()):
        write_atomic(out, content)


def load_checkpoint(
    source: str | os.PathLike[str] | IO[bytes],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> int:
    """Load a file of `save_checkpoint` into a model and an optimizer; return its step number.

    The optimizer's hyperparameters (learning rate, betas...) are restored, too. No pickle is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the optimizer has another number of parameter groups.
        UsageError: the file belongs to another model.
        LmkitError: the file is damaged, or its optimizer state belongs to another optimizer.
    """
    origin = Path(source if isinstance(source, str | os.PathLike) else "file object")
    data = read_input(origin) if isinstance(source, str | os.PathLike) else source.read()
    try:
        tensors = safetensors.torch.load(data)
        # The header of a safetensors file: its length in 8 bytes, then JSON.
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        step, layout, groups = (json.loads(metadata.get(key, "null")) for key in ("step", "layout", "groups"))
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise damaged(origin, f"not a file of save_checkpoint ({error})") from error
    weights, states = (
        {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        for part in ("model.", "optimizer.")
    )
    load_weights(model, weights, origin=origin)
    if optimizer is not None and groups is not None:
        load_masters(optimizer, model, weights)
        load_optimizer_tensors(optimizer, model, [states], layout, origin=str(origin))
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()})
    return int(step)
