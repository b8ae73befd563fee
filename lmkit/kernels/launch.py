"""Launch kernels cheaply: prepare a launch once for a kind of call, then only fill in pointers.

Triton inspects every argument of every call to find the compiled variant that fits, and wraps descriptors and
launches in several layers of Python: 15 to 25 us a kernel, and a backward pass is two or three kernels. None of
this changes while shapes, strides, data types, alignment and device stay the same. So a launch is prepared once
for them; a warm call only encodes the TMA descriptors for its pointers and calls Triton's C launcher. Hooks of
Triton's profiler do not see these calls.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.torch_version import TorchVersion

from lmkit.kernels.versions import (
    INSTALLED_MINOR,
    INTERPRETED,
    SUPPORTED_MINORS,
    encoded_type,
    raw_launch,
    tensor_map_encoder,
)

PREPARES = not INTERPRETED and INSTALLED_MINOR in SUPPORTED_MINORS
"""Whether launches can be prepared here. If not, Triton launches the portable kernels itself."""

RESET_RELEASES = "2.14"
"""The first torch whose `CUDAGraph.reset` does what `_leave_pool` does."""

Start = Callable[..., None]
"""Launches a kernel on the pointers that it is called with."""
Launch = tuple[tuple[int, int], tuple, dict[str, Any]]
"""Grid, numbers and constants of a launch, see `prepare_launch`."""


def prepare_launch(
    kernel: Any, grid: tuple[int, int], tensors: Sequence[Any], numbers: tuple, constants: dict[str, Any]
) -> Start:
    """Prepare a launch of a kernel: return a function of the tensors' pointers, in order.

    It launches on the current stream of the device that was current here. Where no launch can be prepared (see
    PREPARES), it launches on `tensors` themselves.

    Args:
        tensors: the kernel's first parameters: tensors, Triton's tensor descriptors, or descriptions without a
            tensor: Boxes, or a dtype for a plain pointer that is a multiple of 16. Of tensors it is kept only
            whether their pointers are multiples of 16.
        numbers: its other run-time parameters, in order.
        constants: its compile-time parameters and Triton's options (num_warps...), by name.
    """
    places = {x.device for x in tensors if isinstance(x, Tensor)}
    if len(places) > 1:
        raise ValueError(f"{kernel.__name__} takes tensors on one device, got {sorted(map(str, places))}")
    # Triton's default so far; 3.9 warns where it is left out, because 3.10 will change it.
    constants = {"enable_fp_fusion": True, **constants}
    if not PREPARES:
        return lambda *pointers: kernel[grid](*tensors, *numbers, **constants)
    examples = [torch.empty(0, dtype=x) if isinstance(x, torch.dtype) else x for x in tensors]
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    values = [constants[name] for name in names]
    options = {name: value for name, value in constants.items() if name not in names}
    compiled = kernel.warmup(*examples, *numbers, *values, grid=(*grid, 1), **options)
    metas = iter(compiled.metadata.tensordesc_meta or ())
    prepared: list[Any] = []  # the arguments in order; None where a call fills in a pointer or a descriptor
    # For each tensor: its index in `prepared`, and what its descriptor is encoded from besides the pointer
    encodings: list[tuple[int, tuple | None]] = []
    for x in examples:
        encoded = None
        place = len(prepared)
        prepared.append(None)
        if not isinstance(x, torch.Tensor):
            meta, shape, strides = next(metas), list(x.shape), list(x.strides)
            element = meta["swizzle"], meta["elem_size"], encoded_type(meta["elem_type"]), meta["block_size"]
            encoded = (*element, shape, strides, 0)  # 0: zeros outside of the tensor
            prepared += [*shape, *strides]
        encodings.append((place, encoded))
    prepared += [*numbers, *values]
    launch, encode = raw_launch(compiled, (*grid, 1)), tensor_map_encoder()
    device, current_stream = torch.cuda.current_device(), triton.runtime.driver.active.get_current_stream

    def start(*pointers: int) -> None:
        arguments = prepared.copy()
        for pointer, (place, encoded) in zip(pointers, encodings, strict=True):
            arguments[place] = pointer if encoded is None else encode(pointer, *encoded)
        launch(current_stream(device), arguments)

    return start


def prepare_call(
    kernel: Any,
    grid: tuple[int, int],
    tensors: Sequence[Tensor],
    numbers: tuple,
    constants: dict[str, Any],
    *,
    pdl: bool | None = None,
) -> Callable[[], None]:
    """Prepare a launch on these very tensors, whose memory stays where it is. `pdl`: whether the kernel begins before
    the previous kernel has ended (programmatic dependent launch), as its parameter PDL says; None: it has none."""
    if pdl is not None:
        constants = {**constants, "PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    start = prepare_launch(kernel, grid, tensors, numbers, constants)
    return partial(start, *[x.data_ptr() for x in tensors])


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, *, pool: Any = None, **options: Any) -> Iterator[None]:
    """Record the launches of the block as a CUDA graph, with the options of `torch.cuda.graph`.

    The garbage collector is off meanwhile: if it freed another graph, the recording would end with an error. If
    PyTorch cannot end a recording, stream and allocator are again what they were.
    """
    collects, began = gc.isenabled(), False
    gc.disable()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        stays = torch.cuda.stream(torch.cuda.current_stream())
        with stays, torch.cuda.graph(graph, pool=pool, **options):
            began = True
            yield
    except BaseException:
        if began:
            _leave_pool(graph, pool)
        raise
    finally:
        if collects:
            gc.enable()


def _leave_pool(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End what the allocator does for a recording that PyTorch could not end: memory of several streams would never
    be free again, and freeing a `MemPool` would abort the process."""
    if TorchVersion(torch.__version__) >= RESET_RELEASES:
        return
    try:
        graph.pool()
    except RuntimeError:  # it has none: the recording was not ended
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # 2.13 has left it
            torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


class LaunchCache:
    """Calls of a function that launches kernels, prepared once for each kind of call.

    A kind is everything that the launches may depend on: the inputs' shapes, strides, dtypes and device, which
    addresses are multiples of 16, and the options. `prepare((*inputs, *outputs), options)` returns what launches on
    the pointers of inputs and outputs.
    """

    MOST_KINDS = 1024  # a length that grows with every call must not fill the memory

    def __init__(self, prepare: Callable[..., Start]) -> None:
        self.prepare = prepare
        self.prepared: dict[tuple, Start] = {}

    def __call__(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], options: tuple) -> None:
        """Launch on the inputs' device, on its current stream. The layout of the outputs follows from the inputs'."""
        device = inputs[0].device
        pointers = [x.data_ptr() for x in (*inputs, *outputs)]
        together = 0
        for pointer in pointers:
            together |= pointer
        aligned = together % 16 == 0 or tuple(pointer % 16 == 0 for pointer in pointers)
        kind = (device, aligned, *options, *[(x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs])
        start = self.prepared.get(kind)
        with selected(device):
            if start is None:
                start = self.prepare((*inputs, *outputs), options)
                # A tile size that is chosen during a capture is not measured: a later call may choose better.
                if PREPARES and not torch.cuda.is_current_stream_capturing():
                    if len(self.prepared) >= self.MOST_KINDS:
                        self.prepared.clear()
                    self.prepared[kind] = start
            start(*pointers)


def calls_of(kernel: Any, describe: Callable[..., Launch]) -> LaunchCache:
    """Return the calls of one kernel; `describe(options, *inputs, *outputs)` returns a kind's launch."""

    def prepare(tensors: tuple[Tensor, ...], options: tuple) -> Start:
        grid, numbers, constants = describe(options, *tensors)
        return prepare_launch(kernel, grid, tensors, numbers, constants)

    return LaunchCache(prepare)


def selected(device: torch.device) -> AbstractContextManager:
    """Make `device` the one that kernels are launched on; costs nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, (9, 0) for Hopper. Cached: the driver takes microseconds to answer."""
    return torch.cuda.get_device_capability(device)


@cache
def count_sms(device: torch.device) -> int:
    """Return how many streaming multiprocessors (SMs) the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_tiles(length: int, size: int) -> int:
    """Return how many tiles of `size` cover `length` (`triton.cdiv` costs microseconds of host time)."""
    return -(-length // size)


def strides_in_order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return dense strides for a (batch, heads, seq, head_dim) tensor in the memory order of `strides`."""
    _, heads, length, head_dim = shape
    if strides[1] < strides[2]:
        return (length * heads * head_dim, head_dim, heads * head_dim, 1)
    return (heads * length * head_dim, length * head_dim, head_dim, 1)


def empty_in_order_of(x: Tensor) -> Tensor:
    """Return an uninitialised dense tensor shaped as x (batch, heads, seq, head_dim), in x's memory order."""
    if x.is_contiguous():
        return torch.empty_like(x)
    return x.new_empty_strided(x.shape, strides_in_order_of(x.shape, x.stride()))


def as_rows(x: Tensor) -> Tensor:
    """(..., channels) -> (rows, channels) with stride 1 along the channels; a copy only if no view can be that."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
