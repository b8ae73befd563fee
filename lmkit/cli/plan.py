"""`lmkit plan`: what a training needs, and what fits. `lmkit env`: what runs on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.console import Result
from lmkit.cli.options import Commands, PluginOption, RecipeArgument, SetOption, option
from lmkit.registry import (
    ATTENTION,
    DATASETS,
    OPERATIONS,
    OPTIMIZERS,
    STRATEGIES,
    KernelFacts,
    OperationsFacts,
)

if TYPE_CHECKING:
    from lmkit.training.plan import Measured, Plan

app = Commands()
GB = 10**9
_LESS = (
    "to need less: train.accumulation, model.activation_checkpointing, optimizer.name=adamw_host,\n"
    "or several --ranks with --strategy fsdp"
)


@app.add(
    "lmkit plan llama_1b --gpu H100",
    "lmkit plan course_8b --ranks 2 --all-gpus",
    "lmkit plan llama_1b --check",
)
def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    gpu: Annotated[
        str | None,
        option("T4, L4, RTX 4090, A100 40GB, A100, H100, H200.  [default: that of this machine, or H200]"),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=65536, help="GPUs that train together.")] = 1,
    strategy: Annotated[str | None, option("How the GPUs share the training (parallel.strategy).")] = None,
    all_gpus: Annotated[bool, typer.Option("--all-gpus", help="Compare all known GPUs.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Make a few steps here; compare with the plan.")
    ] = False,
) -> Result:
    """Say what a training needs and whether it fits, from its recipe alone.

    Bytes are those of tensors. GB are 10^9 bytes.
    """
    from lmkit.errors import UsageError, did_you_mean
    from lmkit.measure.limits import CARDS, card_here
    from lmkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or (), flags={"parallel.strategy": strategy})
    known = {name.lower(): card for name, card in CARDS.items()}
    if gpu is not None and gpu.lower() not in known:
        raise UsageError(
            "plan.unknown_gpu",
            f"--gpu {gpu}: not known{did_you_mean(gpu, CARDS)}",
            hint="there are: " + ", ".join(CARDS),
        )
    if check and (gpu is not None or all_gpus):
        raise UsageError(
            "plan.options_exclude",
            "--check measures on this machine's GPUs, --gpu and --all-gpus name others",
            hint="leave one of them out",
        )
    if all_gpus and gpu is not None:
        raise UsageError(
            "plan.options_exclude",
            "--gpu names one GPU, --all-gpus compares all",
            hint="leave one of them out",
        )
    from lmkit.tokenizer.vocabulary import awaited_tokenizer
    from lmkit.training.plan import plan as make_plan

    assumed = ""
    if (awaited := awaited_tokenizer(loaded)) and loaded.tokenizer is not None:
        assumed = f"\n{awaited} is not there yet: counted with tokenizer.vocab_size = {loaded.tokenizer.vocab_size:,}"
    if all_gpus:
        plans = {name: make_plan(loaded, card, ranks=ranks) for name, card in CARDS.items()}
        return Result(
            _table(plans) + assumed, {"gpus": {name: _fields(made) for name, made in plans.items()}}
        )
    card = known[gpu.lower()] if gpu is not None else card_here()
    made = make_plan(loaded, card, ranks=ranks)
    if not check:
        return Result(_text(made) + assumed, _fields(made))
    from lmkit.training.plan import check as measure

    found = measure(loaded, ranks=ranks)
    measured = {"peak_bytes": found.peak_bytes, "seconds": found.seconds}
    return Result(
        f"{_text(made)}{assumed}\n\n{_compared(made, found)}", {**_fields(made), "measured": measured}
    )


def _compared(made: Plan, found: Measured) -> str:
    if found.peak_bytes is None or found.seconds is None:
        return "measured: out of memory"
    planned, peak = made.memory.peak / GB, found.peak_bytes / GB
    tokens = made.train.batch_size * made.config.context_length
    return (
        f"peak: planned {planned:.2f} GB, measured {peak:.2f} ({planned / peak - 1:+.1%})\n"
        f"a step: measured {found.seconds * 1e3:,.1f} ms, {tokens / found.seconds:,.0f} tokens/s"
    )


def _fields(made: Plan) -> dict[str, Any]:
    """Return what `--json` prints."""
    memory = made.memory
    same = ("fits", "ranks", "strategy", "rows", "parameters", "most_rows", "most_context")
    kinds = ("weights", "optimizer", "gradients", "gathered", "recomputed", "loss", "logits")
    return {
        "gpu": made.card.name,
        "gpu_bytes": made.card.memory,
        "usable_bytes": made.usable,
        "context_length": made.config.context_length,
        **{key: getattr(made, key) for key in same},
        "peak_bytes": memory.peak,
        "peaks_at": memory.peaks_at,
        "most_bytes": memory.most,
        "bytes": {
            **{kind: getattr(memory, kind) for kind in kinds},
            "activations": dict(memory.activations),
            "kv_cache": made.kv_cache,
        },
        "moments": dict(memory.moments),
    }


def _text(made: Plan) -> str:
    from lmkit.measure.tables import Column, terminal_table

    memory, config, train = made.memory, made.config, made.train
    kinds = {
        "weights": memory.weights,
        "optimizer state": memory.optimizer,
        "gathered weights and gradients": memory.gathered,
        **{f"activations: {name}": size for name, size in memory.activations.items()},
        "activations of a block, computed again": memory.recomputed,
        "gradients": memory.gradients,
        "loss: gradients of the head": memory.loss,
        "loss: slice of logits": memory.logits,
    }
    rows = [{"kind": kind, "gb": size / GB} for kind, size in kinds.items() if size]
    table = terminal_table(rows, (Column("kind", "a rank holds"), Column("gb", "GB", ",.3f")), width=98)
    where = f"{made.ranks} x {made.card.name}, {made.strategy}" if made.ranks > 1 else made.card.name
    accumulated = f" x {train.accumulation} micro-batches" if train.accumulation > 1 else ""
    operations = "fused" if made.fused else "plain"
    lines = [
        f"{made.parameters:,} parameters, {train.precision}, {operations} operations, on {where}",
        f"a rank's batch: {made.rows:,} x {config.context_length:,} tokens{accumulated}",
        "",
        table,
        f"peak: {memory.peak / GB:.2f} GB, in {memory.peaks_at}; not all of the above exists at that moment",
        f"with the allocator's gaps: at most {memory.most / GB:.2f} GB",
        f"{'fits' if made.fits else 'DOES NOT FIT'}: {made.usable / GB:.1f} GB are usable of the GPU's "
        f"{made.card.memory / GB:.1f} GB",
        f"largest micro-batch: {_count(made.most_rows)} of {config.context_length:,} tokens; "
        f"longest context: {made.most_context:,} tokens for {made.rows:,}",
        *(() if made.fits else (_LESS,)),
        f"generating {made.texts:,} text{'' if made.texts == 1 else 's'} at once: {made.kv_cache / GB:,.3f} GB of "
        f"keys and values beside {made.generating / GB:.3f} GB of weights",
        *_without_bf16([made]),
    ]
    return "\n".join(lines)


def _count(rows: int) -> str:
    return f"{rows:,} sequence{'' if rows == 1 else 's'}"


def _without_bf16(plans: Iterable[Plan]) -> list[str]:
    """Return a line for each GPU that cannot compute in the precision of its plan."""
    from lmkit.measure.limits import known_peak

    return [
        f"{made.card.name} has no instructions for bf16"
        for made in plans
        if made.train.precision.startswith("bf16") and known_peak(made.card.name, "bf16") is None
    ]


def _table(plans: dict[str, Plan]) -> str:
    from lmkit.measure.tables import Column, terminal_table

    made = next(reversed(plans.values()))
    rows = [
        {
            "gpu": name,
            "usable": each.usable / GB,
            "needs": each.memory.peak / GB,
            "fits": "yes" if each.fits else "no",
            "rows": each.most_rows,
            "context": each.most_context,
        }
        for name, each in plans.items()
    ]
    columns = (
        Column("gpu", "GPU"),
        Column("usable", "usable GB", ".1f"),
        Column("needs", "needs GB", ".2f"),
        Column("fits", "fits"),
        Column("rows", "largest batch", ",d"),
        Column("context", "longest context", ",d"),
    )
    ranks = f"{made.ranks} GPUs, {made.strategy}" if made.ranks > 1 else "1 GPU"
    others = [
        f"{each.train.precision} on {name}"
        for name, each in plans.items()
        if each.train.precision != made.train.precision
    ]
    head = (
        f"{made.parameters:,} parameters, {', '.join([made.train.precision, *others])}, "
        f"{made.rows:,} x {made.config.context_length:,} tokens a rank, {ranks}"
    )
    notes = [
        'usable: what CUDA and its libraries leave; GB are 10^9 bytes, of which a GPU of "80 GB" has 85',
        f"largest batch: sequences of {made.config.context_length:,} tokens in a micro-batch on a rank; "
        f"longest context: for {made.rows:,}",
    ]
    fitting = [each for each in plans.values() if each.fits]
    notes += _without_bf16(fitting)
    if not fitting:
        notes.append(_LESS)
    return "\n".join([head, "", terminal_table(rows, columns, width=98), *notes])


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
