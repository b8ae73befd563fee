"""`lmkit env`: versions, chips, and what runs on this machine."""

from __future__ import annotations

import importlib.util
import shutil

from lmkit.cli.console import Result
from lmkit.cli.options import Commands, PluginOption
from lmkit.registry import (
    ATTENTION,
    DATASETS,
    OPERATIONS,
    OPTIMIZERS,
    STRATEGIES,
    KernelFacts,
    OperationsFacts,
)

app = Commands()


@app.add("lmkit env --json")
def env(plugin: PluginOption = None) -> Result:
    """Print versions, GPUs, and what runs on this machine."""
    from lmkit import __version__
    from lmkit.measure.environment import describe_environment

    facts = describe_environment()
    versions = {"lmkit": __version__, "python": facts["python"], **facts["packages"]}
    if facts["cuda"]:
        versions["cuda"] = facts["cuda"]
    cpu = f"{facts['cpu']['name']}, {facts['cpu']['usable']} usable"
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in facts["gpus"]]
    features = _features(bool(gpus))
    shown = {**versions, "CPU": cpu, "GPUs": ", ".join(gpus) or "none", **features}
    width = max(map(len, shown))
    text = "\n".join(f"{name:<{width}}  {fact}" for name, fact in shown.items())
    return Result(text, {"versions": versions, "cpu": cpu, "gpus": gpus, "features": features})


def _features(has_gpu: bool) -> dict[str, str]:
    refusals = {name: _refusal(ATTENTION.facts(name), has_gpu) for name in ATTENTION.names}
    features = {"attention": ", ".join(name for name, refusal in refusals.items() if refusal is None)}
    for name, refusal in refusals.items():
        facts = ATTENTION.facts(name)
        if refusal is not None:
            features[name] = f"no: {refusal}"
        elif facts.implementation is not None and has_gpu:
            features[name] = _implementation(name, facts)
    refusals = {name: _refusal(OPERATIONS.facts(name), has_gpu) for name in OPERATIONS.names}
    chosen = next(name for name, refusal in refusals.items() if refusal is None)
    others = [f"{name}: {refusal}" for name, refusal in refusals.items() if refusal is not None]
    features["operations"] = chosen + "".join(f" ({other})" for other in others)
    registries = {"strategies": STRATEGIES, "optimizers": OPTIMIZERS, "datasets": DATASETS}
    features |= {title: ", ".join(registry.names) for title, registry in registries.items()}  # type: ignore[attr-defined]
    features["ranks"] = "nccl, gloo" if has_gpu else "gloo"
    for package, extra in {"wandb": "wandb", "tensorboard": "tensorboard", "lm_eval": "eval"}.items():
        found = importlib.util.find_spec(package)
        features[package] = "installed" if found else f"not installed: pip install 'lmkit[{extra}]'"
    features["nsys"] = "found" if shutil.which("nsys") else "not found: lmkit profile uses kineto"
    return features


def _refusal(facts: KernelFacts | OperationsFacts, has_gpu: bool) -> str | None:
    """Return why a kernel or a set of operations does not run here; None if it does."""
    if facts.missing:
        return f"{', '.join(facts.missing)} is not installed"
    return None if has_gpu or "cpu" in facts.devices else "needs a CUDA GPU"


def _implementation(name: str, facts: KernelFacts) -> str:
    """Return which of its implementations a kernel runs, and why it is not the fastest."""
    import torch

    # The fastest kernels take these queries: one head of bf16, 128 wide.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)

    def ask(function: str | None) -> str | None:
        return None if function is None else ATTENTION.function_of(name, function)(probe, probe, probe)

    reason = ask(facts.fallback)
    return f"{ask(facts.implementation)} kernels" + (f": {reason}" if reason else "")
