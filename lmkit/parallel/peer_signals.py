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
    """A rank announces that its stream has come to a point; another lets its own stream wait for that.

    The driver's memory operations do both: what a stream launched before is visible to all GPUs when the number is
    written, and a stream that waits holds no multiprocessor (a kernel that waits would take one from the products
    beside it). Rank a's n-th announcement on a channel is the number n in a place of rank b's memory that is
    theirs alone.

    Args:
        of_rank: every rank's memory as it is seen from here, zeroed, (num_bytes(channels, world_size),) uint8 each.
        rank: this rank's number.
    """

    def __init__(self, of_rank: Sequence[torch.Tensor], rank: int) -> None:
        world_size = len(of_rank)
        self._device = of_rank[rank].device
        self._memory = list(of_rank)
        channels = of_rank[rank].numel() // (world_size * BYTES)
        self._count = [0] * channels
        others = [other for other in range(world_size) if other != rank]

        def place(in_memory_of: int, written_by: int, channel: int) -> int:
            return of_rank[in_memory_of].data_ptr() + BYTES * (channel * world_size + written_by)

        self._mine = [[place(other, rank, channel) for other in others] for channel in range(channels)]
        self._theirs = [[place(rank, other, channel) for other in others] for channel in range(channels)]

    @staticmethod
    def num_bytes(channels: int, world_size: int) -> int:
        """What every rank needs."""
        return channels * world_size * BYTES

    def announce(self, channel: int) -> None:
        """Tell all other ranks that the current stream has come here once more."""
        self._count[channel] += 1
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._mine[channel]:
            _check(_driver().cuStreamWriteValue32_v2(stream, address, self._count[channel], 0))

    def await_others(self, channel: int) -> None:
        """Let the current stream wait until all other ranks have announced as often as this one has."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for address in self._theirs[channel]:
            _check(_driver().cuStreamWaitValue32_v2(stream, address, self._count[channel], _AT_LEAST))


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
