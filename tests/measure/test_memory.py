import multiprocessing
import os

import pytest
import torch

from lmkit.measure.memory import is_out_of_memory, process_memory, process_tree_memory, track_peak

MIB = 2**20


def test_the_peak_counts_what_was_freed_again():
    with track_peak("cpu") as peak:
        block = torch.ones(64 * MIB, dtype=torch.uint8)
        del block
    # RSS is counted in pages and per-thread batches; a tenth of the block is far above that.
    assert peak.extra_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert peak.source == "peak rss"


def test_the_peak_of_an_earlier_block_is_forgotten():
    with track_peak("cpu"):
        block = torch.ones(96 * MIB, dtype=torch.uint8)
        del block
    with track_peak("cpu") as peak:
        block = torch.ones(8 * MIB, dtype=torch.uint8)
        del block
    assert peak.extra_bytes < 24 * MIB


def test_small_tensors_count_though_the_heap_had_room_for_them():
    """Freed memory that the C library keeps would otherwise be taken again without any growth."""
    hoard = [torch.ones(20_000) for _ in range(400)]  # 32 MB in pieces that come from the heap
    del hoard
    with track_peak("cpu") as peak:
        again = [torch.ones(20_000) for _ in range(400)]
        del again
    assert peak.extra_bytes == pytest.approx(400 * 80_000, rel=0.2)


def test_the_peak_is_there_after_an_exception():
    peaks = []

    def allocate_and_fail() -> None:
        with track_peak("cpu") as peak:
            peaks.append(peak)
            block = torch.ones(32 * MIB, dtype=torch.uint8)
            del block
            raise KeyError

    with pytest.raises(KeyError):
        allocate_and_fail()
    (peak,) = peaks
    assert peak.extra_bytes > 16 * MIB


def test_pss_is_at_most_rss():
    memory = process_memory()
    assert 0 < memory.pss_bytes <= memory.rss_bytes


def test_missing_process():
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    child.join()
    with pytest.raises(ProcessLookupError):
        process_memory(child.pid)


def _hold_memory(parent) -> None:
    block = bytearray(b"x" * (48 * MIB))
    parent.send("ready")
    parent.recv()
    del block


def test_the_tree_includes_children():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_hold_memory, args=(theirs,))
    before = process_tree_memory()
    child.start()
    theirs.close()  # so that a child that dies ends the wait
    with ours:
        assert ours.recv() == "ready"
        during = process_tree_memory()
        ours.send("end")
    child.join()
    assert during.pss_bytes - before.pss_bytes > 40 * MIB


def test_a_driver_without_memory_counts_as_out_of_memory_and_a_lost_device_does_not():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA driver error: out of memory"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(RuntimeError("out of memory"))  # somebody's words, not the device's
