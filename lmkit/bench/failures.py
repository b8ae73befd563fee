"""What becomes of a variant that fails: its row says "out of memory", "unsupported", "failed" or "wrong result".

A variant may be the user's code. The others complete.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmkit.errors import LmkitError, UsageError, first_line
from lmkit.measure.memory import is_out_of_memory, release_memory
from lmkit.measure.timing import global_state_kept

if TYPE_CHECKING:
    import torch

    from lmkit.bench.context import Context

REFUSALS = ("No available kernel", "No viable backend", "No working C++ compiler")
"""Texts in errors of PyTorch that refuse a pinned backend, on a GPU and on a CPU, or to compile."""
PATIENCE_S = 2.0
"""Seconds that a rank on which a variant failed waits for the others, which may wait for it inside a collective."""


class RankGaveUp(LmkitError):
    """A variant failed on one rank only, for which others may wait inside a collective, so all ranks end.

    `--nproc` starts its ranks again; they measure the rows that the journal lacks.
    """


@contextmanager
def failure_is_a_row(row: dict[str, Any], device: torch.device | str) -> Iterator[None]:
    """Turn an error of the block into the row's status, and give its memory back; also restore torch's global state.

    Errors of a lost device or rank pass: every further call would fail. So do signals.
    """
    try:
        with global_state_kept():
            yield
    except BaseException as error:
        if _ends_the_bench(error):
            raise
        row |= _status_of(error)
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the calls that ended
        release_memory(device)


@contextmanager
def failure_on_any_rank_is_a_row(row: dict[str, Any], context: Context, note: str = "") -> Iterator[None]:
    """Turn an error of the block on any rank into the row's status on every rank. Collective.

    Args:
        note: added to the detail of a row that is out of memory.

    Raises:
        RankGaveUp: another rank does not end the block in `PATIENCE_S`, because it waits for this rank.
    """
    import torch.distributed as dist

    from lmkit.parallel.ranks import absent_ranks

    ranks = context.ranks
    with failure_is_a_row(row, ranks.device):
        yield
    if row["status"] == "out of memory":
        row["detail"] += note
    if ranks.world_size == 1:
        return
    assert ranks.store is not None
    end = f"end {ranks.store.add(f'ends/{ranks.rank}', 1)}"  # the number is equal on all ranks
    ranks.store.set(f"{end}/{ranks.rank}", "")
    if row["status"] != "ok" and absent_ranks(ranks.store, end, ranks.world_size, PATIENCE_S):
        context.journal.add([row])
        message = f"rank {ranks.rank}: {row['status']}: {row.get('detail', '')}"
        hint = "leave the variant out, or let --nproc start the ranks: it goes on with the other variants"
        raise RankGaveUp("bench.rank_failed", message, hint=hint)
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, {key: row.get(key, "") for key in ("status", "detail")})
    if failed := next((other for other in of_ranks if other["status"] != "ok"), None):
        row |= failed


def _ends_the_bench(error: BaseException) -> bool:
    """Return whether every further call would fail: a device or rank is lost, or a signal came."""
    import torch

    from lmkit.parallel.ranks import is_communication

    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return True
    if isinstance(error, SystemExit):
        return isinstance(error.code, int) and error.code > 128  # of a signal
    is_lost = isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
    return is_lost or isinstance(error, RankGaveUp) or is_communication(error)


def _status_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_out_of_memory(error)):
        return not_enough_memory(str(error) or "of the host")
    refused = isinstance(error, UsageError | NotImplementedError) or any(x in str(error) for x in REFUSALS)
    detail = error.message if isinstance(error, UsageError) else first_line(error)
    return {"status": "unsupported" if refused else "failed", "detail": detail}


def not_enough_memory(reason: str) -> dict[str, Any]:
    """Return the status and detail of a row that does not fit; the detail is the first sentence."""
    return {"status": "out of memory", "detail": reason.split(". ")[0].partition("\n")[0]}


def wrong_result(why: str) -> dict[str, Any]:
    """Return the status and detail of a variant that computes something else than it should."""
    return {"status": "wrong result", "detail": why}
