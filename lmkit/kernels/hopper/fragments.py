"""Masks, sums and packing on the register fragments of a tensor-core accumulator.

A warp group holds a (64, N) accumulator so that a thread's columns are 8 j + 2 q + e, with q the thread's
place in its quad and j, e known at compile time. Splitting the columns that way makes masks compare with
immediates: only one value per row and thread is needed (a plain vector of column numbers cost 50 to 70
spilled registers).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def keep_columns_up_to(tile, last_column, fill: gl.constexpr):
    """`fill` where the column is beyond `last_column` (one number a row, may be negative)."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = tile.type.layout
    split = tile.reshape([rows, columns // 8, 4, 2])
    split_layout: gl.constexpr = split.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, split_layout)))
    j = gl.arange(0, columns // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, split_layout))))
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, split_layout))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, split_layout))))
    last = gl.convert_layout(last_column, row_layout)
    last = gl.expand_dims(gl.expand_dims(gl.expand_dims(last, 1), 2), 3)
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 2), 3)
    q = gl.expand_dims(gl.expand_dims(gl.expand_dims(q, 0), 1), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    split = gl.where(last - 2 * q >= 8 * j + e, split, fill)
    return gl.convert_layout(split.reshape([rows, columns]), layout)


@gluon.jit
def sum_within_threads(tile):
    """(rows, N) -> (rows, 4): each thread adds up its own columns, no shuffles; a later sum over axis 1
    finishes."""
    split = tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(split, 3), 1)


@gluon.jit
def scale_rows(tile, factor):
    """tile * factor, one factor a row."""
    layout: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    return tile * gl.expand_dims(gl.convert_layout(factor, layout), 1)


@gluon.jit
def pack_pairs(tile, dtype: gl.constexpr):
    """(rows, N) float32 -> (rows, N / 2) int32 of two rounded 16-bit numbers each, as the tensor cores want
    them.

    Carried across a branch or a loop as 16-bit numbers, the compiler takes them apart and together again
    (64 PRMT a step).
    """
    low, high = gl.split(tile.reshape([tile.shape[0], tile.shape[1] // 2, 2]))
    convert: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{convert}.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_pairs(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Back to (rows, N) of dtype in `layout`, in the same registers."""
    both = gl.join(packed, packed).reshape([packed.shape[0], 2 * packed.shape[1]])
    if dtype == gl.bfloat16:
        halves = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [both], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        halves = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [both], dtype=gl.float16, is_pure=True, pack=2
        )
    return gl.convert_layout(halves, layout)


@gluon.jit
def keep_columns_from(tile, first_column, fill: gl.constexpr):
    """`fill` where the column is before `first_column` (one number a row): keep_columns_up_to's mirror
    image."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = tile.type.layout
    split = tile.reshape([rows, columns // 8, 4, 2])
    split_layout: gl.constexpr = split.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, split_layout)))
    j = gl.arange(0, columns // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, split_layout))))
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, split_layout))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, split_layout))))
    first = gl.convert_layout(first_column, row_layout)
    first = gl.expand_dims(gl.expand_dims(gl.expand_dims(first, 1), 2), 3)
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 2), 3)
    q = gl.expand_dims(gl.expand_dims(gl.expand_dims(q, 0), 1), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    split = gl.where(first - 2 * q <= 8 * j + e, split, fill)
    return gl.convert_layout(split.reshape([rows, columns]), layout)


@gluon.jit
def multiply_half(half, tile, dtype: gl.constexpr):
    """float16 * float32 -> dtype with one rounding, in pairs. (Written with a cast, the compiler converts
    one element at a time on the special-function unit.)"""
    if dtype == gl.bfloat16:
        product = gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
            "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $3; cvt.rn.bf16x2.f32 $0, b, a; }",
            "=r,r,f,f",
            [half, tile],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        product = gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
            "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $3; cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,r,f,f",
            [half, tile],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    return product


@gluon.jit
def in_thread_order(tile):
    """(M, N) float32 accumulator -> (M N / 32, 32): the same numbers so that the four that a thread holds
    of a 16 x 8 patch lie together, and the 32 threads' side by side. Stored to shared memory that is 16
    bytes a thread without bank conflicts (in rows and columns it was an 8-way conflict, as long as the
    tensor cores' whole step). `finish_kernel` puts them back."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    patches = tile.reshape([rows // 16, 2, 8, columns // 8, 4, 2])
    return patches.permute((0, 3, 2, 4, 1, 5)).reshape([rows * columns // 32, 32])


@gluon.jit
def from_thread_order(tile, like):
    """What `in_thread_order` stored to shared memory, as a tensor shaped and laid out as `like`."""
    rows: gl.constexpr = like.shape[0]
    columns: gl.constexpr = like.shape[1]
    layout: gl.constexpr = in_thread_order(like).type.layout
    patches = tile.load(layout).reshape([rows // 16, columns // 8, 8, 4, 2, 2])
    return gl.convert_layout(patches.permute((0, 4, 2, 1, 3, 5)).reshape([rows, columns]), like.type.layout)


@gluon.jit
def exp2_unfused(scores, scale, reference):
    """2^(scores * scale - reference) with the product rounded before the subtraction: exactly 1 where reference
    is that rounded product.

    A fused multiply-add keeps the product's rounding error, 2^-24 of it, which is an exponent of 60 for
    scores of 1e9.
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
def rounded_sums_within_threads(packed, dtype: gl.constexpr, like):
    """`sum_within_threads`, in the layout of `like`, of the 16-bit numbers that `pack_pairs` packed."""
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&f,=f,r",
            [packed],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=&f,=f,r",
            [packed],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    sums = gl.sum((low + high).reshape([packed.shape[0], packed.shape[1] // 4, 4]), 1)
    return gl.convert_layout(sums, like.type.layout)
