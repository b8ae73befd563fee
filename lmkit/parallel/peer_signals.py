"""Ranks that wait for one another on their GPUs, without a kernel and without the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from lmkit.errors import LmkitError

BYTES = 4
"""Of a signal: the driver writes and awaits 32-bit numbers."""
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2^32


class PeerSignals:
    """A rank announces that its stream has come to a point; the others let their streams wait for that.

    The driver's memory operations do both: what a stream launched before is visible to all GPUs when the number is
    written, and a stream that waits holds no multiprocessor (a kernel that waits takes one from the products beside
    it). A rank's n-th announcement is the number n, in a place of each other rank's memory that is its own.

    Args:
        of_rank: every rank's memory as it is seen from here, zeroed, (num_bytes(world_size),) uint8 each.
        rank: this rank's number.
    """

    def __init__(self, of_rank: Sequence[torch.Tensor], rank: int) -> None:
        self._memory = list(of_rank)  # alive as long as it is written to
        self._device = of_rank[rank].device
        others = [other for other in range(len(of_rank)) if other != rank]
        self._mine = [of_rank[other].data_ptr() + BYTES * rank for other in others]
        self._theirs = [of_rank[rank].data_ptr() + BYTES * other for other in others]
        self._count = 0

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """What every rank needs."""
        return BYTES * world_size

    def announce(self) -> None:
        """Tell all other ranks that the current stream has come here once more."""
        self._count += 1
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._mine:
            _check(_driver().cuStreamWriteValue32_v2(stream, address, self._count, 0))

    def await_others(self) -> None:
        """Let the current stream wait until all other ranks have announced as often as this one has."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._theirs:
            _check(_driver().cuStreamWaitValue32_v2(stream, address, self._count, _AT_LEAST))


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for function in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return driver


def _check(error: int) -> None:
    if error:
        raise LmkitError(
            f"the GPU's driver does not write or await signals in a stream (error {error})",
            hint='set parallel.gather = "collective"',
        )
