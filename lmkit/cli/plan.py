"""`lmkit plan`: what a training needs, and what fits, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.console import Result
from lmkit.cli.options import Commands, RecipeArgument, SetOption, option

if TYPE_CHECKING:
    from lmkit.training.plan import Plan
    from lmkit.training.plan_check import Measured

app = Commands()
GB = 10**9
_TIMED = {
    "reference": "its time is that of an H200's host, and another may take twice as long",
    "here": "its time was taken here, of a step with the same layers, but narrow matrices and short rows",
    "scaled": "its time is that of an H200's host, scaled by what a narrow step of one rank took here",
}
"""How a plan's host seconds are known, see `Plan.timed` -> what is said about it."""
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
    if gpu is not None:
        return Result(_text(made) + assumed, _fields(made))
    from lmkit.training.plan_check import check as measure
    from lmkit.training.plan_check import timed_here

    made = timed_here(made, loaded)
    if not check:
        return Result(_text(made) + assumed, _fields(made))
    found = measure(loaded, ranks=ranks)
    # The pace of a host changes within seconds, so that of the steps lies between those before and after them.
    later = timed_here(made, loaded)
    made = replace(made, host_seconds=(made.host_seconds + later.host_seconds) / 2)
    measured = {"peak_bytes": found.peak_bytes, "seconds": found.seconds}
    return Result(
        f"{_text(made)}{assumed}\n\n{_compared(made, found)}", {**_fields(made), "measured": measured}
    )


def _compared(made: Plan, found: Measured) -> str:
    if found.peak_bytes is None or found.seconds is None:
        return "measured: out of memory"
    lines = [_beside("peak", made.memory.peak / GB, found.peak_bytes / GB, "GB", ".2f")]
    if made.seconds is not None:
        lines.append(_beside("a step", made.seconds * 1e3, found.seconds * 1e3, "ms", ",.1f"))
    return "\n".join(lines)


def _beside(what: str, planned: float, measured: float, unit: str, spec: str) -> str:
    return (
        f"{what}: planned {planned:{spec}} {unit}, measured {measured:{spec}} ({planned / measured - 1:+.1%})"
    )


def _fields(made: Plan) -> dict[str, Any]:
    """Return what `--json` prints: bytes, seconds."""
    memory = made.memory
    same = ("fits", "ranks", "strategy", "rows", "parameters", "most_rows", "most_context", "timed", "mfu")
    times = ("seconds", "busy_seconds", "latency_seconds", "host_seconds", "least_seconds", "tokens_per_s")
    kinds = ("weights", "optimizer", "gradients", "gathered", "recomputed", "loss", "logits")
    return {
        "gpu": made.card.name,
        "gpu_bytes": made.card.memory,
        "usable_bytes": made.usable,
        "context_length": made.config.context_length,
        **{key: getattr(made, key) for key in (*same, *times)},
        "peak_bytes": memory.peak,
        "peaks_at": memory.peaks_at,
        "most_bytes": memory.most,
        "bytes": {
            **{kind: getattr(memory, kind) for kind in kinds},
            "activations": dict(memory.activations),
            "kv_cache": made.kv_cache,
        },
        "moments": dict(memory.moments),
        "flops": sum(part.flops for part in made.work.values()),
        "moved_bytes": sum(part.num_bytes for part in made.work.values()),
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
        "",
        *_speed(made),
    ]
    return "\n".join(lines)


def _count(rows: int) -> str:
    return f"{rows:,} sequence{'' if rows == 1 else 's'}"


def _speed(made: Plan) -> list[str]:
    """Return lines about the step's time."""
    flops = sum(part.flops for part in made.work.values())
    moved = sum(part.num_bytes for part in made.work.values())
    lines = [
        f"a step on each rank: {flops / 1e12:,.2f} TFLOP on tensor cores, {moved / GB:,.2f} GB moved beside"
    ]
    if made.seconds is None or made.least_seconds is None:
        return [*lines, _untimed(made)]
    assert made.tokens_per_s is not None
    assert made.mfu is not None
    lines.append(
        f"predicted: {made.seconds * 1e3:,.1f} ms (at the data sheet's limits {made.least_seconds * 1e3:,.1f}), "
        f"{made.tokens_per_s:,.0f} tokens/s, MFU {made.mfu:.1%}"
    )
    lines.append("assumes that kernels come as near to the GPU's limits as lmkit's on an H200")
    if made.ranks > 1:
        lines.append("and that large messages take no time of their own")
    if made.seconds == made.host_seconds:
        lines += ["the host sets the pace, because no CUDA graph launches the kernels;", _TIMED[made.timed]]
    if made.documents:
        lines.append("attention counts as if documents saw one another, and takes less")
    return lines


def _untimed(made: Plan) -> str:
    """Return why there is no time."""
    from lmkit.measure.limits import known_peak

    why = f"{made.card.name}'s limits in {made.train.precision} are not known"
    if known_peak(made.card.name, "fp16") and made.train.precision.startswith("bf16"):
        why = f"{made.card.name} has no instructions for bf16"
    if made.on_host:
        why = "the host makes the optimizer's step, and its speed is not known"
    return f"no time is predicted: {why}"


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
            "ms": None if each.seconds is None or not each.fits else each.seconds * 1e3,
            "tokens": None if each.tokens_per_s is None or not each.fits else each.tokens_per_s,
        }
        for name, each in plans.items()
    ]
    columns: tuple[Column, ...] = (
        Column("gpu", "GPU"),
        Column("usable", "usable GB", ".1f"),
        Column("needs", "needs GB", ".2f"),
        Column("fits", "fits"),
        Column("rows", "largest batch", ",d"),
        Column("context", "longest context", ",d"),
        Column("ms", "ms a step", ",.1f"),
        Column("tokens", "tokens/s", ",.0f"),
    )
    if all(row["ms"] is None for row in rows):
        columns = columns[:-2]
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
    notes += dict.fromkeys(_untimed(each) for each in fitting if each.seconds is None)
    if any(each.seconds is not None and each.seconds == each.host_seconds for each in fitting):
        notes.append(f"where the host sets the pace, {_TIMED['reference']}")
    if not fitting:
        notes.append(_LESS)
    return "\n".join([head, "", terminal_table(rows, columns, width=98), *notes])
