"""`lmkit env`: versions, chips, and what runs on this machine."""

import importlib.util
import shutil
from dataclasses import dataclass

import typer

from lmkit.cli.options import DebugOption, JsonOption, PluginOption
from lmkit.cli.render import show
from lmkit.registry import ATTENTION, DATASETS, OPTIMIZERS, STRATEGIES, KernelFacts


@dataclass(frozen=True)
class EnvironmentFacts:
    """Result of `lmkit env`."""

    versions: dict[str, str]
    cpu: str
    gpus: tuple[str, ...]
    features: dict[str, str]

    def __str__(self) -> str:
        gpus = ", ".join(self.gpus) or "none"
        facts = {**self.versions, "CPU": self.cpu, "GPUs": gpus, **self.features}
        width = max(map(len, facts))
        return "\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items())


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog="Example: lmkit env --json")(env)


def env(plugin: PluginOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Print versions, GPUs, and what runs on this machine."""
    from lmkit import __version__
    from lmkit.measure.environment import describe_environment

    facts = describe_environment()
    versions = {"lmkit": __version__, "python": facts["python"], **facts["packages"]}
    if facts["cuda"]:
        versions["cuda"] = facts["cuda"]
    cpu = facts["cpu"]
    gpus = tuple(f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in facts["gpus"])
    usable = f"{cpu['name']}, {cpu['usable']} usable"
    show(EnvironmentFacts(versions, usable, gpus, _features(bool(gpus))), as_json=as_json)


def _features(has_gpu: bool) -> dict[str, str]:
    features = {}
    refusals = {name: _refusal(ATTENTION.facts(name), has_gpu) for name in ATTENTION.names}
    features["attention"] = ", ".join(name for name, refusal in refusals.items() if refusal is None)
    for name, refusal in refusals.items():
        facts = ATTENTION.facts(name)
        if refusal is not None:
            features[name] = f"no: {refusal}"
        elif facts.implementation is not None and has_gpu:
            features[name] = _implementation(name, facts)
    features["strategies"] = ", ".join(STRATEGIES.names)
    for title, registry in (("optimizers", OPTIMIZERS), ("datasets", DATASETS)):
        if registry.names:
            features[title] = ", ".join(registry.names)
    features["ranks"] = "nccl, gloo" if has_gpu else "gloo"
    features["wandb"] = (
        "installed" if importlib.util.find_spec("wandb") else "not installed: pip install 'lmkit[wandb]'"
    )
    features["nsys"] = "found" if shutil.which("nsys") else "not found: lmkit profile uses kineto"
    return features


def _refusal(facts: KernelFacts, has_gpu: bool) -> str | None:
    """Return why a kernel does not run here; None if it does."""
    missing = [package for package in facts.requires if importlib.util.find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if not has_gpu and "cpu" not in facts.devices:
        return "needs a CUDA GPU"
    return None


def _implementation(name: str, facts: KernelFacts) -> str:
    """Return which of its implementations a kernel runs, and why it is not the fastest."""
    import torch

    # The fastest kernels take these queries: one head of bf16, 128 wide.
    probe = torch.empty(
        1, 1, 1, 128, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu"
    )

    def ask(function: str | None) -> str | None:
        return None if function is None else ATTENTION.function_of(name, function)(probe, probe, probe)

    reason = ask(facts.fallback)
    return f"{ask(facts.implementation)} kernels" + (f": {reason}" if reason else "")
