"""What differs in Gluon between the Triton minors that the Hopper kernels support.

Gluon is Triton's explicit dialect and still moves between minors: 3.7 renamed `thread_barrier` to `barrier`. The TMA
reduction is not exported for Hopper by either, so the builder's own operation is wrapped here.
"""

from triton._C.libtriton import ir as triton_ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from lmkit.kernels.versions import INSTALLED_MINOR

# Waits for all warps of the partition that calls it (a warp group, or both of them), not for the whole block.
partition_barrier = gl.thread_barrier if INSTALLED_MINOR == (3, 6) else gl.barrier


@builtin
def tma_add_to_global(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory in the copy engine
    (`cp.reduce.async.bulk.tensor.add`)."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = triton_ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)
