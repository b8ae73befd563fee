"""`lmkit verify`: what is wrong is named; a resume that is not exact is noticed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from run_folders import Tiny, train_here

from lmkit.errors import LmkitError
from lmkit.tokenizer import Tokenizer
from lmkit.training import resume, verify
from lmkit.training.checkpoint import STATE, open_checkpoint, read_manifest, write_file, write_manifest
from lmkit.training.resume import load_optimizer_tensors
from lmkit.training.verify import verify_path, verify_resume
from lmkit.training.weights import weights_of


@pytest.fixture
def run_folder(tiny: Tiny) -> Path:
    recipe = tiny("checkpoint.interval=5")
    train_here(recipe)
    return recipe.run.path


def wrong(path: Path) -> list[str]:
    return [f"{check.subject}: {check.found}" for check in verify_path(path).checks if not check.ok]


def test_a_whole_run_is_well(run_folder, token_files, monkeypatch):
    usual = Path("artifacts/runs/quickstart")  # where recipes without run.folder put their runs
    monkeypatch.chdir(run_folder.parent)
    usual.parent.mkdir(parents=True)
    usual.symlink_to(run_folder)
    result = verify_path(usual)
    assert result.ok, str(result)
    assert "step-00000005" in str(result)
    names = ("checkpoints/step-00000010", "recipe.toml", "environment.json")
    files = (token_files[0], token_files[0].with_suffix(".json"))
    for path in (*(run_folder / name for name in names), *files):
        assert verify_path(path).ok


def test_everything_that_is_wrong_is_named(run_folder):
    (run_folder / "environment.json").write_text("{")
    (run_folder / "recipe.toml").write_text("[train]\nstep = 3\n")
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write("half a li\n")
    (run_folder / "tokenizer.json").write_text("{}")
    model = run_folder / "checkpoints" / "step-00000010" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    (run_folder / "checkpoints" / "step-00000011.lmkit-partial").mkdir()
    found = wrong(run_folder)
    assert len(found) == 6
    for name in ("environment.json", "steps", "metrics.jsonl: 1 of", "tokenizer", "step-00000010", ".lmkit-"):
        assert any(name in line for line in found), (name, found)
    assert not verify_path(run_folder).ok
    (run_folder / "environment.json").unlink()
    assert f"{run_folder / 'environment.json'}: missing" in wrong(run_folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("stages.json", "[]"),
        ("stages.json", '{"lmkit": {"version": "1"}, "corpus": []}'),
        ("training.json", '{"steps": 1'),
        ("chat_template.json", "{"),
    ],
)
def test_a_table_of_a_run_that_lmkit_did_not_write_is_one_wrong_line(name, content, run_folder):
    assert verify_path(run_folder).ok
    (run_folder / name).write_text(content)
    (found,) = wrong(run_folder)
    assert found.startswith(f"{run_folder / name}: ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 2}, "4,656"),
        ({"num_layers": 10_000}, "4,656"),
        ({"num_layers": 2, "d_ff": 5}, "layers.0.ffn.w1.weight: saved 32x16, "),
    ],
)
def test_weights_of_another_model_are_named_whatever_the_manifest_says(change, says, run_folder):
    checkpoint = run_folder / "checkpoints" / "step-00000010"
    entries = read_manifest(checkpoint)
    state = json.loads((checkpoint / STATE).read_text())
    state["model"] |= change
    write_manifest(checkpoint, {**entries, STATE: write_file(checkpoint / STATE, json.dumps(state).encode())})
    (found,) = wrong(run_folder)
    assert found.startswith(f"{checkpoint}: model.safetensors: ")
    assert says in found
    with raises(LmkitError, "weights.other_model", says):
        weights_of(open_checkpoint(checkpoint)).model("cpu")


def test_fault_119_what_another_tokenizer_made_is_named(run_folder, token_files):
    tokenizer = Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[], special_tokens=())
    tokenizer.save(run_folder / "tokenizer.json")
    (run_folder / "tokens").mkdir()
    for path in (token_files[0], token_files[0].with_suffix(".json")):
        shutil.copy(path, run_folder / "tokens")
    tokens, *checkpoints = wrong(run_folder)
    assert "tokens/train.npy" in tokens
    assert "aaaa" in tokens
    assert len(checkpoints) == 2  # fault 119: trained with the other tokenizer, too
    assert all("trained with tokenizer aaaa" in found for found in checkpoints)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_fault_166_on_a_gpu_resuming_is_checked_with_deterministic_kernels(place, tiny, monkeypatch):
    """With others, two runs of one recipe differ in their last bits, and resuming was called wrong."""
    trained = []
    monkeypatch.setattr(verify, "local_device", lambda device, local_rank: torch.device(place))
    monkeypatch.setattr(verify, "train", lambda recipe, **options: trained.append(recipe.run.deterministic))
    monkeypatch.setattr(verify, "_hashes", lambda recipe, step: {})
    verify_resume(tiny(), steps=2)
    assert trained == [place == "cuda"] * 3


def test_resuming_is_exact_and_would_be_seen_if_it_were_not(tiny, monkeypatch):
    result = verify_resume(tiny(), steps=2)
    assert result.ok, str(result)
    assert [check.subject for check in result.checks] == ["weights", "optimizer", "random generators"]

    def forget_the_moments(optimizer: Any, model: Any, shards: Any, layout: Any, **options: Any) -> None:
        forgetful = [{name: tensor * 0 for name, tensor in shard.items()} for shard in shards]
        load_optimizer_tensors(optimizer, model, forgetful, layout, **options)

    monkeypatch.setattr(resume, "load_optimizer_tensors", forget_the_moments)
    broken = verify_resume(tiny(), steps=2)
    assert [check.subject for check in broken.checks if not check.ok] == ["weights", "optimizer"]
