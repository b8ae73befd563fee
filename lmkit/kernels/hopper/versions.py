"""What differs between the Triton minors that the Hopper kernels support; nothing else in this package
looks at versions.

Gluon is Triton's explicit dialect and still moves between minors: 3.7 renamed `thread_barrier` to
`barrier`, and its C launcher takes its arguments otherwise. The TMA reduction is not exported for Hopper by
either, so the builder's own operation is wrapped here.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
from triton._C.libtriton import ir as triton_ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

SUPPORTED_MINORS = ((3, 6), (3, 7))
INSTALLED_MINOR = tuple(int(part) for part in triton.__version__.split(".")[:2])

# Waits for all warps of the partition that calls it (a warp group, or both of them), not for the whole block.
partition_barrier = gl.thread_barrier if INSTALLED_MINOR == (3, 6) else gl.barrier


@builtin
def tma_add_to_global(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory in the copy engine
    (`cp.reduce.async.bulk.tensor.add`)."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = triton_ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


def tensor_map_encoder() -> Callable[..., Any]:
    """(pointer, swizzle, element size, encoded type, box, shape, strides, 0) -> descriptor for the copy engine."""
    utils = triton.runtime.driver.active.utils
    return utils.fill_tma_descriptor if INSTALLED_MINOR == (3, 6) else utils.fill_tma_descriptor_tiled


def encoded_type(element_type: int) -> int:
    """The driver's number for what Triton's metadata calls an element type."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST[element_type]


def raw_launch(compiled, grid: tuple[int, int, int]) -> Callable[[int, list], None]:
    """(stream, arguments) -> None: Triton's C launcher for a compiled kernel, below the layers that cost time.

    Arguments are the kernel's, descriptors as encoded, each followed by its shape and strides.
    """
    launcher = compiled.run  # loads the kernel, too
    function, packed, pdl = compiled.function, compiled.packed_metadata, launcher.launch_pdl
    launch = launcher.launch
    if inspect.isfunction(launch):  # the layer that encodes descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    if INSTALLED_MINOR == (3, 6):

        def start(stream, arguments):
            launch(*grid, stream, function, False, pdl, None, None, packed, None, None, None, *arguments)
    else:
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature

        def start(stream, arguments):
            launch(*grid, stream, function, False, pdl, packed, None, None, None, None, None, annotations,
                   signature, arguments)  # fmt: skip

    return start
