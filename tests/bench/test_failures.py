"""Errors of variants become rows; those that end every variant do not."""

import signal
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from lmkit.bench.failures import RankGaveUp, failure_is_a_row
from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.ranks import RankLost

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (FULL, "out of memory", "CUDA out of memory"),
        (MemoryError(), "out of memory", "of the host"),
        (UsageError("a.b", "head_dim 16 is not supported"), "unsupported", "head_dim 16 is not supported"),
        (NotImplementedError("later"), "unsupported", "NotImplementedError: later"),
        (
            RuntimeError("No available kernel. Aborting"),
            "unsupported",
            "RuntimeError: No available kernel. Aborting",
        ),
        (ValueError("wrong\nlong story"), "failed", "ValueError: wrong"),
        (LmkitError("a.b", "damaged"), "failed", "LmkitError: damaged"),
        (KeyError(), "failed", "KeyError"),
        (SystemExit(0), "failed", "SystemExit: 0"),
        (BaseException("bad\nlong story"), "failed", "BaseException: bad"),
    ],
)
def test_an_error_is_a_row(error, status, detail):
    row: dict[str, Any] = {"status": "ok"}
    with failure_is_a_row(row, "cpu"):
        raise error
    assert row == {"status": status, "detail": detail}


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RankLost("parallel.rank_lost", "rank 1 is gone"),
        DistBackendError("NCCL error"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        *(RankGaveUp("bench.rank_failed", "full"), SystemExit(128 + signal.SIGTERM), KeyboardInterrupt()),
    ],
)
def test_what_ends_every_variant_is_raised(error):
    with pytest.raises(type(error)), failure_is_a_row({}, "cpu"):
        raise error
