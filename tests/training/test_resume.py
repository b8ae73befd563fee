"""Resuming: the same run bit for bit, from the newest good checkpoint, or refused."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from raising import raises
from run_folders import PACKED, assert_resumes_exactly, assert_same_state, newest, train_here
from torch import nn

from lmkit.core.adamw import decay_groups
from lmkit.errors import LmkitError, UsageError
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.registry import OPTIMIZERS
from lmkit.storage.atomic import FolderLock
from lmkit.training.checkpoint import MODEL, newest_checkpoint, step_name, verify
from lmkit.training.resume import load_checkpoint, load_optimizer_tensors, optimizer_tensors, save_checkpoint
from lmkit.training.weights import load_weights, model_weights, weights_of


@pytest.mark.parametrize(
    ("stop", "precision", "optimizer"),
    [*((stop, "fp32", "adamw") for stop in (1, 5, 9)), (5, "bf16", "adamw"), (5, "bf16", "muon")],
)
def test_fault_54_steps_are_5_and_5_bit_for_bit(stop, precision, optimizer, tiny):
    recipe = tiny(f"train.precision={precision}", f"optimizer.name={optimizer}")
    _, parts = assert_resumes_exactly(recipe, stops=(stop,))
    assert newest(parts).state.valid_loss is None  # evaluated after steps 4 and 8


class Keeps(torch.optim.Optimizer):
    """Its updates depend on states of many kinds, which a step asks to be as it left them."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0, "d": 1.0, "t": torch.tensor(1.0)})

    @staticmethod
    def new_state(p):
        counts = {"number": 0, "real": 0.5, "count": torch.tensor(0), "share": torch.tensor(0.5).double()}
        dtypes = {"exact": torch.float64, "mask": torch.bool, "narrow": torch.bfloat16}
        zeros = {name: torch.zeros_like(p, dtype=dtype) for name, dtype in dtypes.items()}
        turned = torch.zeros_like(p.mT if p.dim() > 1 else p).contiguous()
        return counts | zeros | {"turned": turned, "history": torch.zeros(0)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 0.7
            group["t"] = group["t"] / 3
            for p in group["params"]:
                state = self.state[p]
                state.update(state or self.new_state(p))
                for name, value in self.new_state(p).items():
                    kept = state[name]
                    assert type(kept) is type(value), name
                    if isinstance(value, torch.Tensor) and name != "history":
                        assert (kept.dtype, kept.shape) == (value.dtype, value.shape), name
                state["number"] += 1
                state["real"] /= 3
                state["count"] += 1
                state["share"] /= 3
                gradient = p.grad
                state["exact"].add_(gradient, alpha=1 / 3)
                state["mask"] |= gradient > 0
                state["narrow"].add_(gradient.bfloat16())
                state["turned"].add_(gradient.mT if p.dim() > 1 else gradient)
                state["history"] = torch.cat([state["history"], gradient.norm()[None]])
                rate = group["lr"] * group["d"] / group["k"] * (1 + state["real"] + float(group["t"]))
                p.add_(state["exact"] * ~state["mask"] + state["narrow"], alpha=-rate * float(state["share"]))


def test_every_state_of_an_optimizer_goes_on(tiny):
    OPTIMIZERS.register("keeps")(lambda groups, options: Keeps(groups, options.lr))
    assert_resumes_exactly(tiny("train.precision=fp32", "optimizer.name=keeps"), stops=(5,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("h", value) for value in (None, "x", [1.0, 2.5], {}, 2**70, 1j, torch.eye(3).to_sparse())),
        ("h", torch.ones(2, dtype=torch.cfloat)),
        (None, {"k": 1}),
    ],
    ids=str,
)
def test_a_state_that_checkpoints_cannot_hold_is_refused(key, value):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight if key else "global"] = {key: value} if key else value
    with raises(LmkitError, "checkpoint.unsupported_state", "weight" if key else "global"):
        optimizer_tensors(optimizer, layer)


@pytest.mark.parametrize(
    ("optimizers", "strategies", "precision"),
    [
        *((("adamw", "sgd"), ("none", "none"), "fp32"), (("sgd", "adamw"), ("zero1", "fsdp"), "fp32")),
        *((("muon", "adamw"), ("bucketed", "zero1"), "bf16"), (("adamw", "muon"), ("fsdp", "fsdp"), "bf16")),
    ],
)
def test_fault_171_another_optimizer_takes_over_no_state(optimizers, strategies, precision, tiny, capsys):
    first, second = (
        tiny(f"optimizer.name={name}", f"parallel.strategy={strategy}", f"train.precision={precision}")
        for name, strategy in zip(optimizers, strategies, strict=True)
    )
    fresh = second.changed(run={"name": "fresh"})
    train_here(fresh, stop_at_step=2)
    train_here(first, stop_at_step=5)
    assert train_here(second, stop_at_step=7).resumed_from == 5
    assert f"{optimizers[1]} begins without the state of {optimizers[0]}" in capsys.readouterr().err
    wanted, found = (newest(recipe).optimizer_tensors() for recipe in (fresh, second))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if name.endswith(".step"))


def test_packed_documents_resume_bit_for_bit_in_the_middle_of_an_epoch(tiny):
    """4000 tokens are an epoch of 62.5 steps, whose last row ends in the next epoch."""
    whole = tiny(*PACKED, "train.steps=66", "train.eval_interval=0", "run.name=whole")
    assert_resumes_exactly(whole, stops=(7, 62), of=("train", "final"))
    with raises(LmkitError, "resume.other_recipe", "data.sampling"):
        train_here(tiny("model.separate_documents=true", "run.name=whole"))


def test_fault_44_and_45_a_damaged_newest_checkpoint_is_passed_over_and_named(tiny, capsys):
    whole, recipe = tiny("run.name=whole"), tiny("checkpoint.interval=3", "run.name=damaged")
    train_here(whole)
    train_here(recipe, stop_at_step=6)
    path = recipe.run.path / "checkpoints" / step_name(6) / MODEL
    aside = path.parent.with_name(f"{step_name(6)}.damaged")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    capsys.readouterr()
    assert train_here(recipe).resumed_from == 3
    said = capsys.readouterr().err
    assert f"skipped {path}" in said
    assert f"resuming from {path.parent.parent / step_name(3)}" in said
    assert_same_state(newest(whole), newest(recipe))
    verify(newest(recipe).path)
    assert str(aside) in said
    assert (aside / MODEL).read_bytes() == damaged


def test_fault_111_no_damaged_checkpoint_is_deleted_by_the_steps_that_are_made_again(tiny):
    recipe = tiny("checkpoint.interval=1", "checkpoint.keep_last=4")
    folder = recipe.run.path / "checkpoints"
    train_here(recipe, stop_at_step=4)
    for _ in range(2):  # the second time step-...3.damaged is there already
        for step in (3, 4):
            (folder / step_name(step) / MODEL).write_bytes(b"damaged")
        train_here(tiny("checkpoint.interval=1", "checkpoint.keep_last=2"), stop_at_step=3)
        train_here(tiny("checkpoint.interval=1", "checkpoint.keep_last=4"), stop_at_step=4)
    damaged = sorted(path.name for path in folder.iterdir() if (path / MODEL).read_bytes() == b"damaged")
    kept = [f"{step_name(step)}.damaged" for step in (3, 4)]
    assert damaged == sorted(kept + [f"{name}.damaged" for name in kept])


def test_fault_126_links_in_place_of_checkpoints_neither_stop_training_nor_lose_what_they_name(
    tiny, tmp_path
):
    """One leads to a checkpoint that was moved away and is pruned now, one to nothing, one is a leftover."""
    recipe = tiny("checkpoint.interval=2", "checkpoint.keep_last=2")
    train_here(recipe, stop_at_step=4)
    folder = recipe.run.path / "checkpoints"
    moved, gone = tmp_path / "moved", tmp_path / "gone"
    (folder / step_name(2)).rename(moved)
    (folder / step_name(2)).symlink_to(moved)
    (folder / step_name(6)).symlink_to(gone)
    (folder / (step_name(8) + ".lmkit-partial")).symlink_to(moved)
    assert train_here(recipe).resumed_from == 4
    verify(moved)
    assert {path.name for path in folder.iterdir() if not path.is_symlink()} == {step_name(8), step_name(10)}
    assert [path.name for path in folder.iterdir() if path.is_symlink()] == [f"{step_name(6)}.damaged"]


@pytest.mark.parametrize("put", [lambda path: path.symlink_to("/nowhere/checkpoints"), Path.touch])
def test_fault_172_a_run_whose_checkpoints_lie_on_a_lost_disk_does_not_begin_anew(put, tiny):
    recipe = tiny()
    train_here(recipe, stop_at_step=2)
    folder, metrics = recipe.run.path / "checkpoints", (recipe.run.path / "metrics.jsonl").read_bytes()
    folder.rename(folder.with_name("elsewhere"))
    put(folder)
    with pytest.raises(OSError, match=str(folder)):
        train_here(recipe)
    assert (recipe.run.path / "metrics.jsonl").read_bytes() == metrics
    folder.unlink()
    folder.symlink_to(folder.with_name("elsewhere"))
    assert train_here(recipe).resumed_from == 2


def test_fault_55_a_changed_learning_rate_goes_on_and_says_so(tiny, capsys):
    train_here(tiny(), stop_at_step=5)
    capsys.readouterr()
    result = train_here(tiny("optimizer.lr=0.0005", "train.accumulation=1", "model.operations=plain"))
    assert result.resumed_from == 5
    said = capsys.readouterr().err
    assert "optimizer.lr: 0.001 -> 0.0005" in said
    assert "train.accumulation: 2 -> 1" in said
    assert "model.operations: auto -> plain" in said


@pytest.mark.parametrize("change", ["model.d_model=32", "run.seed=3", 'train.precision="bf16"'])
def test_fault_55_a_change_that_would_not_continue_the_run_is_refused_with_the_difference(change, tiny):
    train_here(tiny(), stop_at_step=1)
    before = newest(tiny()).path.stat().st_mtime_ns
    key, _, value = change.partition("=")
    with raises(UsageError, "resume.other_recipe", key, f"-> {value.strip(chr(34))}"):
        train_here(tiny(change))
    assert newest(tiny()).path.stat().st_mtime_ns == before


def test_another_token_file_is_refused(tiny, token_files, tmp_path):
    train_here(tiny(), stop_at_step=1)
    for suffix in (".npy", ".json"):
        shutil.copy(token_files[0].with_suffix(suffix), tmp_path / f"other{suffix}")
    same = tiny(f'data.train="{tmp_path / "other.npy"}"')
    train_here(same, stop_at_step=2)  # the same content elsewhere is the same data
    sidecar = tmp_path / "other.json"
    sidecar.write_text(sidecar.read_text().replace("b" * 64, "c" * 64))
    with raises(UsageError, "resume.other_recipe", "data.train", "c" * 12):
        train_here(same)


def test_fault_57_a_malicious_pickle_is_never_executed(tiny, tmp_path):
    sentinel = tmp_path / "executed"
    payload = pickle.dumps(Touch(sentinel))
    recipe = tiny()
    train_here(recipe, stop_at_step=1)
    checkpoint = newest(recipe).path
    for name in [path.name for path in checkpoint.iterdir()]:
        evil = tmp_path / f"evil-{name}"
        shutil.copytree(checkpoint, evil)
        (evil / name).write_bytes(payload)
        for attempt in (
            lambda path=evil: weights_of(newest_checkpoint(path)).model("cpu"),
            lambda path=evil: train_here(tiny("run.name=other", f'checkpoint.resume="{path}"')),
        ):
            try:
                attempt()
            except LmkitError:
                continue
            # Generating needs no optimizer state, so its file is not even opened.
            assert name.startswith("optimizer")
    assert not sentinel.exists()


def test_fault_60_a_missing_optimizer_shard_is_an_error_when_asked_for_by_name(tiny):
    recipe = tiny()
    train_here(recipe, stop_at_step=1)
    checkpoint = newest(recipe).path
    (shard,) = checkpoint.glob("optimizer-*")
    shard.unlink()
    with raises(LmkitError, "checkpoint.incomplete", shard.name):
        train_here(tiny("run.name=other", f'checkpoint.resume="{checkpoint}"'))
    with raises(LmkitError, "checkpoint.none_good", shard.name):
        train_here(recipe)


def test_fault_61_two_runs_in_one_folder(tiny):
    recipe = tiny()
    with FolderLock(recipe.run.path), raises(LmkitError, "storage.folder_busy", recipe.run.path):
        train_here(recipe)
    train_here(recipe, stop_at_step=1)


def test_resuming_a_finished_run_does_nothing(tiny, caplog):
    recipe = tiny()
    first = train_here(recipe)
    metrics = (recipe.run.path / "metrics.jsonl").read_bytes()
    again = train_here(recipe)
    assert again.status == "nothing to do"
    assert "nothing to do" in str(again)
    assert (again.evaluation.loss, again.loss, again.step) == (first.evaluation.loss, first.loss, 10)
    assert (recipe.run.path / "metrics.jsonl").read_bytes() == metrics
    assert train_here(recipe, stop_at_step=5).status == "nothing to do"
    assert "changed since" not in caplog.text
    assert train_here(tiny("model.attention=reference")).status == "nothing to do"
    assert "changed since that checkpoint: model.attention" in caplog.text
    longer = train_here(tiny("train.steps=12"))
    assert (longer.status, longer.resumed_from, longer.step) == ("finished", 10, 12)


def test_resume_from_a_named_checkpoint(tiny):
    recipe = tiny("checkpoint.interval=5", "checkpoint.keep_last=9")
    train_here(recipe)
    older = recipe.run.path / "checkpoints" / step_name(5)
    with raises(UsageError, "resume.refused", older, step_name(10)):
        train_here(tiny(f'checkpoint.resume="{older}"'))
    branch = tiny("run.name=branch", f'checkpoint.resume="{older}"')
    assert train_here(branch).resumed_from == 5
    assert_same_state(newest(recipe), newest(branch))
    with raises(UsageError, "checkpoint.not_found", "nowhere"):
        train_here(tiny("run.name=x", 'checkpoint.resume="nowhere"'))
    last = recipe.run.path / "checkpoints" / step_name(10)
    assert train_here(tiny("train.steps=11", f'checkpoint.resume="{last}"')).resumed_from == 10


# Weights and optimizer state as named tensors: of plain, wrapped, tied and sharded models

CONFIG = ModelConfig(vocab_size=64, context_length=8, d_model=16, d_ff=32, num_layers=2, num_heads=2)


def make_model(**changes: object) -> TransformerLM:
    return TransformerLM(CONFIG.model_copy(update=changes))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


Make = Callable[[nn.Module], torch.optim.Optimizer]
SEVERAL: dict[str, Make] = {
    "ours": lambda model: AdamW(decay_groups(model.parameters(), 0.1)),
    "torch": lambda model: torch.optim.AdamW(model.parameters()),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "factored": lambda model: torch.optim.Adafactor(model.parameters()),  # states of rows and columns
}


@pytest.mark.parametrize("place", ["file", "file object"])
@pytest.mark.parametrize("name", SEVERAL)
def test_going_on_from_a_saved_checkpoint_equals_never_having_stopped(name, place, tmp_path):
    model, other = make_model(), make_model()
    optimizer = SEVERAL[name](model)
    take_steps(model, optimizer, 3, seed=1)
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does
    out = tmp_path / "new" / "c.safetensors" if place == "file" else io.BytesIO()
    save_checkpoint(model, optimizer, 3, out)
    take_steps(model, optimizer, 2, seed=2)

    resumed = SEVERAL[name](other)
    if isinstance(out, io.BytesIO):
        out.seek(0)
    assert load_checkpoint(out, other, resumed) == 3
    assert resumed.param_groups[0]["lr"] == 0.05
    kinds, found = ([*map(type, each.defaults.values())] for each in (optimizer, resumed))
    assert found == kinds
    take_steps(other, resumed, 2, seed=2)
    for key, value in model_weights(model).items():
        assert torch.equal(value, model_weights(other)[key]), key
    after = optimizer_tensors(resumed, other)
    for key, value in optimizer_tensors(optimizer, model).items():
        assert torch.equal(value, after[key]), key


def test_strided_weights_and_a_tensor_as_learning_rate_are_saved(tmp_path):
    model, other = (nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last) for _ in range(2))
    save_checkpoint(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25)), 3, tmp_path / "c")
    optimizer = torch.optim.Adam(other.parameters())
    assert load_checkpoint(tmp_path / "c", other, optimizer) == 3
    assert torch.equal(other.weight, model.weight)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_checkpoint_without_optimizer_and_one_on_a_sharded_one(tmp_path):
    model, other = make_model(), make_model()
    save_checkpoint(model, None, 7, tmp_path / "weights")
    assert load_checkpoint(str(tmp_path / "weights"), other, SEVERAL["ours"](other)) == 7
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    sync = Zero1(Ranks(), ParallelConfig(strategy="zero1"))
    sync.attach(model)
    sharded = sync.build_optimizer(torch.optim.AdamW, [{"params": list(model.parameters())}])
    loss = model.loss(torch.arange(8)[None], torch.arange(8)[None])
    loss.backward()
    sync.finish()
    sharded.step()
    save_checkpoint(model, sharded, 8, tmp_path / "sharded")
    plain = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(tmp_path / "sharded", other, plain) == 8
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert plain.state[other.lm_head.weight]["exp_avg"].abs().sum() > 0


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_fault_57_a_pickle_is_refused_by_load_checkpoint(tmp_path):
    model, path, sentinel = make_model(), tmp_path / "model.safetensors", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Touch(sentinel)))
    with raises(LmkitError, "checkpoint.damaged", path):
        load_checkpoint(path, model)
    assert not sentinel.exists()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "nothing", model)
    save_checkpoint(make_model(d_model=32), None, 1, path)
    with raises(UsageError, "checkpoint.other_model", path):
        load_checkpoint(path, model)
    save_checkpoint(model, SEVERAL["torch"](model), 1, path)
    with pytest.raises(ValueError, match="argument"):
        load_checkpoint(path, model, SEVERAL["ours"](model))  # which has two parameter groups


def test_state_of_another_model_is_refused_with_the_difference():
    model, other = make_model(), make_model(num_layers=1)
    optimizer = SEVERAL["ours"](model)
    take_steps(model, optimizer, 1, seed=1)
    with raises(LmkitError, "checkpoint.other_optimizer", "saved", "layers.1"):
        load_optimizer_tensors(
            SEVERAL["ours"](other), other, [optimizer_tensors(optimizer, model)], None, origin="saved"
        )
    with raises(LmkitError, "checkpoint.other_model", "layers.0.ln1.weight: saved 16, model 32"):
        load_weights(make_model(d_model=32), model_weights(model), origin=Path("saved"))
    with raises(LmkitError, "checkpoint.other_model", "layers.1.", "saved missing"):
        load_weights(model, model_weights(other), origin=Path("saved"))


def test_tied_weights_are_saved_once_and_stay_tied():
    model, other = make_model(tie_embeddings=True), make_model(tie_embeddings=True)
    saved = model_weights(model)
    assert ("lm_head.weight" in saved) != ("token_embeddings.weight" in saved)
    load_weights(other, saved, origin=Path("saved"))
    assert other.lm_head.weight is other.token_embeddings.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


class Wrapped(nn.Module):
    """Names what it wraps as DistributedDataParallel and torch.compile do."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_fault_59_saved_from_a_wrapped_model_loads_plain_and_the_other_way_round(wrapper):
    model, plain = make_model(), make_model()
    wrapped = Wrapped(Wrapped(model, wrapper), "module")
    assert model_weights(wrapped).keys() == model_weights(plain).keys()
    load_weights(plain, model_weights(wrapped), origin=Path("saved"))
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    load_weights(Wrapped(make_model(), wrapper), model_weights(plain), origin=Path("saved"))
    optimizer = SEVERAL["ours"](wrapped)
    take_steps(wrapped, optimizer, 1, seed=1)
    load_optimizer_tensors(
        SEVERAL["ours"](plain), plain, [optimizer_tensors(optimizer, wrapped)], None, origin="saved"
    )
    sync = Zero1(Ranks(), ParallelConfig(strategy="zero1"))
    sync.attach(wrapped)
    sharded = sync.build_optimizer(torch.optim.SGD, [{"params": list(wrapped.parameters())}])
    names = {name for bucket in sharded.shard_layout["buckets"] for name in bucket["names"]}
    assert names == set(model_weights(plain))
