"""Measure how fast a machine can be: matmul rate, copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkit.measure.environment import device_name, known_peak

if TYPE_CHECKING:
    import torch


@dataclass
class Limits:
    """The limits of one device, measured in this run.

    Attributes:
        matmul_flops: dtype name -> FLOP/s of the fastest square matmul.
        copy_bytes_per_s: bytes read plus bytes written.
    """

    device: str
    matmul_flops: dict[str, float]
    copy_bytes_per_s: float
    again: Callable[[], Limits] | None = field(default=None, repr=False, compare=False)

    def measure_again(self) -> None:
        """Measure once more, and keep the higher of both rates."""
        if self.again is None:
            return
        found = self.again()
        for dtype, rate in found.matmul_flops.items():
            self.matmul_flops[dtype] = max(rate, self.matmul_flops[dtype])
        self.copy_bytes_per_s = max(self.copy_bytes_per_s, found.copy_bytes_per_s)

    def as_dict(self) -> dict[str, object]:
        return {
            "device": self.device,
            "matmul_tflops": {name: round(rate / 1e12, 4) for name, rate in self.matmul_flops.items()},
            "copy_gb_per_s": round(self.copy_bytes_per_s / 1e9, 2),
        }


def limits_sentence(limits: Mapping[str, Any]) -> str:
    """Return a sentence of what `Limits.as_dict` holds, without the full stop."""
    rates = ", ".join(f"{rate:.4g} TFLOP/s {dtype}" for dtype, rate in limits["matmul_tflops"].items())
    return f"Measured limits of this machine in this run: matmul {rates}; copy {limits['copy_gb_per_s']} GB/s"


def measure_limits(device: torch.device | str, dtypes: Iterable[str]) -> Limits:
    """Measure matmul rates for `dtypes` and the copy bandwidth; under a second on a GPU, a few on a CPU.

    On a CPU the rate of a 16-bit dtype is at least that of float32, in which a kernel may multiply: products of
    16 bits are slow where a CPU has no instructions for them.
    """
    dtypes = tuple(dtypes)
    rates = {dtype: measure_matmul_peak(device, dtype) for dtype in dtypes}
    if str(device) == "cpu" and (narrow := {"bf16", "fp16"} & rates.keys()):
        wide = rates["fp32"] if "fp32" in rates else measure_matmul_peak(device, "fp32")
        rates |= {dtype: max(rates[dtype], wide) for dtype in narrow}
    again = partial(measure_limits, device, dtypes)
    return Limits(device_name(device), rates, measure_copy_bandwidth(device), again)


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


def measure_matmul_peak(device: torch.device | str, dtype: str) -> float:
    """Return the FLOP/s of the fastest of a few square matmuls, best of repeats ("tf32": of fp32 values)."""
    import torch

    from lmkit.measure.timing import time_variants

    sizes = (4096, 8192) if torch.device(device).type == "cuda" else (512, 1024)
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    variants = {}
    with matmul_precision(dtype):
        for size in sizes:
            # Random numbers: zeros draw less power and run at higher clocks than any real program.
            left, right = torch.randn(2, size, size, device=device).to(torch_dtype)
            variants[str(size)] = partial(torch.mm, left, right, out=torch.empty_like(left))
        timings = time_variants(variants, device=device, repeats=10, warmup=2, max_seconds=2.0)
    return max(2.0 * size**3 / (min(timings[str(size)].samples_ms) * 1e-3) for size in sizes)


def measure_copy_bandwidth(device: torch.device | str) -> float:
    """Return the bytes per second (read + written) of copying a buffer far larger than the caches."""
    import torch

    from lmkit.measure.timing import time_variants

    size = 2**30 if torch.device(device).type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_variants({"copy": lambda: target.copy_(source)}, device=device, repeats=10, max_seconds=2.0)
    return 2.0 * size / (min(timing["copy"].samples_ms) * 1e-3)


def mfu_fields(flops_per_s: float, device: torch.device | str, dtype: str, limits: Limits) -> dict[str, Any]:
    """Return the MFU and what it is a share of: the chip's dense peak if known, else the measured matmul rate."""
    name = device_name(device)
    if (peak := known_peak(name, dtype)) is not None:
        basis = f"dense {dtype} peak of {name}, {peak / 1e12:.0f} TFLOP/s"
    else:
        peak = limits.matmul_flops[dtype]
        basis = f"measured {dtype} matmul rate, {peak / 1e12:.3g} TFLOP/s"
    return {"mfu": flops_per_s / peak, "mfu_basis": basis}
