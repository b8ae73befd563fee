"""`lmkit env`: versions, chips, and what works here."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any

from lmkit import __version__
from lmkit.measure.environment import describe_environment


@dataclass(frozen=True)
class EnvironmentFacts:
    versions: dict[str, str]
    cpu: str
    gpus: tuple[str, ...]
    features: dict[str, str]

    def __str__(self) -> str:
        gpus = ", ".join(self.gpus) or "none"
        facts = {**self.versions, "CPU": self.cpu, "GPUs": gpus, **self.features}
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def run() -> EnvironmentFacts:
    """Describe this machine."""
    facts = describe_environment()
    versions = {"lmkit": __version__, "python": facts["python"], **facts["packages"]}
    if facts["cuda"]:
        versions["cuda"] = facts["cuda"]
    cpu = facts["cpu"]
    gpus = tuple(f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in facts["gpus"])
    return EnvironmentFacts(
        versions=versions,
        cpu=f"{cpu['name']}, {cpu['usable']} usable",
        gpus=gpus,
        features=_features(facts),
    )


def _features(facts: dict[str, Any]) -> dict[str, str]:
    has_triton = importlib.util.find_spec("triton") is not None
    gpu = bool(facts["gpus"])
    return {
        "attention": "reference, vectorized, flash_torch, sdpa"
        + (", flash_triton" if has_triton and gpu else ""),
        "flash_triton": _flash_triton(has_triton, facts["gpus"]),
        "ranks": "nccl, gloo" if gpu else "gloo",
        "wandb": _present("wandb", "pip install 'lmkit[wandb]'"),
        "nsys": "found" if shutil.which("nsys") else "not found: lmkit profile uses kineto",
    }


def _flash_triton(has_triton: bool, gpus: list[dict[str, Any]]) -> str:
    if not has_triton:
        return "no: triton is not installed"
    if not gpus:
        return "no: needs a CUDA GPU"
    import torch

    from lmkit.attention.flash_triton import hopper_refusal

    # A request that the Hopper kernels take.
    probe = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda")
    reason = hopper_refusal(probe, probe, probe)
    return "Hopper kernels, portable for what they do not cover" if reason is None else f"portable ({reason})"


def _present(package: str, how: str) -> str:
    return "installed" if importlib.util.find_spec(package) else f"not installed: {how}"
