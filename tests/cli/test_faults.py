"""Faults as one meets them at a terminal: the exit code, one line of error, one of hint, and every file as it was.

What is wrong inside a file is tested beside its reader, and wrong kinds of paths in `test_mistakes.py`.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_recipe

from lmkit.cli.app import run_command_line
from lmkit.cli.generate import continue_prompts
from lmkit.storage import FolderLock
from lmkit.tokenizer import Tokenizer
from lmkit.training import checkpoint as checkpoint_folder

RECIPE = tiny_recipe(
    *('data.train="tokens.npy"', "train.steps=4", "train.batch_size=2", "checkpoint.interval=2"),
    "generate.max_new_tokens=2",
)
OLDER, NEWER = "runs/run/checkpoints/step-00000002", "runs/run/checkpoints/step-00000004"


@pytest.fixture(scope="module")
def whole(run_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a tokenizer, a token file and a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text("one fish two fish red fish blue fish<|endoftext|>\n" * 50)
    (folder / "tiny.toml").write_text(RECIPE)
    commands = (
        "tokenizer train text.txt tok.json --vocab-size 260",
        "data encode text.txt tokens.npy --tokenizer tok.json",
        "train tiny.toml",
    )
    assert run_in(folder, *commands) == [0, 0, 0]
    return folder


@pytest.fixture
def refuses(whole: Path, terminal, tmp_path: Path) -> Callable[..., None]:
    """Checks that a command ends with this exit code and an error that holds the words, and changes no file."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)

    def files() -> dict[Path, str]:
        paths = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def refuse(exit_code: int, command: str, *words: str) -> None:
        before = files()
        terminal.refuses(command, code=None, exit_code=exit_code, says=words)
        assert files() == before, command

    return refuse


def test_fault_40_of_options_at_the_terminal(refuses):
    refuses(2, "tokenizer train text.txt new.json --vocab-size 256", "vocab_size", "at least 257")
    for command in (
        "tokenizer train text.txt tok.json --vocab-size 260",
        "data encode text.txt tokens.npy --tokenizer tok.json",
        "data synth text.txt --size-mb 0.01",
    ):
        refuses(2, command, "exists already")
        assert run_command_line([*command.split(), "--force"]) == 0


def test_fault_32_another_tokenizer_at_the_terminal(refuses):
    assert run_command_line(["tokenizer", "train", "text.txt", "other.json", "--vocab-size", "259"]) == 0
    mine, other = (Tokenizer.load(name).sha256 for name in ("tok.json", "other.json"))
    Path("other.toml").write_text(RECIPE + 'tokenizer.path="other.json"\n')
    refuses(2, "train other.toml --name new", mine, other)
    refuses(2, "generate runs/run --tokenizer other.json", mine[:12], other[:12])


def test_fault_33_a_cut_token_file_at_the_terminal(refuses):
    tokens = Path("tokens.npy")
    tokens.write_bytes(tokens.read_bytes()[:-3])
    refuses(1, "train tiny.toml --name new", "tokens.npy: ", "tokens in the file")
    refuses(1, "data inspect tokens.npy", "tokens.npy: ", "tokens in the file")


def test_a_token_file_shorter_than_the_context_at_the_terminal(refuses):
    command = "train tiny.toml --name new --set model.context_length=6000"
    refuses(2, command, "tokens.npy: ", "context_length")


def test_only_damaged_checkpoints_at_the_terminal(refuses):
    for step in (OLDER, NEWER):
        Path(step, checkpoint_folder.MODEL).write_bytes(b"damaged")
    for command in (
        "train tiny.toml --steps 6",
        "generate runs/run --tokenizer tok.json",
        "evaluate runs/run",
    ):
        refuses(1, command, f"{OLDER}/model.safetensors: ", f"{NEWER}/model.safetensors: ")


def test_fault_55_another_model_at_the_terminal(refuses):
    refuses(2, "train tiny.toml --set model.d_model=32", f"{NEWER}: ", "model.d_model: 16 -> 32")


def test_fault_58_a_newer_format_at_the_terminal(refuses):
    manifest = Path(NEWER, checkpoint_folder.MANIFEST)
    content = json.loads(manifest.read_text())
    content["format"] = newer = checkpoint_folder.FORMAT + 1
    content["checksum"] = checkpoint_folder.manifest_checksum(content)
    manifest.write_text(json.dumps(content))
    for command in ("train tiny.toml --steps 6", "generate runs/run --tokenizer tok.json"):
        refuses(1, command, f"{NEWER}/manifest.json: checkpoint format {newer}")


def test_fault_60_a_missing_shard_at_the_terminal(refuses):
    name = checkpoint_folder.shard_name(0, 1)
    Path(NEWER, name).unlink()
    Path("branch.toml").write_text(RECIPE + f'checkpoint.resume="{NEWER}"\n')
    refuses(1, "train branch.toml --name new --steps 6", f"{NEWER}/{name}: missing")


def test_fault_61_two_runs_in_one_folder_at_the_terminal(refuses):
    with FolderLock("runs/run"):
        refuses(1, "train tiny.toml --steps 6", "runs/run: process")


def test_the_warning_of_a_long_prompt_stands_before_the_text(refuses, caplog):
    said: list[tuple[str, int]] = []
    prompt = 'generate.prompts=["one fish two fish"]'
    continue_prompts(
        Path("runs/run"),
        tokenizer=Path("tok.json"),
        overrides=[prompt, "generate.max_new_tokens=1"],
        stream=lambda piece: said.append((piece, len(caplog.records))),
    )
    assert said[0][0].startswith("one fish two fish")
    assert "".join(piece for piece, _ in said).count("one fish") == 1
    assert {warnings for _, warnings in said} == {1}


def test_sampling_out_of_range_at_the_terminal(refuses):
    command = "generate runs/run --tokenizer tok.json"
    for option, key in (
        ("--temperature -1", "temperature"),
        ("--top-p 0", "top_p"),
        ("--top-p nan", "top_p"),
    ):
        refuses(2, f"{command} {option}", f"generate.{key}")
