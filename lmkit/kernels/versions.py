"""Hide the differences between the minors of Triton: launches, Gluon's names, the interpreter.

The Hopper kernels and the cheap launches of `lmkit.kernels.launch` reach below Triton's stable interface. They
run with SUPPORTED_MINORS only, with which they were compiled and their launches compared with Triton's own. With
any other minor the portable kernels run, launched by Triton itself.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import triton

SUPPORTED_MINORS = ((3, 6), (3, 7), (3, 8), (3, 9))
INSTALLED_MINOR = tuple(int(part) for part in triton.__version__.split(".")[:2])

# Whether kernels run in Triton's interpreter, in NumPy on the CPU (TRITON_INTERPRET=1). Triton reads the variable
# when it decorates a kernel, so the answer is fixed when the process starts.
INTERPRETED: bool = triton.knobs.runtime.interpret


def dotted(minor: tuple[int, ...]) -> str:
    """Return a minor as people write it: 3.6."""
    return ".".join(map(str, minor))


def raw_launch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int, list], None]:
    """Return `launch(stream, arguments)`: Triton's C launcher of a compiled kernel, without the layers above it.

    The arguments are the kernel's, in order; an encoded tensor descriptor is followed by its shape and strides.
    """
    launcher = compiled.run  # also loads the kernel onto the device
    function, packed, pdl = compiled.function, compiled.packed_metadata, launcher.launch_pdl
    assert launcher.global_scratch_size == launcher.profile_scratch_size == 0, "no scratch memory is passed"
    if INSTALLED_MINOR == (3, 6):
        launch = launcher.launch
        if inspect.isfunction(launch):  # encodes tensor descriptors; only its closure knows the C launcher
            launch = _enclosed_launcher(launch)

        def start(stream, arguments):
            launch(*grid, stream, function, False, pdl, None, None, packed, None, None, None, *arguments)
    else:
        launch = triton.runtime.driver.active.utils.launch
        annotations, signature = launcher.arg_annotations, launcher.kernel_signature

        def start(stream, arguments):
            launch(*grid, stream, function, False, pdl, packed, None, None, None, None, None, annotations,
                   signature, arguments)  # fmt: skip

    return start


@lru_cache(maxsize=1024)  # reading a closure costs more than a launch, and many launches share a kernel
def _enclosed_launcher(launch: Any) -> Callable[..., None]:
    return inspect.getclosurevars(launch).nonlocals["launcher"]


def tensor_map_encoder() -> Callable[..., Any]:
    """Return the function (pointer, swizzle, element size, type, box, shape, strides, 0) -> TMA descriptor."""
    utils = triton.runtime.driver.active.utils
    return utils.fill_tma_descriptor if INSTALLED_MINOR == (3, 6) else utils.fill_tma_descriptor_tiled


def encoded_type(element_type: int) -> int:
    """Translate an element type in Triton's metadata to the CUDA driver's number."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST[element_type]


HOPPER_OPTIONS: dict[str, Any] = {"ptx_version": 88} if INSTALLED_MINOR >= (3, 9) else {}
"""Options with which Triton compiles the Hopper kernels, inside of `hopper_assembler`."""


@contextmanager
def hopper_assembler() -> Iterator[None]:
    """Compile for sm_90 with ptxas 12.9.

    Triton 3.9 ships this ptxas too but takes ptxas 13.4 for sm_90, which spills hundreds of bytes in the kernels of
    D = 64. Earlier minors take 12.8 or 12.9 anyway.
    """
    if INSTALLED_MINOR < (3, 9):
        yield
        return
    nvidia = triton.knobs.nvidia
    with nvidia.scope():
        nvidia.ptxas_blackwell = nvidia.ptxas.path  # in spite of its name, the ptxas from sm_90 on
        yield


@cache
def gluon_operations() -> SimpleNamespace:
    """Return the Gluon operations whose names depend on the minor. Imports Gluon.

    partition_barrier: waits for all warps of the partition that calls it, not for the whole CTA.
    tma_load, tma_store: TMA copies of a box, global to shared memory and back.
    tma_add: adds a box of shared memory to global memory (`cp.reduce.async.bulk.tensor.add`).
    """
    from triton._C.libtriton import ir
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import tma

    @builtin
    def tma_add(descriptor, coordinates, source, _semantic=None):
        # 3.6 and 3.7 do not export this operation for Hopper, so it is taken from the builder.
        coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)

    renamed = INSTALLED_MINOR >= (3, 8)
    return SimpleNamespace(
        partition_barrier=gl.thread_barrier if INSTALLED_MINOR == (3, 6) else gl.barrier,
        tma_load=tma.async_load if renamed else tma.async_copy_global_to_shared,
        tma_store=tma.async_store if renamed else tma.async_copy_shared_to_global,
        tma_add=tma_add,
    )


def _let_scalars_index() -> None:
    """Let loop bounds work in the interpreter of Triton 3.6, which holds a scalar as an array of one element and
    calls `int()` on it: NumPy 2.4 refuses that."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


if INTERPRETED and INSTALLED_MINOR == (3, 6):
    _let_scalars_index()
