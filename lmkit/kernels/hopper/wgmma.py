"""Issue wgmmas, asynchronous products on the tensor cores; mask, sum and pack the fragments of their accumulators.

`warpgroup_mma_wait` collects products later. A warp group holds a (64, N) accumulator in registers so that a thread's
columns are 8 j + 2 q + e, where q is the thread's place in its quad and j and e are known at compile time. Splitting
the columns that way makes masks compare with immediates: they need one value per row and thread, where a plain vector
of column numbers would spill registers.
"""

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
    """Issue a @ b into fresh registers: if two products shared the zeros (which nobody reads), ptxas would copy them
    and serialise everything (C7515)."""
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
    """Issue a @ b^T, where a and b are (rows, D) with zeros from column USED on (see `forward.used_of`).

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


@gluon.jit
def hide_keys(scores, rows, first_key, num_keys, CAUSAL: gl.constexpr, TAIL: gl.constexpr):
    """Return scores with -inf where a query of `rows` (one number a row) must not see a column's key; column 0 is
    `first_key`. CAUSAL: keys after the query, and those past the end. TAIL: those past the end."""
    if CAUSAL:
        scores = keep_columns_up_to(scores, gl.minimum(rows, num_keys - 1) - first_key, -float("inf"))
    elif TAIL:
        scores = keep_columns_up_to(scores, rows * 0 + (num_keys - 1 - first_key), -float("inf"))
    return scores


@gluon.jit
def count_visible_keys(
    rows, first_key, num_keys, KEYS: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr
):
    """Return how many of the KEYS keys from `first_key` on a query of `rows` sees (none: 0 or less)."""
    if CAUSAL:
        return gl.minimum(gl.minimum(rows + 1, num_keys) - first_key, KEYS)
    if TAIL:
        return rows * 0 + (num_keys - first_key)
    return rows * 0 + KEYS


@gluon.jit
def keep_columns_up_to(tile, last_column, fill: gl.constexpr):
    """Return the tile with `fill` where the column is beyond `last_column` (one number a row, may be negative)."""
    split, last, column = _split_columns(tile, last_column)
    kept = gl.where(last >= column, split, fill)
    return gl.convert_layout(kept.reshape([tile.shape[0], tile.shape[1]]), tile.type.layout)


@gluon.jit
def keep_columns_from(tile, first_column, fill: gl.constexpr):
    """Return the tile with `fill` where the column is before `first_column` (one number a row)."""
    split, first, column = _split_columns(tile, first_column)
    kept = gl.where(first <= column, split, fill)
    return gl.convert_layout(kept.reshape([tile.shape[0], tile.shape[1]]), tile.type.layout)


@gluon.jit
def _split_columns(tile, bound):
    """Return (tile as (rows, N / 8, 4, 2), bound - 2 q, 8 j + e).

    `column <= bound` is 8 j + e <= bound - 2 q: an immediate against one number a row and thread.
    """
    split = tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2])
    layout: gl.constexpr = split.type.layout
    j = gl.arange(0, tile.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    bound = gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    bound = gl.expand_dims(gl.expand_dims(gl.expand_dims(bound, 1), 2), 3)
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 2), 3)
    q = gl.expand_dims(gl.expand_dims(gl.expand_dims(q, 0), 1), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    return split, bound - 2 * q, 8 * j + e


@gluon.jit
def sum_within_threads(tile):
    """Return (rows, 4) partial sums of (rows, N): each thread's own columns, without shuffles. A later sum over
    axis 1 finishes."""
    split = tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(split, 3), 1)


@gluon.jit
def rounding_of_largest(p, dtype: gl.constexpr, like):
    """Return what rounding to `dtype` adds to the largest of each thread's own numbers of a row.

    p: (rows, 64 or 128), none negative. The result is (rows, 4), in the layout of `like`. The numbers are compared
    as integers, which order as float32 does where nothing is negative: Hopper has a three-way maximum of integers.
    """
    rows: gl.constexpr = p.shape[0]
    columns: gl.constexpr = p.shape[1]
    rest, other = gl.split(p.to(gl.int32, bitcast=True).reshape([rows, columns // 8, 4, 2]))
    if columns == 128:
        rest, other = _largest_of_three(rest, other)
    rest, other = _largest_of_three(rest, other)
    rest, other = _largest_of_three(rest, other)
    rest, other = _largest_of_three(rest, other)
    largest = gl.maximum(rest, other).reshape([rows, 4]).to(gl.float32, bitcast=True)
    return gl.convert_layout(largest.to(dtype).to(gl.float32) - largest, like.type.layout)


@gluon.jit
def _largest_of_three(rest, other):
    """Halve (rows, n, 4) twice to (rows, n / 2, 4) twice, keeping the largest of each row and place."""
    a, b = _halves(rest)
    c, other = _halves(other)
    return gl.maximum(gl.maximum(a, b), c), other


@gluon.jit
def _halves(tile):
    """Split (rows, n, 4) into two (rows, n / 2, 4), within threads."""
    pairs = tile.reshape([tile.shape[0], tile.shape[1] // 2, 2, 4])
    return gl.split(pairs.permute((0, 1, 3, 2)))


@gluon.jit
def scale_rows(tile, factor):
    """Return tile * factor, with one factor a row."""
    layout: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    return tile * gl.expand_dims(gl.convert_layout(factor, layout), 1)


@gluon.jit
def exp2_unfused(scores, scale, reference):
    """Return 2^(scores * scale - reference), with the product rounded before the subtraction.

    So the result is exactly 1 where the reference is that rounded product. A fused multiply-add would keep the
    product's rounding error, 2^-24 of it, which for scores of 1e9 is an exponent of 60.
    """
    layout: gl.constexpr = scores.type.layout
    references = gl.zeros([scores.shape[0], scores.shape[1]], gl.float32, layout) + gl.expand_dims(
        reference, 1
    )
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $1, $2; sub.rn.f32 t, t, $3; ex2.approx.ftz.f32 $0, t; }",
        "=f,f,f,f",
        [scores, scale, references],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pack_pairs(tile, dtype: gl.constexpr):
    """Round (rows, N) float32 to (rows, N / 2) int32 of two 16-bit numbers each, as wgmma wants them. A branch or
    loop that carries 16-bit numbers would make the compiler take them apart and put them together again."""
    low, high = _pairs(tile)
    convert: gl.constexpr = _pair_type(dtype)
    return gl.inline_asm_elementwise(
        f"cvt.rn.{convert}.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _pairs(tile):
    """Split (rows, N) into the even and the odd columns, within threads."""
    return gl.split(tile.reshape([tile.shape[0], tile.shape[1] // 2, 2]))


@gluon.constexpr_function
def _pair_type(dtype):
    """Return what PTX calls two numbers of this type in one register."""
    return "bf16x2" if dtype == gl.bfloat16 else "f16x2"


@gluon.jit
def unpack_pairs(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo `pack_pairs`: return (rows, N) of dtype in `layout`, in the same registers."""
    both = gl.join(packed, packed).reshape([packed.shape[0], 2 * packed.shape[1]])
    halves = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [both], dtype=dtype.value, is_pure=True, pack=2
    )
    return gl.convert_layout(halves, layout)


@gluon.jit
def keep_pairs(tile, dtype: gl.constexpr):
    """Keep the bits of (rows, N) float32, none negative, that `pack_pairs` rounds away, for `multiply_pairs`.

    The result is (rows, N / 2) int32: a register a pair, where the tile itself takes two. bfloat16: the number of
    the odd column, its last byte replaced by the third byte of the even column's. float16: the number of the even
    column.
    """
    low, high = _pairs(tile)
    if dtype == gl.bfloat16:
        kept = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $1, 0x3215;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        kept = low.to(gl.int32, bitcast=True)
    return kept


@gluon.jit
def multiply_pairs(packed, kept, tile, dtype: gl.constexpr):
    """Multiply a packed tile by `tile`, (rows, N) float32; round once to `dtype` and pack.

    `packed` and `kept` are what `pack_pairs` and `keep_pairs` made of the first factor. bfloat16: 24 of the 32 bits
    of its numbers count. float16: all bits of the even columns, the 16 rounded bits of the odd ones.
    """
    low, high = _pairs(tile)
    convert: gl.constexpr = _pair_type(dtype)
    take_apart: gl.constexpr = _take_apart(dtype)
    return gl.inline_asm_elementwise(
        f"{{ {take_apart} mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $4; cvt.rn.{convert}.f32 $0, b, a; }}",
        "=r,r,r,f,f",
        [packed, kept, low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _take_apart(dtype):
    """Return PTX that puts the even column's number into float32 register a and the odd one's into b, from $1
    (packed) and $2 (kept).

    bfloat16: the kept byte goes behind a's upper half as a signed one, because that half was rounded to nearest. (At
    an exact tie a may be off by a unit of that half: one number in 130,000.) b keeps it as its last byte, where it
    does no harm.
    """
    if dtype == gl.bfloat16:
        return (
            ".reg .b32 s, t; .reg .f32 a, b; prmt.b32 t, $2, 0, 0x8804; shl.b32 s, $1, 16; add.u32 s, s, t; "
            "mov.b32 a, s; mov.b32 b, $2;"
        )
    return ".reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; mov.b32 a, $2; cvt.f32.f16 b, h;"


@gluon.jit
def in_thread_order(tile):
    """Reorder an (M, N) float32 accumulator to (M N / 32, 32), so that a thread's numbers lie together.

    The four that a thread holds of a 16 x 8 patch lie together, and the 32 threads' side by side: stored to shared
    memory, 16 bytes a thread without bank conflicts, where rows and columns would conflict 8 ways.
    `from_thread_order` and `backward.finish_kernel` put them back.
    """
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    patches = tile.reshape([rows // 16, 2, 8, columns // 8, 4, 2])
    return patches.permute((0, 3, 2, 4, 1, 5)).reshape([rows * columns // 32, 32])


@gluon.jit
def from_thread_order(tile, like):
    """Load what `in_thread_order` stored to shared memory, as a tensor shaped and laid out as `like`."""
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    layout: gl.constexpr = in_thread_order(like).type.layout
    patches = tile.load(layout).reshape([rows // 16, columns // 8, 8, 4, 2, 2])
    return gl.convert_layout(patches.permute((0, 4, 2, 1, 3, 5)).reshape([rows, columns]), like.type.layout)


@gluon.jit
def left_and_right(tile):
    """Split (rows, N) into the first and the last columns, within threads."""
    halves = tile.reshape([tile.shape[0], 2, tile.shape[1] // 2])
    return gl.split(halves.permute((0, 2, 1)))


@gluon.jit
def inside(valid, columns, HEAD_DIM: gl.constexpr):
    """Return which elements (rows, N) are in a valid row and in the first HEAD_DIM columns."""
    kept = gl.expand_dims(valid, 1)
    if columns.shape[0] > HEAD_DIM:
        kept = kept & gl.expand_dims(columns < HEAD_DIM, 0)
    return kept
