"""FlashAttention in Triton: dispatch, autograd and torch.compile around the kernels of `lmkit.kernels`.

Two implementations stand behind the name. "hopper" is written for one chip (sm_90) and serves the shapes that
`lmkit.kernels.hopper` supports; "portable" runs everywhere from sm_80 on, with every shape, and in Triton's
interpreter on a CPU. `implementation_for` says which one a call would take.

Eager calls go through an `autograd.Function`. Under torch.compile the same two steps are custom operators,
opaque to the compiler: no graph break.
"""

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lmkit.attention.inputs import SECOND_DERIVATIVES, prepare_inputs, zeros_like_queries
from lmkit.autograd import differentiable_once
from lmkit.errors import UsageError
from lmkit.registry import ATTENTION

try:
    from lmkit.kernels.flash.backward import flash_backward
    from lmkit.kernels.flash.forward import flash_forward
    from lmkit.kernels.launch import empty_in_order_of
    from lmkit.kernels.versions import INTERPRETED
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "triton":
        raise
    raise UsageError(
        "flash_triton needs Triton, which is not installed",
        hint="pip install triton (Linux), or choose flash_torch, vectorized or sdpa",
    ) from error

Implementation = Literal["auto", "portable", "hopper"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256


@ATTENTION.register(
    "flash_triton",
    order=4,
    aliases=("flash_attention_triton",),
    requires=("triton",),
    devices=("cuda",),
    check="refuse_unsupported",
    implementation="implementation_for",
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
    implementation: Implementation = "auto",
    deterministic: bool | None = None,
    fp32_precision: Literal["bf16x6", "ieee", "tf32"] = "bf16x6",
) -> Tensor:
    """Exact attention in one pass over the keys, memory linear in the sequence lengths, forward and backward.

    Inputs are read where they lie (views of a fused projection too); only an innermost stride other than 1 costs
    a copy. See `lmkit.attention` for shapes and conventions.

    Args:
        implementation: "auto" takes "hopper" where it applies, else "portable". A forced name never falls back.
        deterministic: whether the backward pass gives the same bits on every run (the portable one always does);
            None follows `torch.use_deterministic_algorithms`.
        fp32_precision: how float32 inputs are multiplied. "bf16x6": every value as the sum of three bfloat16, the six
            largest of their nine products on tensor cores; as exact as "ieee", which multiplies float32 by
            float32, and several times faster. "tf32": 10 bits of mantissa, faster again.

    Raises:
        UsageError: this head_dim, dtype or device is not supported, or a forced implementation cannot run.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    refuse_unsupported(q)
    if q.numel() == 0 or k.numel() == 0:
        return zeros_like_queries(q, k, v)
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels mask and take the maximum before they scale
    q, k, v = rows_in_place(q), rows_in_place(k), rows_in_place(v)
    if q.dtype != torch.float32:
        fp32_precision = "ieee"  # one way to multiply, hence one compiled kernel
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling():
        return forward_operator(q, k, v, causal, scale, implementation, deterministic, fp32_precision)[0]
    name = resolve(implementation, q, k, v)
    return FlashAttention.apply(q, k, v, (causal, scale, name, deterministic, fp32_precision))[0]


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability. Asked for once in eager calls: torch asks the driver each time, for microseconds."""
    if torch.compiler.is_compiling():  # the compiler traces torch's function, and warns of caches
        return torch.cuda.get_device_capability(device)
    return _known_capability(device)


_known_capability = cache(torch.cuda.get_device_capability)


def implementation_for(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The implementation that `flash_triton` would run on these inputs: "hopper" or "portable"."""
    return "portable" if hopper_refusal(q, k, v) else "hopper"


def hopper_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Hopper kernels cannot take this call; None if they can."""
    if not q.is_cuda:
        return "the tensors are not on a CUDA device"
    capability = capability_of(q.device)
    if capability != (9, 0):
        return "the device is sm_{}{}, not sm_90".format(*capability)
    return hopper_kernels().unsupported_reason(q, k, v)


@cache
def hopper_kernels() -> Any:
    """`lmkit.kernels.hopper`. Gluon costs its import only on the chip that it is written for."""
    from lmkit.kernels import hopper

    return hopper


def resolve(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Turns "auto" into a name; refuses a forced one that cannot run."""
    if implementation == "portable":
        return implementation
    reason = hopper_refusal(q, k, v)
    if implementation == "auto":
        return "portable" if reason else "hopper"
    if implementation != "hopper":
        raise UsageError(
            f"flash_triton has no implementation {implementation!r}", hint="there are: auto, portable, hopper"
        )
    if reason:
        raise UsageError(
            f"flash_triton: the hopper implementation cannot run: {reason}",
            hint="'auto' falls back",
        )
    return implementation


def refuse_unsupported(q: Tensor) -> None:
    """Raises UsageError unless the portable kernels can take q's dtype, head_dim and device."""
    supported = (
        f"supported: head_dim 1 to {LARGEST_HEAD_DIM}; float32, float16, bfloat16; NVIDIA GPUs from sm_80 on"
    )
    if q.dtype not in DTYPES:
        raise UsageError(f"flash_triton: {q.dtype} is not supported", hint=supported)
    if not 1 <= q.shape[3] <= LARGEST_HEAD_DIM:
        raise UsageError(f"flash_triton: head_dim {q.shape[3]} is not supported", hint=supported)
    if INTERPRETED:
        if q.dtype == torch.bfloat16:
            raise UsageError(
                "flash_triton: Triton's interpreter computes bfloat16 products wrongly",
                hint="use float32 or float16",
            )
    elif not q.is_cuda:
        raise UsageError(
            f"flash_triton: device {q.device.type} is not supported",
            hint=supported + "; TRITON_INTERPRET=1 runs it slowly on a CPU; or choose flash_torch or sdpa",
        )
    elif capability_of(q.device) < (8, 0):
        raise UsageError(f"flash_triton: {torch.cuda.get_device_name(q.device)} is too old", hint=supported)


def rows_in_place(x: Tensor) -> Tensor:
    """x itself if its rows are contiguous, else a copy."""
    return x if x.stride()[3] == 1 else x.contiguous()


# The two steps, and the two ways to reach them. Arguments after the tensors:
# causal, scale, implementation, deterministic, fp32_precision.


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    implementation: str,
    deterministic: bool,
    fp32_precision: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by a resolved implementation."""
    if implementation == "hopper":
        return hopper_kernels().forward(q, k, v, causal=causal, scale=scale)
    return flash_forward(q, k, v, causal=causal, scale=scale, precision=fp32_precision)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    implementation: str,
    deterministic: bool,
    fp32_precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by a resolved implementation."""
    if implementation == "hopper":
        return hopper_kernels().backward(
            dout, q, k, v, out, lse, causal=causal, scale=scale, deterministic=deterministic
        )
    return flash_backward(dout, q, k, v, out, lse, causal=causal, scale=scale, precision=fp32_precision)


def save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """What the backward pass needs: q, k, v, out, the log-sum-exp and the options."""
    q, k, v, *options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # or autograd would fill a gradient of lse with zeros
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.options = options


class FlashAttention(torch.autograd.Function):
    """The eager road: launches the kernels directly."""

    # One method with ctx, not `forward` beside `setup_context`: that would bind the signature anew in every call,
    # which costs more host time than the launch.
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple) -> tuple[Tensor, Tensor]:
        inputs = (q, k, v, *options)  # `apply` looks at each of its arguments: all options count as one
        output = forward(*inputs)
        save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    @differentiable_once("flash_triton", instead=SECOND_DERIVATIVES)
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = backward(rows_in_place(grads[0]), *saved, *ctx.options)
        return dq, dk, dv, None


# The compiled road: the two steps as operators, opaque to the compiler, that resolve the implementation when they
# run. Defined by schema: `torch.library.custom_op` would look for aliases in every call, 11 us of the host.
_OPTIONS = "bool causal, float scale, str implementation, bool deterministic, str fp32_precision"
_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")  # goes with the module, which may be loaded again
_LIBRARY.define(f"flash_attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "flash_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
forward_operator = torch.ops.lmkit.flash_attention_forward.default
backward_operator = torch.ops.lmkit.flash_attention_backward.default


@torch.library.impl(_LIBRARY, "flash_attention_forward", "CompositeExplicitAutograd")
def resolve_and_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    implementation: str,
    deterministic: bool,
    fp32_precision: str,
) -> tuple[Tensor, Tensor]:
    name = resolve(implementation, q, k, v)
    return forward(q, k, v, causal, scale, name, deterministic, fp32_precision)


@torch.library.register_fake("lmkit::flash_attention_forward", lib=_LIBRARY)
def forward_shapes(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return empty_in_order_of(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl(_LIBRARY, "flash_attention_backward", "CompositeExplicitAutograd")
def resolve_and_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    implementation: str,
    deterministic: bool,
    fp32_precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    name = resolve(implementation, q, k, v)
    return backward(dout, q, k, v, out, lse, causal, scale, name, deterministic, fp32_precision)


@torch.library.register_fake("lmkit::flash_attention_backward", lib=_LIBRARY)
def backward_shapes(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v)


@differentiable_once("flash_triton", instead=SECOND_DERIVATIVES)
def backward_of_operator(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = backward_operator(rows_in_place(grads[0]), *saved, *ctx.options)
    return dq, dk, dv, None, None, None, None, None


torch.library.register_autograd(
    "lmkit::flash_attention_forward", backward_of_operator, setup_context=save_for_backward, lib=_LIBRARY
)
