import pytest
import torch

from lmkit.measure.memory import is_out_of_memory, track_peak

MIB = 2**20


def test_the_peak_counts_what_was_freed_again_also_by_an_exception():
    def allocate_and_fail() -> None:
        torch.ones(64 * MIB, dtype=torch.uint8)
        raise KeyError

    with pytest.raises(KeyError), track_peak("cpu") as peak:
        allocate_and_fail()
    # RSS is counted in pages and per-thread batches; a tenth of the block is far above that.
    assert peak.extra_bytes == pytest.approx(64 * MIB, rel=0.1)


def test_the_peak_of_an_earlier_block_is_forgotten():
    for size, most in ((96, 1000), (8, 24)):
        with track_peak("cpu") as peak:
            block = torch.ones(size * MIB, dtype=torch.uint8)
            del block
        assert peak.extra_bytes < most * MIB


def test_small_tensors_count_though_the_heap_had_room_for_them():
    """Freed memory that the C library keeps would otherwise be taken again without any growth."""
    hoard = [torch.ones(20_000) for _ in range(400)]  # 32 MB in pieces that come from the heap
    del hoard
    with track_peak("cpu") as peak:
        again = [torch.ones(20_000) for _ in range(400)]
        del again
    assert peak.extra_bytes == pytest.approx(400 * 80_000, rel=0.2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), False),
        (RuntimeError("out of memory"), False),  # somebody's words, not the device's
    ],
)
def test_a_driver_without_memory_counts_as_out_of_memory_and_a_lost_device_does_not(error, expected):
    assert is_out_of_memory(error) is expected
