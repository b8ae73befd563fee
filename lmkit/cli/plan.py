"""`lmkit plan`: what a training needs, and what fits. `lmkit env`: what runs on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.console import Result
from lmkit.cli.options import Commands
from lmkit.registry import ATTENTION, DATASETS, OPERATIONS, OPTIMIZERS, STRATEGIES, Registry

if TYPE_CHECKING:
    from lmkit.training.plan import Plan

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
    recipe: str,
    set_: list[str] | None = None,
    gpu: str | None = None,
    ranks: Annotated[int, typer.Option(min=1, max=65536)] = 1,
    strategy: str | None = None,
    all_gpus: bool = False,
    check: bool = False,
) -> Result:
    """Say what a training needs and whether it fits, from its recipe alone.

    Bytes are those of tensors. GB are 10^9 bytes.

    Args:
        gpu: T4, L4, RTX 4090, A100 40GB, A100, H100, H200.  [default: that of this machine, or H200]
        strategy: How the GPUs share the training (parallel.strategy).
        all_gpus: Compare all known GPUs.
        check: Make a few steps here; compare with the plan.
        ranks: GPUs that train together.
    """
    from lmkit.errors import UsageError, did_you_mean
    from lmkit.measure.environment import CARDS, card_here
    from lmkit.recipe.load import load_recipe
    from lmkit.tokenizer.vocabulary import awaited_tokenizer

    loaded = load_recipe(recipe, set_ or (), flags={"parallel.strategy": strategy})
    known = {name.lower(): card for name, card in CARDS.items()}
    if gpu is not None and gpu.lower() not in known:
        message = f"--gpu {gpu}: not known{did_you_mean(gpu, CARDS)}"
        raise UsageError("plan.unknown_gpu", message, hint="there are: " + ", ".join(CARDS))
    if check + all_gpus + (gpu is not None) > 1:
        message = "--gpu names one GPU, --all-gpus compares all, and --check measures on this machine's"
        raise UsageError("plan.options_exclude", message, hint="leave out all but one of them")
    from lmkit.training import plan as planning

    assumed = ""
    if (awaited := awaited_tokenizer(loaded)) and loaded.tokenizer is not None:
        assumed = f"\n{awaited} is not there yet: counted with tokenizer.vocab_size = {loaded.tokenizer.vocab_size:,}"
    if all_gpus:
        plans = {name: planning.plan(loaded, card, ranks=ranks) for name, card in CARDS.items()}
        gpus = {name: _fields(made) for name, made in plans.items()}
        return Result(_table(plans) + assumed, {"gpus": gpus})
    made = planning.plan(loaded, known[gpu.lower()] if gpu is not None else card_here(), ranks=ranks)
    text, fields = _text(made) + assumed, _fields(made)
    if check:
        found = planning.check(loaded, ranks=ranks)
        fields["measured"] = {"peak_bytes": found.peak_bytes, "seconds": found.seconds}
        if found.peak_bytes is None or found.seconds is None:
            return Result(f"{text}\n\nmeasured: out of memory", fields)
        planned, peak = made.memory.peak / GB, found.peak_bytes / GB
        tokens = made.train.batch_size * made.config.context_length
        text += f"\n\npeak: planned {planned:.2f} GB, measured {peak:.2f} ({planned / peak - 1:+.1%})\n"
        text += f"a step: measured {found.seconds * 1e3:,.1f} ms, {tokens / found.seconds:,.0f} tokens/s"
    return Result(text, fields)


# Kinds of bytes
_BEFORE = {"weights": "weights", "optimizer": "optimizer state", "gathered": "gathered weights and gradients"}
_AFTER = {
    "recomputed": "activations of a block, computed again",
    "gradients": "gradients",
    "loss": "loss: gradients of the head",
    "logits": "loss: slice of logits",
}


def _fields(made: Plan) -> dict[str, Any]:
    """Return what `--json` prints."""
    memory = made.memory
    same = ("fits", "ranks", "strategy", "rows", "parameters", "most_rows", "most_context")
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
            **{kind: getattr(memory, kind) for kind in (*_BEFORE, *_AFTER)},
            "activations": dict(memory.activations),
            "kv_cache": made.kv_cache,
        },
        "moments": dict(memory.moments),
    }


def _text(made: Plan) -> str:
    from lmkit.measure.tables import Column, terminal_table

    memory, config, train = made.memory, made.config, made.train
    kinds = {label: getattr(memory, kind) for kind, label in _BEFORE.items()}
    kinds |= {f"activations: {name}": size for name, size in memory.activations.items()}
    kinds |= {label: getattr(memory, kind) for kind, label in _AFTER.items()}
    rows = [{"kind": kind, "gb": size / GB} for kind, size in kinds.items() if size]
    where = f"{made.ranks} x {made.card.name}, {made.strategy}" if made.ranks > 1 else made.card.name
    accumulated = f" x {train.accumulation} micro-batches" if train.accumulation > 1 else ""
    operations = "fused" if made.fused else "plain"
    sequences = f"{made.most_rows:,} sequence{'' if made.most_rows == 1 else 's'}"
    lines = [
        f"{made.parameters:,} parameters, {train.precision}, {operations} operations, on {where}",
        f"a rank's batch: {made.rows:,} x {config.context_length:,} tokens{accumulated}",
        "",
        terminal_table(rows, (Column("kind", "a rank holds"), Column("gb", "GB", ",.3f")), width=98),
        f"peak: {memory.peak / GB:.2f} GB, in {memory.peaks_at}; not all of the above exists at that moment",
        f"with the allocator's gaps: at most {memory.most / GB:.2f} GB",
        f"{'fits' if made.fits else 'DOES NOT FIT'}: {made.usable / GB:.1f} GB are usable of the GPU's "
        f"{made.card.memory / GB:.1f} GB",
        f"largest micro-batch: {sequences} of {config.context_length:,} tokens; "
        f"longest context: {made.most_context:,} tokens for {made.rows:,}",
        *_notes([made]),
        f"generating {made.texts:,} text{'' if made.texts == 1 else 's'} at once: {made.kv_cache / GB:,.3f} GB of "
        f"keys and values beside {made.generating / GB:.3f} GB of weights",
    ]
    return "\n".join(lines)


def _notes(plans: Collection[Plan]) -> list[str]:
    """Return lines on GPUs that cannot compute in the precision of their plan, and what to do if nothing fits."""
    from lmkit.measure.environment import known_peak

    of_bf16 = [made.card.name for made in plans if made.train.precision.startswith("bf16")]
    notes = [f"{name} has no instructions for bf16" for name in of_bf16 if known_peak(name, "bf16") is None]
    return notes if any(made.fits for made in plans) else [*notes, _LESS]


def _table(plans: dict[str, Plan]) -> str:
    from lmkit.measure.tables import Column, terminal_table

    made = next(reversed(plans.values()))
    heads = {"GPU": "", "usable GB": ".1f", "needs GB": ".2f", "fits": ""}
    heads |= {"largest batch": ",d", "longest context": ",d"}
    columns = [Column(head, head, spec) for head, spec in heads.items()]
    rows = []
    for name, each in plans.items():
        sizes = (each.usable / GB, each.memory.peak / GB, "yes" if each.fits else "no")
        rows.append(dict(zip(heads, (name, *sizes, each.most_rows, each.most_context), strict=True)))
    precision, context = made.train.precision, made.config.context_length
    others = (f"{p.train.precision} on {name}" for name, p in plans.items() if p.train.precision != precision)
    ranks = f"{made.ranks} GPUs, {made.strategy}" if made.ranks > 1 else "1 GPU"
    lines = [
        f"{made.parameters:,} parameters, {', '.join([precision, *others])}, "
        f"{made.rows:,} x {context:,} tokens a rank, {ranks}",
        "",
        terminal_table(rows, columns, width=98),
        'usable: what CUDA and its libraries leave; GB are 10^9 bytes, of which a GPU of "80 GB" has 85',
        f"largest batch: sequences of {context:,} tokens in a micro-batch on a rank; "
        f"longest context: for {made.rows:,}",
        *_notes(plans.values()),
    ]
    return "\n".join(lines)


@app.add("lmkit env --json")
def env(plugin: list[Path] | None = None) -> Result:
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
    def refusals(registry: Registry[Any]) -> dict[str, str]:
        """Return why each kernel or set of operations does not run here; "" if it does."""
        found = {}
        for name in registry.names:
            missing, devices = registry.facts(name).missing, registry.facts(name).devices
            needs = "" if has_gpu or "cpu" in devices else "needs a CUDA GPU"
            found[name] = f"{', '.join(missing)} is not installed" if missing else needs
        return found

    kernels, operations = refusals(ATTENTION), refusals(OPERATIONS)
    features = {"attention": ", ".join(name for name, refusal in kernels.items() if not refusal)}
    for name, refusal in kernels.items():
        if refusal:
            features[name] = f"no: {refusal}"
        elif has_gpu and ATTENTION.facts(name).implementation is not None:
            features[name] = _implementation(name)
    best = next(name for name, refusal in operations.items() if not refusal)
    others = [f" ({name}: {refusal})" for name, refusal in operations.items() if refusal]
    features["operations"] = best + "".join(others)
    features["strategies"] = ", ".join(STRATEGIES.names)
    features["optimizers"] = ", ".join(OPTIMIZERS.names)
    features["datasets"] = ", ".join(DATASETS.names)
    features["ranks"] = "nccl, gloo" if has_gpu else "gloo"
    extras = {"wandb": "wandb", "tensorboard": "tensorboard", "lm_eval": "eval"}
    for package, extra in {**extras, "pyarrow": "text", "zstandard": "text"}.items():
        found = importlib.util.find_spec(package)
        features[package] = "installed" if found else f"not installed: pip install -e '.[{extra}]'"
    features["nsys"] = "found" if shutil.which("nsys") else "not found: lmkit profile uses kineto"
    return features


def _implementation(name: str) -> str:
    """Return which of its implementations a kernel runs on a GPU, and why it is not the fastest."""
    import torch

    # The fastest kernels take these queries: one head of bf16, 128 wide.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)

    def ask(function: str | None) -> str | None:
        return None if function is None else ATTENTION.function_of(name, function)(probe, probe, probe)

    facts = ATTENTION.facts(name)
    reason = ask(facts.fallback)
    return f"{ask(facts.implementation)} kernels" + (f": {reason}" if reason else "")
