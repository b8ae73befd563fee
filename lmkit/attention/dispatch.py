"""Call an attention kernel by name, or the best one for the inputs."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmkit.core.attention import first_in_window, reference
from lmkit.errors import UsageError
from lmkit.plugins import wrong_result
from lmkit.registry import ATTENTION, Registry

LARGEST_ERROR = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Of a plugin's kernel, relative to float64: room for products in TF32, and for scores rounded to 16 bits."""
PREFERRED = ("flash_triton", "sdpa")
"""What `kernel="auto"` tries, in this order; the last one runs everywhere."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    kernel: str = "auto",
    **options: Any,
) -> Tensor:
    """Return softmax(q k^T * scale) v ("Attention Is All You Need", eq. 1).

    >>> q = k = v = torch.randn(2, 5, 8)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 5, 8])
    >>> mask = torch.tensor([True, True, False, False, False])
    >>> out = attention(q, k, v, mask=mask, kernel="reference")

    Args:
        q: (batch, heads, num_queries, head_dim), or (batch, num_queries, head_dim) for one head.
        k, v: (batch, kv_heads, num_keys, head_dim), or (batch, num_keys, head_dim).
        causal: query i sees only the keys j <= i.
        mask: booleans, True where a query may see a key; broadcasts to (batch, heads, num_queries, num_keys), without
            heads where q has none. Taken by `reference`, `vectorized` and `sdpa`.
        scale: multiplies the scores; None means head_dim ** -0.5.
        kernel: a registered name; "auto" takes `flash_triton` where it supports the inputs, else `sdpa`.
        options: further keyword arguments of the kernel.

    Returns:
        A tensor shaped as q.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
        TypeError: `causal` is a tensor, such as a mask.
        UsageError: the kernel is unknown or not installed, does not take a mask, or does not support the inputs.
    """
    if isinstance(causal, Tensor):
        raise TypeError("causal must be True or False; give booleans of a mask as mask=")
    if q.dim() == 3 and k.dim() == 3 and v.dim() == 3:
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (batch, 1, num_queries, num_keys)
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)  # (batch, 1, seq, head_dim)
        return attention(q, k, v, causal, mask, scale, kernel=kernel, **options).squeeze(1)
    name = best_kernel(q, mask) if kernel == "auto" else ATTENTION.entry(kernel).name
    function = attention_function(name)
    if mask is None:
        return function(q, k, v, causal=causal, scale=scale, **options)
    if not ATTENTION.facts(name).masks:
        hint = "use " + " or ".join(name for name in ATTENTION.names if ATTENTION.facts(name).masks)
        raise UsageError("attention.no_mask", f"attention kernel {name} does not take a mask", hint=hint)
    return function(q, k, v, causal=causal, scale=scale, mask=mask, **options)


def attention_function(name: str) -> Callable[..., Tensor]:
    """Return the attention kernel of this name or alias; that of a plugin with a check of what it returns.

    Raises:
        UsageError: no kernel has this name, or it needs a package that is not installed.
    """
    function: Callable[..., Tensor] = ATTENTION.load(name)
    return function if function.__module__.startswith("lmkit.") else _Checked(name, function)


class _Checked:
    """A plugin's kernel: what its first call returns is checked; in a compiled model, when the call is traced."""

    def __init__(self, name: str, function: Callable[..., Any], *, is_joined: bool = False) -> None:
        self._name, self._function, self._is_joined = name, function, is_joined
        self._is_checked = False

    def __call__(self, q: Tensor, *others: Tensor, **options: Any) -> Any:
        out = self._function(q, *others, **options)
        # In this order a graph depends on no state, and is traced once.
        if torch.compiler.is_compiling() or not self._is_checked:
            width = 2 * options["kv_heads"] * options["head_dim"] if self._is_joined else 0
            self._check(out, q, (*q.shape[:-1], q.shape[-1] - width))
            if not torch.compiler.is_compiling():
                self._is_checked = True
        return out

    def _check(self, out: Any, q: Tensor, shape: Sequence[int]) -> None:
        found = type(out).__name__
        if isinstance(out, Tensor):
            # Under autocast, matrix products have another dtype than what goes in.
            is_right = out.dtype == q.dtype or torch.is_autocast_enabled(q.device.type)
            if is_right and out.shape == shape and out.device == q.device:
                return
            found = f"{tuple(out.shape)} in {out.dtype} on {out.device}"
        raise wrong_result(ATTENTION, self._name, f"{found}, not {tuple(shape)} in {q.dtype} on {q.device}")


def joined_function(name: str) -> Callable[..., Tensor] | None:
    """Return the kernel's function on a joined projection (see `KernelFacts.joined`); None if it has none."""
    where = ATTENTION.facts(name).joined
    if where is None:
        return None
    attention_function(name)  # refuses if a package is not installed
    try:
        function: Callable[..., Tensor] = pkgutil.resolve_name(where)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"attention kernel {name!r}: its fact joined names no function: {error}"
        raise UsageError("registry.no_function", message, hint='joined = "module:function"') from error
    return function if function.__module__.startswith("lmkit.") else _Checked(name, function, is_joined=True)


def check_kernel(name: str, q: Tensor) -> None:
    """Check that a kernel runs on tensors like q (batch, heads, seq, head_dim): their dtype, head_dim and device.

    Raises:
        UsageError: it does not, or it needs a package that is not installed.
    """
    attention_function(name)
    check = ATTENTION.facts(name).check
    if check is not None:
        ATTENTION.function_of(name, check)(q)


def check_values(name: str, qkv: Tensor, kv_heads: int, head_dim: int) -> None:
    """Compare a plugin's kernel, and its function on a joined projection, with `reference` before it trains a model:
    outputs and gradients, and outputs under `no_grad`.

    Kernels of lmkit and kernels that do not see all keys are not compared.

    Args:
        qkv: random numbers (batch, seq, (heads + 2 kv_heads) * head_dim), in the dtype and on the device of training.

    Raises:
        LmkitError: outputs or gradients are wrong.
    """
    function, facts = ATTENTION.load(name), ATTENTION.facts(name)
    if function.__module__.startswith("lmkit.") or not facts.sees_all:
        return

    def on_heads(kernel: Callable[..., Tensor], qkv: Tensor, **options: Any) -> Tensor:
        # (batch, heads + 2 kv_heads, seq, head_dim)
        heads = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        return kernel(q, k, v, causal=True, **options).transpose(1, 2).flatten(2)

    def results(compute: Callable[[Tensor], Tensor], qkv: Tensor) -> tuple[Tensor, ...]:
        given = qkv.detach().requires_grad_()
        with torch.enable_grad():
            out = compute(given)
            if not out.requires_grad:
                raise wrong_result(ATTENTION, name, "a tensor without a gradient")
            # Squares: a gradient that is equal everywhere hides errors.
            (gradient,) = torch.autograd.grad(out.square().sum(), given, materialize_grads=True)
        with torch.no_grad():  # as in evaluation; twice, because a kernel may remember its first call
            evaluated = torch.cat([compute(qkv), compute(qkv.flip(0)).flip(0)])
        return out.detach().double(), gradient.double(), evaluated.double()

    cases: list[dict[str, Any]] = [{}]
    if facts.windows:
        cases.append({"first": first_in_window(7, qkv.shape[1], qkv.device)})
    joined = joined_function(name)
    for options in cases:
        exact = results(partial(on_heads, reference, **options), qkv.double())
        forms = {"": partial(on_heads, attention_function(name), **options)}
        if joined is not None:
            joint = partial(joined, kv_heads=kv_heads, head_dim=head_dim, **options)
            forms[" of a joined projection"] = joint
        for form, compute in forms.items():
            kinds = "attention", "gradients", "attention under no_grad"
            for what, mine, right in zip(kinds, results(compute, qkv), exact, strict=True):
                error = float((mine - right).norm() / right.norm())
                if not error <= LARGEST_ERROR[qkv.dtype]:  # also NaN
                    given = "".join(f" with {argument}=" for argument in options)
                    found = f"wrong {what}{form}{given}: relative error {error:.2g} against the reference"
                    raise wrong_result(ATTENTION, name, found)


def best_kernel(q: Tensor, mask: Tensor | None = None, *, windows: bool = False) -> str:
    """Return the kernel that `attention` takes for tensors like q (batch, heads, seq, head_dim) by itself; with
    `windows` it has to take `first=`."""
    for name in PREFERRED[:-1]:
        facts = ATTENTION.facts(name)
        if (mask is None or facts.masks) and facts.windows >= windows and runs_on(ATTENTION, name, q):
            return name
    return PREFERRED[-1]


def runs_on(registry: Registry[Any], name: str, x: Tensor) -> bool:
    """Return whether a registered object runs on tensors like x, as its facts and their check say."""
    facts = registry.facts(name)
    if x.device.type not in facts.devices or facts.missing:
        return False
    try:
        if facts.check is not None:
            registry.function_of(name, facts.check)(x)
    except UsageError:
        return False
    return True
