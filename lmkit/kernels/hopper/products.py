"""Tensor-core products as jobs: issued now, collected later with `warpgroup_mma_wait`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def issue_product(a, b, LAYOUT: gl.constexpr):
    """Issues a @ b into fresh registers. The zeros are never read; shared by two products they would be
    copied, which makes ptxas serialise everything (C7515)."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
