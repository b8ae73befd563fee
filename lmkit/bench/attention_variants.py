"""The names of `lmkit bench attention`: tiers -> lengths; "flash_triton:tf32+compile" -> timed calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from lmkit.errors import UsageError, did_you_mean
from lmkit.measure.timing import Work
from lmkit.registry import ATTENTION

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.bench.attention import Options
    from lmkit.bench.attention_gate import Inputs

TIERS: dict[str, int] = {
    "Small": 128,
    "Medium": 256,
    "Large": 512,
    "XL": 1024,
    "XXL": 2048,
    **{f"{thousands}k": thousands * 1024 for thousands in (4, 8, 16, 32, 64, 128)},
}
ABLATIONS = ("flash_triton:no_skip", "flash_triton:atomic")
"""Functions of `lmkit.bench.attention_ablations`."""
COMPILED = "+compile"
FLOPS = {"forward": 1.0, "backward": 2.5, "fwd+bwd": 3.5}  # five matrix products where forward has two


@dataclass(frozen=True)
class Case:
    """One shape. `part` is "tiers" or "grid"; `tier` its name, such as "XXL" or "128:64"."""

    part: str
    tier: str
    num_queries: int
    num_keys: int
    head_dim: int

    def flops(self, options: Options, direction: str) -> float:
        """Return 2 FLOPs per multiply-add; causal counts the visible triangle (FlashAttention-2)."""
        area = float(self.num_queries) * self.num_keys
        if options.causal:
            square = min(self.num_queries, self.num_keys)
            area = square * square / 2.0 + max(0, self.num_queries - self.num_keys) * self.num_keys
        return FLOPS[direction] * 4.0 * options.batch * options.heads * area * self.head_dim


def parse_tier(text: str) -> tuple[int, int]:
    """Return (num_queries, num_keys) of "XXL", "2048" or "128:64".

    Raises:
        ValueError: anything else.
    """
    if text in TIERS:
        return TIERS[text], TIERS[text]
    queries, colon, keys = text.partition(":")
    if queries.isdecimal() and int(queries) > 0 and (not colon or (keys.isdecimal() and int(keys) > 0)):
        return int(queries), int(keys if colon else queries)
    raise ValueError(
        f'"{text}" is not a tier; use {", ".join(TIERS)}, a length, or queries:keys such as 128:64'
    )


def _is_tier(text: str) -> str:
    parse_tier(text)
    return text


Tier = Annotated[str, AfterValidator(_is_tier)]


def default_kernels(*, on_gpu: bool) -> tuple[str, ...]:
    """Return what is measured by default: every kernel that runs on the device."""
    found: list[str] = []
    for name in ATTENTION.names:
        facts = ATTENTION.facts(name)
        if not facts.missing and ("cuda" if on_gpu else "cpu") in facts.devices:
            found += ["sdpa:cudnn", "sdpa:flash"] if name == "sdpa" and on_gpu else [name]
            found += [name + COMPILED] if name == "vectorized" else []
    return tuple(found)


def check_kernel(name: str) -> None:
    """Raise UsageError unless `build_variant` knows the name."""
    known = [*ATTENTION.names, *ABLATIONS]
    known += [
        f"{kernel}:{variant}" for kernel in ATTENTION.names for variant in ATTENTION.facts(kernel).variants
    ]
    plain = name.removesuffix(COMPILED)
    if plain not in known:
        raise UsageError(
            "bench.unknown_kernel",
            f"bench.attention.kernels: there is no {name!r}{did_you_mean(plain, known)}",
            hint=f"there are {', '.join(dict.fromkeys(known))}, each with an optional {COMPILED}, "
            "and those of --plugin FILE",
        )


def kernel_of(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the kernel of a variant, and the arguments that the variant adds to its calls."""
    plain = name.removesuffix(COMPILED)
    kernel, _, variant = plain.partition(":")
    if plain in ABLATIONS:
        return kernel, {"implementation": "portable"}
    return kernel, ATTENTION.facts(kernel).variants.get(variant, {})


def build_variant(name: str, dtype: str) -> Callable[..., Tensor]:
    """Return the attention function of a variant.

    Args:
        dtype: kernels with their own matrix products need to be told "tf32".

    Raises:
        UsageError: the kernel needs a package that is not installed.
    """
    import torch

    from lmkit.attention import attention_function

    plain = name.removesuffix(COMPILED)
    kernel, arguments = kernel_of(name)
    function: Callable[..., Tensor]
    if plain in ABLATIONS:
        attention_function(kernel)  # refuses if a package is not installed
        from lmkit.bench import attention_ablations

        function = getattr(attention_ablations, plain.partition(":")[2])
    else:
        tf32 = ATTENTION.facts(kernel).variants.get("tf32", {}) if dtype == "tf32" else {}
        function = ATTENTION.load(kernel)  # without the check of its first call: the gate makes a row of it
        if tf32 or arguments:
            function = partial(function, **{**tf32, **arguments})
    return torch.compile(function, dynamic=False) if name.endswith(COMPILED) else function


def precision_of(name: str, dtype: str) -> str:
    """Return the label of a row: the bench's dtype, or tf32 for a variant that multiplies float32 so."""
    return "tf32" if dtype == "fp32" and name.removesuffix(COMPILED).endswith(":tf32") else dtype


def implementation_of(name: str, inputs: Inputs) -> str | None:
    """Return the name of the implementation that a kernel runs; None for kernels with only one."""
    kernel, arguments = kernel_of(name)
    function = ATTENTION.facts(kernel).implementation
    if function is None:
        return None
    forced: str | None = arguments.get("implementation")
    return forced or ATTENTION.function_of(kernel, function)(inputs.q, inputs.k, inputs.v)


def timed_call(function: Callable[..., Tensor], inputs: Inputs, direction: str) -> tuple[Work | None, Work]:
    """Return (untimed preparation of each call or None, the call) of a direction: forward, fwd+bwd or backward."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    outputs: list[Tensor] = []

    def forward_alone() -> object:
        with torch.no_grad():
            return function(inputs.q, inputs.k, inputs.v, causal=inputs.causal)

    def forward() -> None:
        outputs.clear()  # a sample that was taken again left one
        outputs.append(function(*leaves, causal=inputs.causal))

    def backward() -> object:
        return torch.autograd.grad(outputs.pop(), leaves, inputs.dout)

    def both() -> object:
        forward()
        return backward()

    if direction == "forward":
        return None, forward_alone
    return (forward, backward) if direction == "backward" else (None, both)


@contextmanager
def matmul_precision(dtype: str) -> Iterator[None]:
    """Multiply float32 as `dtype` says inside the block."""
    import torch

    # Not `matmul.fp32_precision`: torch refuses to compile where that and the older switch disagree.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
