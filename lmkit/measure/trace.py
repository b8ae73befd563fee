"""A recording of any engine: ranges and CUDA calls of CPU threads, work of devices, classes of kernels. Times are in
ns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """A named stretch of one thread's time (NVTX push/pop, record_function)."""

    name: str
    start: int
    end: int
    process: int
    thread: int


@dataclass(frozen=True)
class Call:
    """A call of the CUDA runtime or driver; `correlation` links it to the work it caused."""

    name: str
    start: int
    end: int
    process: int
    thread: int
    correlation: int

    @property
    def is_launch(self) -> bool:
        """Whether it starts exactly one kernel (a graph launch starts many)."""
        return self.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"))


@dataclass(frozen=True)
class DeviceWork:
    """A kernel, memcpy or memset on a device. `from_graph`: launched by a CUDA graph, not by a call of its own."""

    kind: str
    name: str
    start: int
    end: int
    process: int
    device: int
    correlation: int
    from_graph: bool = False

    @property
    def is_communication(self) -> bool:
        return "nccl" in self.name.lower()


@dataclass(frozen=True)
class Trace:
    """One recording. `calls` and `work` are None where no GPU was traced.

    Attributes:
        engine: "nsys" or "kineto".
        source: name of the file or of what was run; no folders.
        ops: CPU operators (kineto only): name -> (calls, self time in ns).
        undisturbed_ms: median of a step (or pass) without the profiler; None if not measured.
        notes: warnings for the reader of the summary.
    """

    engine: str
    source: str
    ranges: Sequence[Range]
    calls: Sequence[Call] | None
    work: Sequence[DeviceWork] | None
    ops: dict[str, tuple[int, int]] = field(default_factory=dict)
    undisturbed_ms: float | None = None
    notes: tuple[str, ...] = ()


PRODUCTS = "matrix products"
CASTS = "casts to fp8"
ATTENTION_FORWARD = "attention forward"
ATTENTION_BACKWARD = "attention backward"
ACTIVATION = "SwiGLU, GELU"
NORM = "norm"
LOSS = "cross-entropy"
OPTIMIZER = "clipping, optimizer"
ROPE = "RoPE"
EMBEDDING = "embedding"
REST = "rest"
CLASSES = (
    PRODUCTS,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    ACTIVATION,
    NORM,
    LOSS,
    OPTIMIZER,
    CASTS,
    ROPE,
    EMBEDDING,
    REST,
)
"""In the order of tables."""

# The first pattern that is found in a name counts. The compiler names a kernel after all operations that it fused.
_PATTERNS = {
    OPTIMIZER: r"adam|foreach|multi_tensor|decide_kernel",
    ATTENTION_BACKWARD: r"bprop|flash_bwd|attention.*backward|cutlassB|dkdv|dq_kernel|dot_do_o|convert_dq|"
    r"finish_kernel|prepare_kernel",
    ATTENTION_FORWARD: r"fprop|flash_fwd|attention|cutlassF|forward_kernel",
    CASTS: r"cast_rows|cast_transposed",
    PRODUCTS: r"gemm|nvjet|cutlass|cublas|xmma|splitk|triton_tem|_scaled_mm|::(add|b|baddb)?mm$|::mkldnn_\w*linear",
    LOSS: r"softmax|nll|cross_entropy|scatter_gather|::(gather|scatter_add_?)$",
    ACTIVATION: r"silu|swiglu|gelu",
    NORM: r"rms_?norm|layer_?norm|add_norm|norm_gradient|gamma_?beta|rsqrt|vector_norm",
    ROPE: r"rope|rotary|complex",
    EMBEDDING: r"embedding|index_?select|indexing|vectorized_gather|scatter_add_kernel|sorted_sum|"
    r"compute_grad_weight|sum_and_scatter",
}


def kernel_class(name: str) -> str:
    """Return the class of a kernel, or of a CPU operator, by its name.

    >>> kernel_class("nvjet_tst_192x192_64x4_2x1_v_bz_TNT")
    'matrix products'
    """
    return next(
        (found for found, pattern in _PATTERNS.items() if re.search(pattern, name, re.IGNORECASE)), REST
    )


def class_times(trace: Trace, steps: int) -> dict[str, float]:
    """Return class -> ms per step of the device's work, or of CPU operators if no GPU was traced.

    Args:
        steps: how many steps were recorded.
    """
    if trace.work is None:
        spent = [(name, ns) for name, (_, ns) in trace.ops.items()]
    else:
        spent = [(item.name, item.end - item.start) for item in trace.work]
    found = dict.fromkeys(CLASSES, 0.0)
    for name, ns in spent:
        found[kernel_class(name)] += ns / 1e6 / steps
    return found
