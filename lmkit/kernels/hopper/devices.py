"""Facts about the GPU that never change, asked for once, and its selection."""

import contextlib
import functools

import torch

SELECTED_ALREADY = contextlib.nullcontext()


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many thread blocks of ours run at once, one each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def selected(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes the device the current one, on whose stream kernels are launched; for free where it is already."""
    if device.index == torch.cuda.current_device():
        return SELECTED_ALREADY
    return torch.cuda.device(device)
