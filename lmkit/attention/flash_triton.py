"""FlashAttention in Triton: dispatch, autograd and torch.compile around the kernels of `lmkit.kernels`.

The kernel has two implementations. "hopper" is written for sm_90 and supports the shapes that `lmkit.kernels.hopper`
lists; "portable" runs from sm_80 on, with every shape, and in Triton's interpreter on a CPU. `implementation_for`
says which of them a call runs.

Eager calls use an `autograd.Function`. Under torch.compile, forward and backward are custom operators, opaque to the
compiler, so that they do not break the graph.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmkit.core.attention import (
    SECOND_DERIVATIVES,
    check_first,
    prepare_inputs,
    reference,
    zeros_like_queries,
)
from lmkit.core.autograd import differentiable_once, is_transformed
from lmkit.errors import UsageError
from lmkit.kernels.flash.backward import flash_backward
from lmkit.kernels.flash.forward import flash_forward
from lmkit.kernels.launch import capability
from lmkit.kernels.operators import define_attention
from lmkit.kernels.versions import INTERPRETED
from lmkit.registry import ATTENTION

Implementation = Literal["auto", "portable", "hopper"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256


@ATTENTION.register(
    "flash_triton",
    order=4,
    aliases=("flash_attention_triton",),
    requires=("triton",),
    devices=("cuda",),
    windows=True,
    check="refuse_unsupported",
    implementation="implementation_for",
    fallback="hopper_refusal",
    joined="lmkit.attention.flash_triton:flash_triton_joined",
    variants={
        "portable": {"implementation": "portable"},
        "hopper": {"implementation": "hopper"},
        "deterministic": {"deterministic": True},
        "tf32": {"fp32_precision": "tf32"},
    },
)
def flash_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    first: Tensor | None = None,
    implementation: Implementation = "auto",
    deterministic: bool | None = None,
    fp32_precision: Literal["bf16x6", "ieee", "tf32"] = "bf16x6",
) -> Tensor:
    """Compute exact attention in one pass over the keys, in memory linear in the sequence lengths.

    Strided inputs (views of a fused projection) are read in place; only an innermost stride other than 1 needs a
    copy. See `lmkit.attention` for shapes and conventions.

    Args:
        first: tiles that it hides are skipped.
        implementation: "auto" takes "hopper" where it is supported, else "portable". A named one never falls back.
        deterministic: whether the backward pass gives the same bits on every run (the portable one always does);
            None follows `torch.use_deterministic_algorithms`.
        fp32_precision: how float32 inputs are multiplied. "ieee" multiplies float32 by float32. "bf16x6" splits every
            value into three bfloat16 and computes the six largest of their nine products on tensor cores: as exact,
            and faster. "tf32" keeps 10 bits of mantissa and is faster again.

    Raises:
        UsageError: this head_dim, dtype or device is not supported, or the named implementation cannot run.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    refuse_unsupported(q)
    if is_transformed():
        return reference(q, k, v, causal=causal, scale=scale, first=first)
    if q.numel() == 0 or k.numel() == 0:
        return zeros_like_queries(q, k, v)
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels mask and take the maximum before they scale
    q, k, v = rows_in_place(q), rows_in_place(k), rows_in_place(v)
    if q.dtype != torch.float32:
        fp32_precision = "ieee"  # the only way to multiply other dtypes; one value, hence one compiled kernel
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if first is not None:
        first = first_as_read(q, k, first, causal)
    given = (causal, scale, implementation, deterministic, fp32_precision, first)
    if torch.compiler.is_compiling():
        return operator(q, k, v, *given)[0]
    options = Options(*given)._replace(implementation=resolve(implementation, q, k, v))
    return FlashAttentionTriton.apply(q, k, v, options)[0]


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, from a cache unless torch.compile traces this call: it warns of caches."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    return capability(device)


def implementation_for(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the implementation that `flash_triton` runs on these inputs: "hopper" or "portable"."""
    return "portable" if hopper_refusal(q, k, v) else "hopper"


def hopper_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the Hopper kernels do not support this call, or None if they do."""
    if not q.is_cuda:
        return "the tensors are not on a CUDA device"
    if capability_of(q.device) != (9, 0):
        return "the device is sm_{}{}, not sm_90".format(*capability_of(q.device))
    return hopper_kernels().unsupported_reason(q, k, v)


@cache
def hopper_kernels() -> Any:
    """Import `lmkit.kernels.hopper`, which imports Gluon, on the first call that needs it."""
    from lmkit.kernels import hopper

    return hopper


def resolve(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Turn "auto" into a name; raise UsageError for a named implementation that cannot run."""
    if implementation == "auto":
        return implementation_for(q, k, v)
    if implementation not in ("portable", "hopper"):
        message = f"flash_triton has no implementation {implementation!r}"
        hint = "there are: auto, portable, hopper"
        raise UsageError("attention.unknown_implementation", message, hint=hint)
    if implementation == "hopper" and (reason := hopper_refusal(q, k, v)):
        message = f"flash_triton: the hopper implementation cannot run: {reason}"
        raise UsageError("attention.unsupported", message, hint="use 'auto', which falls back to 'portable'")
    return implementation


def first_as_read(q: Tensor, k: Tensor, first: Tensor | None, causal: bool) -> Tensor | None:
    """Return `first`, checked, as the kernels read it: (batch, num_queries) int32, contiguous."""
    if first is None:
        return None
    check_first(q, k, first, causal)
    return first.to(torch.int32).expand(len(q), -1).contiguous()


def refuse_unsupported(q: Tensor) -> None:
    """Raise UsageError unless the portable kernels support q's dtype, head_dim and device."""
    supported = (
        f"supported: head_dim 1 to {LARGEST_HEAD_DIM}; float32, float16, bfloat16; NVIDIA GPUs from sm_80 on"
    )
    wrong = ""
    if q.dtype not in DTYPES:
        wrong = f"{q.dtype} is not supported"
    elif not 1 <= q.shape[3] <= LARGEST_HEAD_DIM:
        wrong = f"head_dim {q.shape[3]} is not supported"
    elif INTERPRETED:
        if q.dtype == torch.bfloat16:
            wrong = "Triton's interpreter computes bfloat16 products wrongly"
            supported = "use float32 or float16"
    elif not q.is_cuda:
        wrong = f"device {q.device.type} is not supported"
        supported += "; TRITON_INTERPRET=1 runs it slowly on a CPU; or choose flash_torch or sdpa"
    elif capability_of(q.device) < (8, 0):
        wrong = f"{torch.cuda.get_device_name(q.device)} is too old"
    if wrong:
        raise UsageError("attention.unsupported", f"flash_triton: {wrong}", hint=supported)


def rows_in_place(x: Tensor) -> Tensor:
    """Return x itself if its rows are contiguous, else a copy."""
    return x if x.stride()[3] == 1 else x.contiguous()


class Options(NamedTuple):
    """The options of a call, in the order in which the operators take them."""

    causal: bool
    scale: float
    implementation: str
    deterministic: bool
    fp32_precision: str
    first: Tensor | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return (out, lse) from a resolved implementation; lse is (batch, heads, num_queries)."""
    causal, scale, implementation, _, precision, first = options
    if implementation == "hopper":
        return hopper_kernels().forward(q, k, v, causal=causal, scale=scale, first=first)
    return flash_forward(q, k, v, causal=causal, scale=scale, precision=precision, first=first)


def backward(
    dout: Tensor, *saved: Tensor, options: Options, into: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) from a resolved implementation; `saved` are q, k, v, out, lse.

    Args:
        into: tensors that receive the gradients.
    """
    causal, scale, implementation, deterministic, precision, first = options
    if implementation == "hopper":
        run = partial(hopper_kernels().backward, deterministic=deterministic)
    else:
        run = partial(flash_backward, precision=precision)
    return run(dout, *saved, causal=causal, scale=scale, into=into, first=first)


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, causal)` returns (out, log-sum-exp): the kernels with their gradient.

    Saves q, k, v, the output and the log-sum-exp of every row, (batch, heads, num_queries). `flash_triton`, which
    also checks its inputs, passes resolved `Options` in place of `causal`.
    """

    # One method with ctx instead of `forward` and `setup_context`, which would bind the signature in every call:
    # that takes the host longer than the launch. `apply` inspects each of its arguments: hence one for all options.
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options | bool = False
    ) -> tuple[Tensor, Tensor]:
        if isinstance(options, bool):
            _, _, _, scale = prepare_inputs(q, k, v, None)
            options = Options(options, scale, resolve("auto", q, k, v), False, "bf16x6")
        ctx.options = options
        out, lse = forward(q, k, v, options)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of lse
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once("flash_triton", instead=SECOND_DERIVATIVES)
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(rows_in_place(grads[0]), *saved, options=ctx.options), None


# The heads of a joined projection q|k|v, whose gradient is one array, too: nothing is concatenated.


def flash_triton_joined(
    qkv: Tensor, *, kv_heads: int, head_dim: int, causal: bool = True, first: Tensor | None = None
) -> Tensor:
    """Compute `flash_triton` of the heads of a projection.

    Args:
        qkv: (batch, seq, (heads + 2 kv_heads) * head_dim)
        kv_heads: of k, and of v.
        first: as of `flash_triton`.

    Returns:
        (batch, seq, heads * head_dim)

    Raises:
        UsageError: this head_dim, dtype or device is not supported.
    """
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    q, k, v = heads_of(qkv, kv_heads, head_dim)
    if torch.compiler.is_compiling() or qkv.numel() == 0:
        out = flash_triton(q, k, v, causal=causal, first=first)
    else:
        refuse_unsupported(q)
        deterministic = torch.are_deterministic_algorithms_enabled()
        precision = "bf16x6" if q.dtype == torch.float32 else "ieee"
        implementation = implementation_for(q, k, v)
        first = first_as_read(q, k, first, causal)
        options = Options(causal, head_dim**-0.5, implementation, deterministic, precision, first)
        out = JoinedAttention.apply(qkv, (kv_heads, head_dim, options))[0]
    return out.transpose(1, 2).flatten(2)


def heads_of(qkv: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim)."""
    heads = qkv.unflatten(-1, (-1, head_dim))  # (batch, seq, heads + 2 kv_heads, head_dim)
    # Split before they are transposed: autograd concatenates the gradients as they lie in qkv.
    q, k, v = heads.split((heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class JoinedAttention(torch.autograd.Function):
    """`apply(qkv, (kv_heads, head_dim, options))` returns (out, log-sum-exp)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, options: tuple[int, int, Options]) -> tuple[Tensor, Tensor]:
        kv_heads, head_dim, how = ctx.options = options
        out, lse = forward(*heads_of(qkv, kv_heads, head_dim), how)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of lse
        ctx.save_for_backward(qkv, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once("flash_triton_joined", instead=SECOND_DERIVATIVES)
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor, None]:
        qkv, out, lse = saved
        kv_heads, head_dim, how = ctx.options
        grad = qkv.new_empty(qkv.shape)
        heads, into = heads_of(qkv, kv_heads, head_dim), heads_of(grad, kv_heads, head_dim)
        backward(rows_in_place(grads[0]), *heads, out, lse, options=how, into=into)
        return grad, None


# The operator for torch.compile resolves the implementation when it runs.


def resolved(q: Tensor, k: Tensor, v: Tensor, options: Sequence[Any]) -> Options:
    """Return the options of an operator with the name of the implementation that runs."""
    given = Options(*options)
    return given._replace(implementation=resolve(given.implementation, q, k, v))


_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")
operator = define_attention(
    _LIBRARY,
    "flash_attention",
    "bool causal, float scale, str implementation, bool deterministic, str fp32_precision, Tensor? first=None",
    lambda q, k, v, *options: forward(q, k, v, resolved(q, k, v, options)),
    lambda dout, q, k, v, out, lse, *options: backward(
        rows_in_place(dout), q, k, v, out, lse, options=resolved(q, k, v, options)
    ),
)
