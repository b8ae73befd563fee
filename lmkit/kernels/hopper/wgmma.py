"""Issue wgmmas, asynchronous products on the tensor cores; `warpgroup_mma_wait` collects them later."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.constexpr_function
def accumulator_layout(columns, row_warps=4, column_warps=1):
    """Return how a product's float32 sums lie in registers: 16 rows and `columns` columns in each of row_warps x
    column_warps warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[row_warps, column_warps], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def operand_layout(accumulator):
    """Return how a 16-bit left operand in registers lies, for a product with this accumulator."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


@gluon.jit
def issue_product(a, b, LAYOUT: gl.constexpr):
    """Issue a @ b into fresh registers.

    The zeros are never read; if two products shared them they would be copied, and ptxas would serialise everything
    (C7515).
    """
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = b.shape[1]
    zeros = gl.zeros([rows, columns], gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.constexpr_function
def count_score_wgmmas(USED, D):
    """Return how many wgmma groups `issue_scores` issues, for waits on what was issued before it."""
    return 1 if USED == D else 2


@gluon.jit
def issue_scores(a, b, USED: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue a @ b^T, where a and b are (rows, D) with zeros from column USED on (see `support.used_of`).

    The zeros are left out: one product of the first half of the columns, one of the rest up to USED.
    `backward_dqdkdv_staggered` multiplies all columns instead, because it would spill more.
    """
    D: gl.constexpr = a.shape[1]
    if USED == D:
        job = issue_product(a, b.permute((1, 0)), LAYOUT)
    else:
        HALF: gl.constexpr = D // 2
        REST: gl.constexpr = USED - HALF
        job = issue_product(a.slice(0, HALF, 1), b.slice(0, HALF, 1).permute((1, 0)), LAYOUT)
        job = warpgroup_mma(
            a.slice(HALF, REST, 1), b.slice(HALF, REST, 1).permute((1, 0)), job, is_async=True
        )
    return job
