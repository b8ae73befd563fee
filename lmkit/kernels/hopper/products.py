"""Tensor-core products as jobs: issued now, collected later with `warpgroup_mma_wait`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.constexpr_function
def accumulator_layout(columns, row_warps=4, column_warps=1):
    """How a product's float32 sums lie in registers: 16 rows and `columns` columns in each of
    row_warps x column_warps warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[row_warps, column_warps], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def operand_layout(accumulator):
    """How the 16-bit left operand of a product with this accumulator lies, when it comes from registers."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@gluon.jit
def issue_product(a, b, LAYOUT: gl.constexpr):
    """Issues a @ b into fresh registers. The zeros are never read; shared by two products they would be
    copied, which makes ptxas serialise everything (C7515)."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
