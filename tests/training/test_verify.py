from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkit.data.token_files import TokenMeta
from lmkit.errors import UsageError
from lmkit.recipe.schema import Recipe
from lmkit.tokenizer import Tokenizer
from lmkit.training import resume, session, verify
from lmkit.training.checkpoint import STATE, read_manifest, write_manifest
from lmkit.training.model_state import load_optimizer_tensors
from lmkit.training.tensor_files import write_text

Tiny = Callable[..., Recipe]


@pytest.fixture
def run_folder(tiny: Tiny) -> Path:
    session.train(tiny("checkpoint.interval=5"))
    return tiny().run.path


def wrong(path: Path) -> list[str]:
    return [f"{check.subject}: {check.found}" for check in verify.verify_path(path).checks if not check.ok]


def test_a_whole_run_is_well_and_says_so_line_by_line(
    run_folder: Path, token_files: tuple[Path, Path]
) -> None:
    result = verify.verify_path(run_folder)
    assert result.ok, str(result)
    lines = str(result).splitlines()
    assert len(lines) == len(result.checks) + 1
    assert lines[-1].endswith("all is well")
    assert any(re.search(r"step-00000005: \d\.\d MB, checksums and weights right", line) for line in lines)
    for path in (run_folder / "checkpoints" / "step-00000010", token_files[0], run_folder / "recipe.toml"):
        assert verify.verify_path(path).ok


def test_lines_of_a_run_with_the_default_folder_fit_100_columns(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Path("artifacts/runs/quickstart")
    (run_folder / "checkpoints" / "step-00000010.partial").mkdir()
    monkeypatch.chdir(run_folder)
    usual.parent.mkdir(parents=True)
    usual.symlink_to(run_folder)
    lines = str(verify.verify_path(usual)).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    meta = TokenMeta("a" * 64, 50_257, 2_119_719_000, 2_717_700, 9_000_000_000, "b" * 64)
    monkeypatch.setattr(verify, "open_tokens", lambda path, **options: SimpleNamespace(meta=meta))
    found = verify._token_file(usual / "tokens" / "train.npy", tokenizer_sha256="a" * 64)
    assert found == "2,119,719,000 tokens below 50,257, tokenizer ok"
    assert len(str(verify.Check(str(usual / "tokens" / "train.npy"), True, found))) <= 100


def test_everything_that_is_wrong_is_named(run_folder: Path) -> None:
    (run_folder / "environment.json").write_text("{")
    (run_folder / "recipe.toml").write_text("[train]\nstep = 3\n")
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write("half a li\n")
    (run_folder / "tokenizer.json").write_text("{}")
    model = run_folder / "checkpoints" / "step-00000010" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    (run_folder / "checkpoints" / "step-00000011.partial").mkdir()
    found = wrong(run_folder)
    for part in (
        "environment.json: not JSON",
        "did you mean steps",
        "1 of",
        "tokenizer.json",
        "step-00000010",
        "step-00000011.partial: half written",
    ):
        assert any(part in line for line in found), (part, found)
    assert len(found) == 6
    assert not verify.verify_path(run_folder).ok


def test_any_file_of_a_checkpoint_or_of_a_token_file_stands_for_the_whole(
    run_folder: Path, token_files: tuple[Path, Path]
) -> None:
    checkpoint = run_folder / "checkpoints" / "step-00000010"
    size = (checkpoint / "model.safetensors").stat().st_size
    (checkpoint / "model.safetensors").write_bytes(b"")
    for path in checkpoint.iterdir():
        assert wrong(path) == [f"{checkpoint}: model.safetensors: 0 bytes instead of {size}"], path
    assert len(wrong(run_folder / "checkpoints")) == 1
    assert verify.verify_path(token_files[0].with_suffix(".json")).ok
    assert verify.verify_path(run_folder / "environment.json").ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 2}, "4656"),
        ({"num_layers": 10**9}, "4656"),
        ({"num_layers": 2, "d_ff": 5}, "layers.0.ffn.w1.weight: saved 32x16, model 5x16"),
    ],
)
def test_weights_of_another_model_are_named_whatever_the_manifest_says(
    change: dict[str, int], says: str, run_folder: Path
) -> None:
    checkpoint = run_folder / "checkpoints" / "step-00000010"
    entries = read_manifest(checkpoint)
    state = json.loads((checkpoint / STATE).read_text())
    state["model"] |= change
    write_manifest(checkpoint, {**entries, STATE: write_text(checkpoint / STATE, json.dumps(state))})
    (found,) = wrong(run_folder)
    assert found.startswith(f"{checkpoint}: model.safetensors: ")
    assert says in found


def test_token_files_of_another_tokenizer_are_named(run_folder: Path, token_files: tuple[Path, Path]) -> None:
    Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[], special_tokens=()).save(
        run_folder / "tokenizer.json"
    )
    (run_folder / "tokens").mkdir()
    for path in (token_files[0], token_files[0].with_suffix(".json")):
        shutil.copy(path, run_folder / "tokens")
    (found,) = wrong(run_folder)
    assert "tokens/train.npy: made with tokenizer aaaa" in found


def test_what_is_missing_or_half_written_in_a_run_is_named(run_folder: Path) -> None:
    (run_folder / "environment.json").unlink()
    metrics = run_folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    assert [line.partition(": ")[2] for line in wrong(run_folder)] == [
        "missing",
        f"1 of {len(metrics.read_bytes().splitlines())} lines are no whole records",
    ]


def test_what_lmkit_does_not_make_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    bench = tmp_path / "bench"
    bench.mkdir()
    for name in ("recipe.toml", "ddp_results.jsonl"):
        (bench / name).touch()
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "nothing", bench):
        with pytest.raises(UsageError):
            verify.verify_path(path)


def test_resuming_is_exact_and_would_be_seen_if_it_were_not(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = verify.verify_resume(tiny(), steps=2)
    assert result.ok, str(result)
    assert [check.subject for check in result.checks] == [
        "weights", "optimizer", "random generators", "next batch",
    ]  # fmt: skip

    def forget_the_moments(optimizer: Any, model: Any, shards: Any, layout: Any, *, origin: str) -> None:
        forgetful = [{name: tensor * 0 for name, tensor in shard.items()} for shard in shards]
        load_optimizer_tensors(optimizer, model, forgetful, layout, origin=origin)

    monkeypatch.setattr(resume, "load_optimizer_tensors", forget_the_moments)
    broken = verify.verify_resume(tiny(), steps=2)
    assert [check.subject for check in broken.checks if not check.ok] == ["weights", "optimizer"]
