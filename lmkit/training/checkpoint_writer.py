"""Write checkpoints in the background while training goes on.

`save` returns at once. A thread copies the tensors to host memory during the next forward and backward passes, which
only read weights, and writes the files from that copy. Before the optimizer changes anything, the trainer calls
`release_weights`, which waits for the copy; usually it is long done.

Every rank has a writer. Rank 0 writes `state.json`, the manifest and the model; if the weights are sharded, each rank
writes a part of the model. Each rank writes its optimizer shard, if the state is sharded. The threads exchange
messages through the process group's key-value store. They use no collectives, so nothing can get out of order with
those of training.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lmkit.core.ranges import range_
from lmkit.errors import LmkitError, reason
from lmkit.parallel.collectives import on_any_rank
from lmkit.parallel.failures import RankLost
from lmkit.parallel.ranks import Ranks
from lmkit.storage.atomic import PARTIAL_SUFFIX
from lmkit.training.atomic_checkpoint import (
    STATE,
    FileEntry,
    model_name,
    publish,
    shard_name,
    step_name,
    write_manifest,
    write_tensors,
    write_text,
)
from lmkit.training.checkpoint import Retention
from lmkit.training.state import RngState, TrainingState

Tensors = Mapping[str, torch.Tensor]
Files = dict[str, Tensors]
"""file name -> its tensors by name"""
_POLL_S = 0.02
"""How often a thread looks for a message, and the trainer for the other ranks while it waits."""


class CheckpointWriter:
    """Save the checkpoints of one run, at most one at a time.

    A failed write (a full disk, for example) leaves older checkpoints as they are. The next call of any method raises
    the error.

    Args:
        folder: `checkpoints/` of the run; made with the first checkpoint.
        retention: decides which checkpoints stay; used on rank 0.
    """

    def __init__(self, folder: Path, ranks: Ranks, retention: Retention) -> None:
        self._folder = folder
        self._ranks = ranks
        self._retention = retention
        self._copies = _HostCopies(ranks.device)
        # One PyTorch thread on a CPU: with more threads than CPUs, OpenMP lets those of the training sleep between
        # tasks, which makes steps slower.
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="lmkit-checkpoint-writer",
            initializer=partial(torch.set_num_threads, 1) if ranks.device.type == "cpu" else None,
        )
        self._writing: Future[None] | None = None
        self._step = 0
        self._copied = threading.Event()
        self._copied.set()
        self._abandoned = threading.Event()
        self.stall_seconds = 0.0
        """How long training has waited for saving so far."""

    def reserve(
        self, state: TrainingState, *, model: Tensors, optimizer: Tensors, model_files: int = 1
    ) -> None:
        """Allocate host memory in the background, so that the first save is as fast as the others; see `save`."""
        self.wait()
        files = self._own_files(state, model, optimizer, model_files)
        self._start(state.step, lambda: self._copies.reserve(files))

    def save(self, state: TrainingState, *, model: Tensors, optimizer: Tensors, model_files: int = 1) -> None:
        """Begin to save. Every rank calls it at the same step.

        Args:
            state: with this rank's RNG state; those of the other ranks are added.
            model, optimizer: the live tensors, on any device; under a sharded optimizer this rank's shard.
            model_files: 1: the model is rank 0's; the number of ranks: each saves the part that it gives.
        """
        started = time.perf_counter()
        self.wait()
        files = self._own_files(state, model, optimizer, model_files)
        self._copies.mark()
        self._copied.clear()
        self._start(state.step, lambda: self._write(state, files))
        self.stall_seconds += time.perf_counter() - started

    def release_weights(self) -> None:
        """Return once the tensors of a save in flight may change again."""
        started = time.perf_counter()
        with range_("checkpoint.release"):
            self._copied.wait()
            self._copies.order_after_copies()
        self.stall_seconds += time.perf_counter() - started
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Return once this rank writes nothing any more."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            raise LmkitError(
                "checkpoint.write_failed",
                f"{self._folder / step_name(self._step)}: cannot be saved: {reason(error)}",
                hint="earlier checkpoints are intact; make room, then train again to resume from the newest",
            ) from error

    def wait_for_all(self) -> None:
        """Return once no rank writes any more. Every rank calls it at the same step.

        The ranks poll one another with a collective meanwhile. A dead rank breaks it at once; otherwise its missing
        shard would surface only at the timeout.

        Raises:
            RankLost: another rank cannot save; that rank's own error says why.
        """
        started = time.perf_counter()
        writing = [] if self._writing is None else [self._writing]
        patience = 0.0
        while True:
            done, busy = wait_for_futures(writing, timeout=patience)
            failed = any(future.exception() is not None for future in done)
            busy_somewhere, failed_somewhere = on_any_rank(self._ranks, bool(busy), failed)
            if failed_somewhere or not busy_somewhere:
                break
            patience = _POLL_S
        self.stall_seconds += time.perf_counter() - started
        if failed_somewhere and not failed:
            raise RankLost(
                "ranks.lost",
                f"rank {self._ranks.rank}, saving step {self._step}: another rank cannot write its part",
                hint="look for that rank's own error; earlier checkpoints are intact",
            )
        self.wait()

    def abandon(self) -> None:
        """Finish the write in progress after an error, without waiting for a lost rank."""
        self._abandoned.set()
        self._thread.shutdown()

    def _own_files(self, state: TrainingState, model: Tensors, optimizer: Tensors, model_files: int) -> Files:
        """Return what this rank writes: file name -> tensors."""
        rank = self._ranks.rank
        files: Files = {model_name(rank, model_files): model} if rank < model_files else {}
        if rank < state.optimizer_shards:  # further ranks keep copies
            files[shard_name(rank, state.optimizer_shards)] = optimizer
        return files

    def _start(self, step: int, work: Callable[[], None]) -> None:
        self._step = step
        self._writing = self._thread.submit(work)

    def _write(self, state: TrainingState, live: Files) -> None:
        """In the thread: copy, release the weights, write this rank's files; on rank 0 collect and publish."""
        try:
            copies = self._copies.fill(live)
        finally:
            self._copied.set()
        self._copies.synchronize()
        _refuse_nonfinite(copies, state.step)
        partial = self._folder / (step_name(state.step) + PARTIAL_SUFFIX)
        post = _Post(self._ranks, state.step, self._abandoned)
        if not self._ranks.is_first:
            self._write_part(state, copies, partial, post)
            return
        try:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            post.send("folder", {})
            self._write_all(state, copies, partial, post)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._retention.remember(state.step, state.valid_loss)
        self._retention.prune()

    def _write_part(self, state: TrainingState, copies: Files, partial: Path, post: _Post) -> None:
        """On every rank but the first: write its files, if it has some; send the RNG state."""
        message: dict[str, object] = {"error": "an error of its own"}
        try:
            if copies:
                post.receive("folder", 0)
            entries = _write_files(partial, copies)
            message = {
                "rng": state.rng[0].model_dump(),
                "entries": {name: asdict(entry) for name, entry in entries.items()},
            }
        except OSError as error:
            message = {"error": reason(error)}
            raise
        finally:
            post.send("part", message)

    def _write_all(self, state: TrainingState, copies: Files, partial: Path, post: _Post) -> None:
        """On rank 0: write its own files, collect the parts of the others, write the manifest, publish."""
        entries = _write_files(partial, copies)
        rng = list(state.rng)
        for rank in range(1, self._ranks.world_size):
            part = post.receive("part", rank)
            if "error" in part:
                raise LmkitError(
                    "checkpoint.write_failed",
                    f"{partial}: rank {rank} cannot save its part: {part['error']}",
                    hint="earlier checkpoints are intact",
                )
            rng.append(RngState.model_validate(part["rng"]))
            entries |= {name: FileEntry(**fields) for name, fields in part["entries"].items()}
            post.forget("part", rank)
        post.forget("folder", 0)  # every rank that had to see it has sent its part since
        complete = state.changed(rng=tuple(rng))
        entries[STATE] = write_text(partial / STATE, complete.model_dump_json(indent=1) + "\n")
        write_manifest(partial, entries)
        publish(partial, self._folder / step_name(state.step))


def _refuse_nonfinite(copies: Files, step: int) -> None:
    """Refuse weights that the very last update made NaN or infinite: they must not replace a good checkpoint."""
    for file, tensors in copies.items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel():
                lowest, highest = torch.aminmax(tensor)  # one pass; NaN propagates
                if not (torch.isfinite(lowest) and torch.isfinite(highest)):
                    raise LmkitError(
                        "checkpoint.nonfinite",
                        f"step {step}: {file}: {name} is not finite; not saved",
                        hint="resume from the newest checkpoint with a lower optimizer.lr",
                    )


class _HostCopies:
    """Host memory that tensors are copied to, kept between saves: fresh pages cost more than the copy."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._before = torch.cuda.Event() if self._on_gpu else None
        self._after: torch.cuda.Event | None = None

    def reserve(self, live: Files) -> None:
        for file, tensors in live.items():
            for name, tensor in tensors.items():
                self._buffer(file, name, tensor).zero_()  # writing makes the system provide the pages

    def _buffer(self, file: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((file, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu and tensor.is_cuda)
            self._buffers[file, name] = buffer
        return buffer

    def mark(self) -> None:
        """In the trainer: everything launched so far on the GPU belongs into the copy."""
        if self._before is not None:
            self._before.record(torch.cuda.current_stream(self._device))

    def fill(self, live: Files) -> Files:
        """In the thread: copy, on GPUs after the mark. See `synchronize` and `order_after_copies`."""
        if self._stream is None or self._before is None:
            return self._copy(live)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._before)
            copies = self._copy(live)
            after = torch.cuda.Event()
            after.record(self._stream)
            self._after = after
        return copies

    def _copy(self, live: Files) -> Files:
        return {
            file: {
                name: self._buffer(file, name, tensor).copy_(tensor.detach(), non_blocking=self._on_gpu)
                for name, tensor in tensors.items()
            }
            for file, tensors in live.items()
        }

    def synchronize(self) -> None:
        """In the thread: return once the copies hold the data."""
        if self._after is not None:
            self._after.synchronize()

    def order_after_copies(self) -> None:
        """In the trainer: kernels launched from now on run after the copies."""
        if self._after is not None:
            torch.cuda.current_stream(self._device).wait_event(self._after)


class _Post:
    """Exchange small JSON messages about one checkpoint between the writer threads of all ranks.

    A rank's part is 7 kB (the state of its random generator). Messages are deleted once they are read, or the store
    would grow with every checkpoint.
    """

    def __init__(self, ranks: Ranks, step: int, abandoned: threading.Event) -> None:
        self._ranks = ranks
        self._step = step
        self._abandoned = abandoned

    def send(self, topic: str, message: dict[str, object]) -> None:
        if self._ranks.store is not None:
            self._ranks.store.set(self._key(topic, self._ranks.rank), json.dumps(message))

    def receive(self, topic: str, sender: int) -> dict:
        """Wait for a message. Poll, because a blocking wait would lock the store for the trainer."""
        assert self._ranks.store is not None
        key = self._key(topic, sender)
        deadline = time.monotonic() + self._ranks.timeout_s
        while not self._ranks.store.check([key]):
            if self._abandoned.wait(_POLL_S) or time.monotonic() > deadline:
                raise LmkitError(
                    "checkpoint.rank_missing",
                    f"{step_name(self._step)}: rank {sender} did not deliver its part of the checkpoint",
                    hint="look for that rank's own error; earlier checkpoints are intact",
                )
        return json.loads(self._ranks.store.get(key))

    def forget(self, topic: str, sender: int) -> None:
        """Delete a message that every reader has read."""
        if self._ranks.store is not None:
            self._ranks.store.delete_key(self._key(topic, sender))

    def _key(self, topic: str, sender: int) -> str:
        return f"checkpoint/{self._step}/{topic}/{sender}"


def _write_files(folder: Path, files: Files) -> dict[str, FileEntry]:
    return {name: write_tensors(folder / name, tensors) for name, tensors in files.items()}
