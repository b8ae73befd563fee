"""Describe what is measured on: versions, chips, clocks, git state. No host names, no paths, no user names.

Also what data sheets say of GPUs: peaks for MFU, memory.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit import __version__
from lmkit.measure.memory import GIB

if TYPE_CHECKING:
    import torch

LAUNCH_QUEUES_VARIABLE = "CUDA_SCALE_LAUNCH_QUEUES"
"""Launches that the driver takes before the CPU has to wait: "4x" is four times its default."""
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "tiktoken", "transformers")
GPU_STATE_FIELDS = (
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit"),
    "clocks_throttle_reasons.active",
)


def describe_environment() -> dict[str, Any]:
    """Return the content of `environment.json`, which is stored with every measurement; JSON types only."""
    import torch

    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    environment: dict[str, Any] = {
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "lmkit": __version__,
        "git": git_state(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "cpu": {
            "name": _cpu_name(),
            "usable": usable_cpus(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    if torch.cuda.is_available():
        environment["cudnn"] = torch.backends.cudnn.version()
        if torch.distributed.is_nccl_available():
            environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        environment["driver"] = next((gpu["driver_version"] for gpu in _nvidia_smi("driver_version")), None)
        environment["gpus"] = [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "multiprocessors": gpu.multi_processor_count,
                "capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
        environment["gpu_state"] = _nvidia_smi(*GPU_STATE_FIELDS)
        environment["launch_queues"] = os.environ.get(LAUNCH_QUEUES_VARIABLE, "1x")
    return environment


def git_state() -> dict[str, Any] | None:
    """Return the commit of the checkout that lmkit runs from and whether it has changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ("git", f"--git-dir={root / '.git'}", f"--work-tree={root}")
    commit = _output_of(*git, "rev-parse", "HEAD")
    changes = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: Any) -> str:
    """Return "NVIDIA H200", say, or the CPU's name."""
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _nvidia_smi(*fields: str) -> list[dict[str, str]]:
    """Return fields of every GPU, as nvidia-smi prints them; [] without it."""
    text = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader") or ""
    return [dict(zip(fields, line.split(", "), strict=False)) for line in text.splitlines()]


def _output_of(*command: str) -> str | None:
    """Return standard output, or None if the program is missing or fails: the fact is then not recorded."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# Dense tensor-core peaks in FLOP/s (data sheets; without sparsity; 16-bit with fp32 accumulation).
# The first pattern that matches the device's name counts, so the special form factors come first.
_DENSE_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bB200\b", {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12}),
    (r"\bH200 NVL\b", {"bf16": 836e12, "fp16": 836e12, "tf32": 418e12, "fp32": 60e12}),
    (r"\bH100 PCIe\b", {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12}),
    (r"\bH100 NVL\b", {"bf16": 835e12, "fp16": 835e12, "tf32": 418e12, "fp32": 60e12}),
    (r"\b(GH200|H200|H100)\b", {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12}),
    (r"\bA100\b", {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    (r"\bL40S\b", {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12}),
    (r"\bL4\b", {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12}),
    (r"\bA10\b", {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12}),
    (r"\bRTX 4090\b(?! (D|Laptop))", {"bf16": 165.2e12, "fp16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12}),
    (r"\bRTX 3090\b(?! Ti)", {"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12}),
    (r"\bV100\b", {"fp16": 125e12, "fp32": 15.7e12}),
    (r"\bT4\b", {"fp16": 65e12, "fp32": 8.1e12}),
)


def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU or CPU multiplies bf16 by instructions of its own; elsewhere float32 is faster."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


class Card(NamedTuple):
    """A GPU: its name as torch calls it, and the bytes that torch reports: less than the name of a card says."""

    name: str
    memory: int


CARDS = {
    "T4": Card("Tesla T4", int(14.74 * GIB)),
    "L4": Card("NVIDIA L4", int(22.0 * GIB)),
    "RTX 4090": Card("NVIDIA GeForce RTX 4090", int(23.5 * GIB)),
    "A100 40GB": Card("NVIDIA A100-SXM4-40GB", int(39.4 * GIB)),
    "A100": Card("NVIDIA A100-SXM4-80GB", int(79.1 * GIB)),
    "H100": Card("NVIDIA H100 80GB HBM3", int(79.1 * GIB)),
    "H200": Card("NVIDIA H200", 150_109_880_320),
}
"""Name on the command line -> card."""


def card_here() -> Card:
    """Return this machine's first GPU; an H200 where there is none."""
    import torch

    if not torch.cuda.is_available():
        return CARDS["H200"]
    found = torch.cuda.get_device_properties(0)
    return Card(found.name, found.total_memory)


def known_peak(name: str, dtype: str) -> float | None:
    """Return the dense peak in FLOP/s of the GPU that torch calls `name`; None for unknown chips and dtypes."""
    for pattern, peaks in _DENSE_PEAKS:
        if re.search(pattern, name):
            return peaks.get(dtype)
    return None
