"""Describe what is measured on: versions, chips, clocks, git state. No host names, no paths, no user names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lmkit import __version__

LAUNCH_QUEUES_VARIABLE = "CUDA_SCALE_LAUNCH_QUEUES"
"""Launches that a GPU's driver takes before the CPU has to wait: "4x" is four times its default."""
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "tiktoken", "transformers")
GPU_STATE_FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "power.limit",
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
        environment["gpu_state"] = gpu_state()
        environment["launch_queues"] = os.environ.get(LAUNCH_QUEUES_VARIABLE, "1x")
    return environment


def gpu_state() -> list[dict[str, str]]:
    """Return clocks, temperature, power and throttling of every GPU, as nvidia-smi prints them; [] without."""
    return _nvidia_smi(*GPU_STATE_FIELDS)


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
    """Return the number of CPUs that this process may use."""
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
    text = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader") or ""
    return [dict(zip(fields, line.split(", "), strict=False)) for line in text.splitlines()]


def _output_of(*command: str) -> str | None:
    """Return standard output, or None if the program is missing or fails: the fact is then not recorded."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
