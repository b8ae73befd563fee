"""Planned memory against a real step, from the quickstart's model to 1.4 billion parameters."""

from typing import Any

import plan_ranks
import pytest
import torch
from raising import raises

from lmkit.bench.step import FIELDS, SIZES, FewBatches
from lmkit.core.batches import RandomTokens
from lmkit.errors import LmkitError
from lmkit.measure.environment import card_here
from lmkit.measure.memory import claim_workspaces, memory_in_use, release_memory, track_peak
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.recipe import Recipe
from lmkit.training.plan import Plan, plan
from lmkit.training.setup import TrainingStep

pytestmark = pytest.mark.gpu
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("quickstart", {}),
    ("matrix", {}),
    *(("162M", {"activation_checkpointing": how}) for how in ("none", "block", "attention")),
    ("162M", {"activation_checkpointing": "selective", "activation_gb": 5.0}),
    ("162M", {"precision": "bf16-autocast"}),
    ("162M", {"operations": "plain"}),
    ("162M", {"attention": "sdpa"}),
    ("162M", {"compile": "block"}),
    ("162M", {"num_kv_heads": 4, "tie_embeddings": True}),
    ("1.3B", {}),
    ("1.3B", {"activation_checkpointing": "attention"}),
]


def planned(size: str, fields: dict[str, Any]) -> Plan:
    batch_size, shape = SIZES[size]
    fields = dict(fields)
    train = [f"train.batch_size={batch_size}", f"train.precision={fields.pop('precision', 'bf16')}"]
    model = (
        dict(zip(FIELDS, shape, strict=True)) | {"num_kv_heads": shape[2], "tie_embeddings": False} | fields
    )
    keys = [f"model.{key}={str(value).lower()}" for key, value in model.items()]
    return plan(load_recipe("llama_1b", [*keys, *train]), card_here())


@pytest.mark.parametrize(("size", "fields"), SETTINGS, ids=str)
def test_the_peak_is_within_5_percent(size, fields):
    """Without a CUDA graph, whose memory the allocator counts apart."""
    torch.compiler.reset()
    made = planned(size, fields)
    precision = made.train.precision
    device = torch.device("cuda")
    claim_workspaces(device)
    release_memory(device)
    before = memory_in_use(device)
    random = RandomTokens(
        made.config.vocab_size or 0, batch_size=made.rows, context_length=made.config.context_length, seed=0
    )
    batches = FewBatches(tuple(random.batch(number) for number in range(2)))
    ranks = Ranks(device=torch.device("cuda", 0))
    train = made.train.changed(cuda_graph="off")
    step = TrainingStep(Recipe(model=made.config, train=train), ranks, batches)
    for _ in range(3):
        step.run(wait=True)
    with track_peak(device) as peak:
        step.run(wait=True)
    measured = peak.peak_bytes - before
    print(
        f"{size} {fields} {precision}: planned {made.memory.peak / 1e9:.3f} GB in {made.memory.peaks_at}, "
        f"measured {measured / 1e9:.3f}"
    )
    del step
    release_memory(device)
    # A tensor of a small model is rounded up to 512 bytes or 2 MiB.
    assert made.memory.peak == pytest.approx(measured, rel=0.05, abs=8 * 2**20)


@pytest.mark.parametrize("factor", [1.05, 0.95])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, []) for name in ("text_files", "quickstart", "chat", "finetune")),
        *((name, []) for name in ("speedrun", "tinystories", "profile")),
        ("quickstart", ["train.precision=bf16", "model.attention=flash_triton"]),
        ("llama_1b", ["model.activation_checkpointing=block"]),
        ("llama_1b", ["model.num_layers=4", "train.batch_size=2"]),
    ],
    ids=str,
)
def test_what_fits_fits_and_what_does_not_raises(name, keys, factor):
    """The allocator may take 5% more than planned, as on a card of that size, or 5% less.

    Of models below 2 GB, what segments of 2 and 20 MiB may add is known less closely.
    """
    torch.compiler.reset()
    setting = (name, (*keys, "run.device=cuda"), "bucketed")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        if factor > 1:
            plan_ranks.at_edge(setting, factor)
        else:
            with raises(LmkitError, "memory.exhausted"):
                plan_ranks.at_edge(setting, factor)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release_memory(device)


LARGE = "llama_1b", ("model.activation_checkpointing=attention", "model.tie_embeddings=false")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_the_peak_of_two_ranks_is_within_5_percent():
    models = [("quickstart", ()), ("profile", ()), ("llama_1b", ()), LARGE]
    settings = [(*model, strategy) for model in models for strategy in ("zero1", "fsdp")]
    for made, found in spawn_ranks(2, plan_ranks.in_one_group, (settings,)):
        assert made.memory.peak == pytest.approx(found.peak_bytes, rel=0.05), made


@two_gpus
@pytest.mark.parametrize("setting", [("llama_1b", (), "zero1"), (*LARGE, "fsdp")], ids=str)
def test_two_ranks_fit_as_planned_and_raise_where_5_percent_are_missing(setting):
    spawn_ranks(2, plan_ranks.at_edge, (setting, 1.05))
    with raises(LmkitError, "memory.exhausted"):
        spawn_ranks(2, plan_ranks.at_edge, (setting, 0.95))
