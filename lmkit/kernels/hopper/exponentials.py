"""exp2 for tiles of scores: on the special-function unit, partly on the FMA pipe, or with unfused rounding.

Hopper computes 16 exponentials a cycle and multiprocessor, and 4096 floating-point operations on the tensor cores: at
head_dim 64 both need the same time. Moving a share of the exponentials to polynomials on the FMA pipe evens
that out (FlashAttention-4, Section 3.2). The polynomial's error, 8e-5, hides behind the rounding of P to bf16, 4e-3.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 2^f on [-1/2, 1/2], degree 3, minimax.
_COEFFICIENTS = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105)
# Exponents are clamped to [LOWEST, LOWEST + SPAN]: one saturating FMA maps that range to [0, 1].
_LOWEST = -112.0
_SPAN = 192.0
# Adding 1.5 * 2^23 rounds to an integer, which then sits in the low bits of the mantissa.
_ROUND_TO_INTEGER = 12582912.0
# Which of eight consecutive register elements take the polynomial, spread so that both pipes interleave.
_POLYNOMIAL_POSITIONS = {1: (3,), 2: (2, 6), 3: (1, 4, 6), 4: (1, 3, 5, 7)}


def _hex(value):
    return "0f%08X" % struct.unpack("<I", struct.pack("<f", value))[0]


def _polynomial(exponent, result, source):
    """PTX for result = 2^exponent (names of f32 registers); `source`, the raw score, only passes its NaN on."""
    shifted = _hex(_ROUND_TO_INTEGER + _LOWEST)
    lines = [
        f"fma.rn.ftz.sat.f32 t, {exponent};",
        f"fma.rn.ftz.f32 x, t, {_hex(_SPAN)}, {shifted};",
        f"sub.rn.ftz.f32 w, {shifted}, x;",
        f"fma.rn.ftz.f32 t, t, {_hex(_SPAN)}, w;",
        # saturation turns NaN into 0; 0 * score brings a NaN (or an infinity: recomputed then) back
        f"fma.rn.ftz.f32 w, {source}, 0f00000000, {_hex(_COEFFICIENTS[0])};",
        f"mov.b32 p, {_hex(_COEFFICIENTS[3])};",
        f"fma.rn.ftz.f32 p, p, t, {_hex(_COEFFICIENTS[2])};",
        f"fma.rn.ftz.f32 p, p, t, {_hex(_COEFFICIENTS[1])};",
        "fma.rn.ftz.f32 p, p, t, w;",
        f"mov.b32 i, x; mov.b32 j, p; shl.b32 i, i, 23; add.s32 j, j, i; mov.b32 {result}, j;",
    ]
    return " ".join(lines)


def _mixed(eighths):
    """Operands: 8 results, then 8 scores, 8 negated references, 8 of them clamped-scaled, 8 scales, 8 clamped scales."""
    lines = ["{ .reg .f32 t, x, w, p; .reg .b32 i, j;"]
    for position in range(8):
        score, offset, offset_clamped, scale, scale_clamped = (f"${8 * group + position}" for group in range(1, 6))
        if position in _POLYNOMIAL_POSITIONS[eighths]:
            lines.append(_polynomial(f"{score}, {scale_clamped}, {offset_clamped}", f"${position}", score))
        else:
            lines.append(f"fma.rn.ftz.f32 t, {score}, {scale}, {offset}; ex2.approx.ftz.f32 ${position}, t;")
    return "\n".join([*lines, "}"])


_MIXED = {eighths: _mixed(eighths) for eighths in _POLYNOMIAL_POSITIONS}
_MIXED_CONSTRAINTS = ",".join(["=f"] * 8 + ["f"] * 40)


@gluon.constexpr_function
def _mixed_text(eighths):
    return _MIXED[eighths]


@gluon.constexpr_function
def _mixed_constraints():
    return _MIXED_CONSTRAINTS


@gluon.jit
def exp2_of_scores(scores, scale, reference, polynomial_eighths: gl.constexpr):
    """2^(scores * scale - reference), rows along axis 0; that many of every eight elements as polynomials."""
    if polynomial_eighths == 0:
        return gl.exp2(scores * scale - gl.expand_dims(reference, 1))
    else:
        layout: gl.constexpr = scores.type.layout
        zeros = gl.zeros([scores.shape[0], scores.shape[1]], gl.float32, layout)
        per_span: gl.constexpr = 1.0 / 192.0
        offset = zeros + gl.expand_dims(0.0 - reference, 1)
        offset_clamped = zeros + gl.expand_dims((112.0 - reference) * per_span, 1)
        return gl.inline_asm_elementwise(
            _mixed_text(polynomial_eighths),
            _mixed_constraints(),
            [scores, offset, offset_clamped, zeros + scale, zeros + scale * per_span],
            dtype=gl.float32,
            is_pure=True,
            pack=8,
        )


@gluon.jit
def exp2_of_scores_unfused(scores, scale, reference):
    """The same with scores * scale rounded before the subtraction: exactly 1 where reference is that rounded product.

    A fused multiply-add keeps the product's rounding error, 2^-24 of it, which is an exponent of 60 for scores of 1e9.
    """
    layout: gl.constexpr = scores.type.layout
    references = gl.zeros([scores.shape[0], scores.shape[1]], gl.float32, layout) + gl.expand_dims(reference, 1)
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $1, $2; sub.rn.f32 t, t, $3; ex2.approx.ftz.f32 $0, t; }",
        "=f,f,f,f",
        [scores, scale, references],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
