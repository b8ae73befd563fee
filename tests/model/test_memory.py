"""Bytes that are planned against bytes that are alive when the real model runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from live_memory import LiveMemory

from lmkit.model import ModelConfig, TransformerLM, memory
from lmkit.recipe.tables import OptimizerConfig, ParallelConfig, TrainConfig
from lmkit.training import build_step
from lmkit.training.plan import form_of, held_by
from lmkit.training.precision import autocast

SIZES = {"vocab_size": 80, "context_length": 32, "d_model": 32, "d_ff": 80, "num_layers": 3, "num_heads": 4}
LEVELS: list[dict[str, Any]] = [
    *({}, {"activation_checkpointing": "block"}, {"activation_checkpointing": "attention"}),
    # 128 tokens: three inputs of blocks take 49 kB, all that three blocks keep a megabyte.
    *(
        {"activation_checkpointing": "selective", "activation_gb": kb * 1e-6}
        for kb in (90, 200, 300, 400, 900)
    ),
]
ROWS = 4
CPU = torch.device("cpu")


def build(precision: str, **fields: Any) -> tuple[Any, memory.Form, memory.Held]:
    config = ModelConfig(**{**SIZES, "attention": "sdpa", **fields})
    torch.manual_seed(0)
    step = build_step(config, precision=precision)
    train = TrainConfig(precision=precision, batch_size=ROWS)
    held = held_by(config, train, ParallelConfig(strategy="none"), OptimizerConfig(), 1)
    return step, form_of(config, precision, "cpu"), held


def batch(config: ModelConfig) -> torch.Tensor:
    return torch.randint(config.vocab_size or 0, (1, ROWS, config.context_length))


SHAPES: list[dict[str, Any]] = [
    {"num_kv_heads": 2, "attention": "flash_torch"},
    {"tie_embeddings": True},
    {"num_layers": 1, "context_length": 64, "d_ff": 96, "num_heads": 2},
    {"qk_norm": True, "num_kv_heads": 2},
    {"d_head": 20, "num_kv_heads": 2},
]


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({}, "bf16-autocast"),
        *((fields, name) for fields in LEVELS for name in ("fp32", "bf16")),
        *((each, "fp32") for each in SHAPES),
    ],
    ids=str,
)
def test_what_the_backward_pass_needs_is_planned_to_the_byte(fields, precision):
    step, form, held = build(precision, **fields)
    config, ids = step.model.config, batch(step.model.config)[0]
    planned = memory.step_memory(config, form, held, tokens=ids.numel())
    with LiveMemory() as live:
        with autocast(CPU, precision):
            loss = step.model.loss(ids, ids)
        assert live.live - loss.nbytes == sum(planned.activations.values()) + planned.loss
        loss.backward()


@pytest.mark.parametrize("fields", LEVELS[:5], ids=str)
def test_the_peak_of_forward_and_backward(fields):
    """Within 1% of what a step adds: the plan leaves out scalars and statistics of the loss."""
    step, form, held = build("fp32", vocab_size=16, d_ff=96, **fields)
    ids = batch(step.model.config)
    planned = memory.step_memory(step.model.config, form, held, tokens=ids.numel())
    with LiveMemory() as live:
        step.accumulate(ids, ids)
    assert live.peak == pytest.approx(planned.peak - planned.weights - planned.optimizer, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_held_from_step_to_step(precision):
    step, _, held = build(precision)
    ids = batch(step.model.config)
    planned = memory.training_memory(step.model.config, held)
    step.accumulate(ids, ids)
    parameters = list(step.model.parameters())
    assert planned.gradients == sum(p.grad.nbytes for p in parameters)
    step.optimizer.step()
    state = step.optimizer.state.values()
    assert planned.weights == sum(p.nbytes for p in parameters)
    assert planned.optimizer == sum(x.nbytes for each in state for name, x in each.items() if name != "step")


def test_a_forward_pass_that_is_dropped_leaves_nothing():
    """Saved-tensor hooks that hold an output make a cycle that no garbage collector sees."""
    model = TransformerLM(ModelConfig(**SIZES, activation_checkpointing="attention"))
    ids = batch(model.config)[0]
    with LiveMemory() as live:
        model.loss(ids, ids)
        assert live.live == 0
        model.loss(ids, ids).backward()
        model.zero_grad()
        assert live.live <= 2 * 4 * 3 * 32  # caches of PyTorch


def test_shards_and_gathered_units():
    config = ModelConfig(**SIZES)
    form = memory.Form(True, "cuda", 2, 2)
    whole = memory.step_memory(config, form, memory.Held(2, 2, 4), tokens=128)
    sharded = memory.Held(4, 4, 0, of_weights=1 / 4, of_gradients=1 / 4, of_state=1 / 4, gathered_units=2)
    parts = memory.step_memory(config, form, sharded, tokens=128)
    block, table = 4 * 32 * 32 + 3 * 32 * 80 + 64, 80 * 32
    total = 3 * block + 32 + 2 * table
    assert parts.weights == parts.gradients == total
    assert parts.optimizer == 2 * total
    # In the first block's backward pass: its weights, the embedding's, gradients of two blocks.
    assert parts.gathered == 2 * (3 * block + table)
    # Two slots that other GPUs read, each of a shard in bf16: less than the allocator takes for a tensor of its own.
    shared = memory.step_memory(config, form, replace(sharded, is_shared=True), tokens=128)
    assert shared.gathered == parts.gathered + 2 * memory.MIB
    large = config.model_copy(update={"d_model": 8192, "d_ff": 32_768})  # gathered by the backend: no slots
    assert (
        memory.step_memory(large, form, replace(sharded, is_shared=True), tokens=128).gathered
        == memory.step_memory(large, form, sharded, tokens=128).gathered
    )
    zero1 = memory.step_memory(config, form, memory.Held(2, 2, 4, of_state=1 / 4, is_shared=True), tokens=128)
    quarter = memory.step_memory(config, form, memory.Held(2, 2, 4, of_state=1 / 4), tokens=128)
    assert zero1.peak == quarter.peak + 2 * memory.MIB - whole.weights
    assert parts.activations == whole.activations
    assert whole.optimizer == 8 * total + 4 * (total - 7 * 32)


def test_segments_of_the_allocator():
    mib = memory.MIB
    taken = {1: 2, mib: 2, mib + 1: 20, 10 * mib - 1: 20, 10 * mib: 10, 10 * mib + 1: 12}
    assert {size: memory.segment(size) / mib for size in taken} == taken


def test_a_budget_bounds_what_blocks_keep():
    form = memory.Form(True, "cuda", 2, 2)
    for kb in range(25, 600, 25):
        config = ModelConfig(**SIZES, activation_checkpointing="selective", activation_gb=kb * 1e-6)
        total = sum(memory.step_memory(config, form, memory.Held(), tokens=128).activations.values())
        total -= 128 * (2 * 32 + 4)  # the norm in front of the head is no block's
        assert total <= kb * 1e3
        assert kb < 250 or total > 0.8 * min(kb * 1e3, 3 * 128 * 2 * (8 * 32 + 3 * 80)), kb
        assert len(memory.kept_by_layers(config, form, tokens=128)) == 3


def test_a_budget_is_spent_on_the_dearest_first():
    config = ModelConfig(**SIZES, attention="sdpa")
    form = memory.Form(reuses_memory=True, device="cuda", stream=2, product=2)
    size = {keep: 1000 * sum(memory.kept(config, form, keep).values()) for keep in memory.KEEPS}
    assert list(size.values()) == sorted(size.values())

    def choose(budget: int) -> list[str]:
        asked = {"activation_checkpointing": "selective", "activation_gb": budget / 1e9}
        return memory.kept_by_layers(config.model_copy(update=asked), form, tokens=1000)

    assert choose(1) == choose(3 * size["input"]) == ["input"] * 3
    assert choose(2 * size["input"] + size["attention"] + 1) == ["input", "input", "attention"]
    assert choose(3 * size["attention"] - 1) == ["input", "attention", "attention"]
    assert choose(2 * size["attention"] + size["qkv"] + 1) == ["attention", "attention", "qkv"]
    assert choose(2 * size["products"] + size["all"] + 1) == ["products", "products", "all"]
    assert choose(3 * size["all"] + 1) == ["all"] * 3
