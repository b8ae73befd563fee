"""The whole training step on a GPU: nothing waits for it, and the device decides."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager

import pytest
import run_folders
import step_ranks
import torch

from lmkit.core.batches import RandomTokens
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import OptimizerConfig
from lmkit.training.resume import load_checkpoint, save_checkpoint
from lmkit.training.setup import build_step
from lmkit.training.step import Step

pytestmark = pytest.mark.gpu

BATCHES = RandomTokens(256, batch_size=8, context_length=64, seed=0, accumulation=2)
PRECISIONS = ["fp32", "bf16", "bf16-autocast", "fp16"]
MUON = {"precision": "bf16", "optimizer": OptimizerConfig(name="muon")}


def batch(number):
    return [tensor.cuda() for tensor in BATCHES.batch(number)]


def make_step(**options):
    torch.manual_seed(0)
    return build_step(step_ranks.CONFIG, Ranks(device=torch.device("cuda")), **options)


@contextmanager
def no_waiting():
    """Check that the host does not wait for the GPU, which sleeps first."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        yield
        assert not torch.cuda.current_stream().query(), "the host has waited for the sleep"
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The mode is a prototype, PyTorch says.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("options", [*({"precision": name} for name in PRECISIONS), MUON])
def test_a_step_never_waits_for_the_gpu(options):
    """Two steps are queued: the driver holds about 1,000 launches, and any host waits for the next."""
    step = make_step(**options, max_skips=0)
    assert step.runs_ahead
    batches = [batch(number) for number in range(5)]
    for number in range(3):
        step(*batches[number], lr=1e-3)
    with no_waiting():
        outcomes = [step(*batches[number], lr=1e-3 / (number + 1)) for number in range(3, 5)]
    assert all(outcome.applied for outcome in outcomes)
    assert all(outcome.loss.item() == outcome.losses.item() for outcome in outcomes)
    assert len({outcome.loss.item() for outcome in outcomes}) == 2


def test_a_masked_step_weighs_its_slices_in_a_graph_too():
    losses = []
    for graph in ("off", "on"):
        step = make_step(masked=True, cuda_graph=graph)
        found = []
        for number in range(6):
            inputs, targets = batch(number)
            targets[0, :, 9 * number :] = -1
            found.append(step(inputs, targets, lr=1e-3).loss.item())
        losses.append(found)
    assert step.graph.note.startswith("CUDA graph: on")
    # Sums by atomics in the backward pass differ in their order.
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


SIZES = ("vocab_size=256", "context_length=64", "d_model=128", "d_ff=256", "num_layers=2", "num_heads=2")


def recipe(folder, name, *more):
    keys = [f'run.folder="{folder}"', f"run.name={name}", "run.device=cuda", "run.deterministic=true"]
    keys += ["data.source=random", *(f"model.{size}" for size in SIZES), "optimizer.warmup_steps=2"]
    keys += ["train.steps=10", "train.batch_size=8", "train.accumulation=2", "train.log_interval=1"]
    return load_recipe(None, [*keys, 'train.nonfinite="skip"', *more])


def spoil(monkeypatch, steps):
    """Make the loss of some steps (counted from 1) NaN; the host does not wait, and a graph sees it."""
    make, accumulate, calls = Step.__call__, Step.accumulate, iter(range(1, 1000))
    factor = torch.ones((), device="cuda")

    def called(self, *batch, **options):
        factor.fill_(math.nan if next(calls) in steps else 1.0)
        return make(self, *batch, **options)

    monkeypatch.setattr(Step, "__call__", called)
    monkeypatch.setattr(Step, "accumulate", lambda self, *batch: accumulate(self, *batch) * factor)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_and_without_graph_or_waiting_runs_are_the_same_and_resume_bit_for_bit(
    precision, tmp_path, monkeypatch
):
    """Checkpoints are written between replays, and two steps have a NaN loss."""
    monkeypatch.setattr("lmkit.training.metrics.draw_losses", lambda *arguments, **options: None)

    def run(name, graph, **options):
        keys = [f"train.precision={precision}", f"train.cuda_graph={graph}", "checkpoint.interval=4"]
        chosen = recipe(tmp_path, name, *keys)
        run_folders.train_here(chosen, **options)
        return chosen

    with monkeypatch.context() as patch:
        spoil(patch, {3, 8})
        eager = run("eager", "off")
    others = []
    for name, graph, ahead in (("waiting", "off", False), ("graph", "on", True), ("auto", "auto", True)):
        with monkeypatch.context() as patch:
            spoil(patch, {3, 8})
            if not ahead:
                patch.setattr(Step, "runs_ahead", False)
            others.append(run(name, graph))
    for first in (1, 5, 9):
        with monkeypatch.context() as patch:
            spoil(patch, {3, 8})
            run(f"parts{first}", "on", stop_at_step=first)
        with monkeypatch.context() as patch:
            spoil(patch, {3 - first, 8 - first})
            others.append(run(f"parts{first}", "on"))
    assert len(run_folders.losses(eager)) == 8
    for other in others:
        for kind in ("train", "skip"):
            assert run_folders.losses(eager, kind) == run_folders.losses(other, kind)
        run_folders.assert_same_state(run_folders.newest(eager), run_folders.newest(other))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_whose_state_is_on_the_host_is_resumed_bit_for_bit(precision, tmp_path, monkeypatch):
    monkeypatch.setattr("lmkit.training.metrics.draw_losses", lambda *arguments, **options: None)
    whole = recipe(tmp_path, "whole", "optimizer.name=adamw_host", f"train.precision={precision}")
    run_folders.assert_resumes_exactly(whole, of=("train",))


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("options", [*({"precision": name} for name in PRECISIONS), MUON])
def test_replays_wait_for_nothing_and_other_shapes_and_loaded_state_are_noticed(
    options, tmp_path, deterministic
):
    graph, eager = (make_step(**options, cuda_graph=mode) for mode in ("on", "off"))
    for number in range(4):
        for step in (graph, eager):
            step(*batch(number), lr=1e-3)
    assert graph.graph._graph is not None
    batches = [batch(number) for number in range(4, 7)]
    with no_waiting():
        outcomes = [graph(*of_step, lr=1e-3) for of_step in batches]
    losses = [outcome.loss.item() for outcome in outcomes]
    assert losses == [eager(*of_step, lr=1e-3).loss.item() for of_step in batches]
    assert step_ranks.same_weights(graph, eager)
    inputs, targets = batch(7)
    for step in (graph, eager):
        step(inputs[:1], targets[:1], lr=1e-3)  # another shape
        step(*batch(8), lr=1e-3)
    assert step_ranks.same_weights(graph, eager)
    assert graph.graph._graph is not None
    save_checkpoint(eager.model, eager.optimizer, 9, tmp_path / "step.safetensors")
    for step in (graph, eager):
        step(*batch(9), lr=1e-3)
        load_checkpoint(tmp_path / "step.safetensors", step.model, step.optimizer)
        for number in range(10, 15):
            step(*batch(number), lr=1e-3)
    assert step_ranks.same_weights(graph, eager)
    assert graph.graph._graph is not None


def test_the_host_is_free_where_it_would_set_the_pace():
    """`auto` captures a small model, whose host then launches one graph."""
    step = make_step(precision="bf16", cuda_graph="auto")
    of_step, host_ms = batch(0), []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(*of_step, lr=1e-3)
        host_ms.append((time.perf_counter() - started) * 1e3)
    assert step.graph.note.startswith("CUDA graph: on")
    eager, replayed = sorted(host_ms[1:4])[0], sorted(host_ms[10:])[10]
    print(f"host: {eager:.2f} ms without, {replayed:.2f} ms with a graph")
    assert replayed < eager / 4


def test_a_step_that_cannot_be_captured_goes_on_without():
    def wait(*_):
        torch.ones((), device="cuda").item()

    step = make_step(cuda_graph="on")
    step.model.ln_final.register_forward_hook(wait)
    outcomes = [step(*batch(number), lr=1e-3) for number in range(6)]
    assert all(outcome.applied for outcome in outcomes)
    assert step.graph.note.startswith("CUDA graph: off")
    assert [step.optimizer.state[p]["step"].item() for p in step.model.parameters()][:2] == [6, 6]
    torch.randn(3, device="cuda")  # the generator is usable again
    torch.cuda.empty_cache()  # fails while the allocator is in a recording, which keeps what two streams used
    used = torch.empty(1 << 20, device="cuda")
    used.record_stream(torch.cuda.Stream())
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    del used
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("strategy", "wish", "keys"),
    [
        *((name, "on", {}) for name in ("flat", "bucketed", "zero1", "fsdp")),
        *((name, "auto", {}) for name in ("bucketed", "naive", "overlap", "zero1", "fsdp")),
        *((name, "on", {"gather": "collective"}) for name in ("zero1", "fsdp")),
    ],
)
def test_a_graph_holds_the_collectives_of_two_ranks(strategy, wish, keys, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    note, graph, eager, same = spawn_ranks(2, step_ranks.captured_like_eager, (strategy, wish, keys))
    # Beside other programs, these small steps wait for the GPUs.
    assert note.startswith("CUDA graph: on") or (wish == "auto" and "the host is busy" in note), note
    assert graph == eager
    assert same


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("place", ["backward", "backward of one rank", "end"])
@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "fsdp"])
def test_ranks_whose_step_cannot_be_captured_go_on_without(strategy, place, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    note, graph, eager, same = spawn_ranks(2, step_ranks.goes_on_without, (strategy, place))
    why = "another rank cannot capture its step" if "one" in place else "the step cannot be captured"
    assert note.startswith(f"CUDA graph: off, {why}"), note
    assert graph == eager
    assert same
