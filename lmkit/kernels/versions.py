"""How Triton's minors launch a compiled kernel; with `hopper.versions`, all that looks at versions here.

3.6 and 3.7 differ in what their C launchers take and in what the encoder of tensor descriptors is called.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import triton

SUPPORTED_MINORS = ((3, 6), (3, 7))
INSTALLED_MINOR = tuple(int(part) for part in triton.__version__.split(".")[:2])


def tensor_map_encoder() -> Callable[..., Any]:
    """(pointer, swizzle, element size, encoded type, box, shape, strides, 0) -> descriptor for the copy engine."""
    utils = triton.runtime.driver.active.utils
    return utils.fill_tma_descriptor if INSTALLED_MINOR == (3, 6) else utils.fill_tma_descriptor_tiled


def encoded_type(element_type: int) -> int:
    """The driver's number for what Triton's metadata calls an element type."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST[element_type]


def raw_launch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int, list], None]:
    """(stream, arguments) -> None: Triton's C launcher for a compiled kernel, below the layers that cost time.

    Arguments are the kernel's, descriptors as encoded, each followed by its shape and strides.
    """
    launcher = compiled.run  # loads the kernel, too
    function, packed, pdl = compiled.function, compiled.packed_metadata, launcher.launch_pdl
    assert launcher.global_scratch_size == launcher.profile_scratch_size == 0, "no memory is passed for these"
    launch = _c_launcher(launcher)
    if INSTALLED_MINOR == (3, 6):

        def start(stream, arguments):
            launch(*grid, stream, function, False, pdl, None, None, packed, None, None, None, *arguments)
    else:
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature

        def start(stream, arguments):
            launch(*grid, stream, function, False, pdl, packed, None, None, None, None, None, annotations,
                   signature, arguments)  # fmt: skip

    return start


@lru_cache(maxsize=1024)  # looking into a function costs more than a launch, and many launches share a kernel
def _c_launcher(launcher: Any) -> Callable[..., None]:
    launch = launcher.launch
    if inspect.isfunction(launch):  # the layer that encodes descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    return launch
