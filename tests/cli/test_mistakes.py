"""Mistakes that people make with paths and options: one line, one hint, and nothing of theirs is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.errors import out_of_memory

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one fish two fish red fish blue fish\n" * 50)
    return path


def refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert [re.split("[:[]", line)[0] for line in lines[-2:]] == ["error", "hint"]
    for word in words:
        assert word in lines[-2]


def test_a_forgotten_output_does_not_replace_the_corpus(lmkit: Lmkit, text: Path) -> None:
    before = text.read_bytes()
    refused(lmkit("tokenizer", "train", text, text, "--force", "--vocab-size", "300"), 2, "ends in .json")
    assert text.read_bytes() == before


def test_gpt2_files_go_out_and_come_back(lmkit: Lmkit, text: Path) -> None:
    assert lmkit("tokenizer", "train", text, "one.json", "--vocab-size", "280").returncode == 0
    assert lmkit("tokenizer", "export", "one.json", "gpt2").returncode == 0
    refused(lmkit("tokenizer", "inspect", "gpt2"), 2, "gpt2: is a directory")
    refused(lmkit("tokenizer", "import", "gpt2", "one.json"), 2, "exists already")
    refused(lmkit("tokenizer", "import", "nowhere", "two.json"), 2, "nowhere/vocab.json: no such file")
    assert lmkit("tokenizer", "import", "gpt2", "two.json").returncode == 0
    assert (text.parent / "two.json").read_bytes() == (text.parent / "one.json").read_bytes()


def test_only_regular_files_are_replaced(lmkit: Lmkit, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # stands for a device, which a failing test must not destroy
    os.mkfifo(pipe)
    refused(lmkit("data", "synth", pipe, "--size-mb", "0.01", "--force"), 2, "not a regular file")
    assert pipe.is_fifo()


def test_a_path_that_cannot_be_written_is_one_line(lmkit: Lmkit, text: Path) -> None:
    refused(lmkit("data", "synth", text / "inside.txt", "--size-mb", "0.01"), 1, "text.txt")


def test_sizes_are_finite(lmkit: Lmkit) -> None:
    for size in ("nan", "inf"):
        result = lmkit("data", "synth", "x.txt", "--size-mb", size)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_text_that_is_not_utf8(lmkit: Lmkit, text: Path) -> None:
    assert lmkit("tokenizer", "train", text, "t.json", "--vocab-size", "260").returncode == 0
    refused(lmkit("tokenizer", "encode", "t.json", "\udcff"), 1, "not UTF-8")


@pytest.mark.parametrize("bench", ["attention", "model", "ddp", "tokenizer"])
def test_results_are_not_replaced_by_accident(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(recipe: object, output: object, **options: object) -> None:
        (tmp_path / "measured").touch()

    monkeypatch.setattr(f"lmkit.commands.bench.{bench}", measured)
    (tmp_path / "recipe.toml").touch()
    recipe = {"attention": "bench_attention_cpu", "model": "bench_model_cpu"}.get(bench, f"bench_{bench}")
    command = ["bench", bench, recipe, "--output", str(tmp_path)]
    assert run_command_line(command) == 2
    assert "holds results already" in capsys.readouterr().err
    assert not (tmp_path / "measured").exists()
    assert run_command_line([*command, "--force"]) == 0
    assert (tmp_path / "measured").exists()


@pytest.mark.parametrize(
    "command",
    [
        *(f"bench {bench} bench_{bench}_cpu" for bench in ("attention", "model", "ddp")),
        *(f"bench {bench} bench_ddp_cpu" for bench in ("all-reduce", "optimizer")),
        "bench lm-matrix lm_matrix_cpu",
        "bench tokenizer bench_tokenizer",
        *(f"profile {engine} quickstart" for engine in ("nsys", "kineto", "memory")),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, name, recipe = command.split()
    target = {"bench": name.replace("-", "_"), "profile": "memory" if name == "memory" else "steps"}[kind]
    monkeypatch.setattr(f"lmkit.commands.{kind}.{target}", lambda *_, **__: pytest.fail("was measured"))
    (tmp_path / "file").touch()
    for folder in ("file", "file/below/it"):
        assert run_command_line([kind, name, recipe, "--output", folder]) == 2
        assert f"error: {folder}: cannot write there" in capsys.readouterr().err
    (tmp_path / "artifacts").touch()  # in the way of the folder that is taken where none is named
    assert run_command_line([kind, name, recipe]) == 2
    assert "cannot write there" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "artifacts"}


@pytest.mark.parametrize("report", ["profile_report.md", "memory_report.md"])
@pytest.mark.parametrize("engine", ["nsys", "kineto", "memory"])
def test_a_profile_is_not_replaced_by_accident(
    engine: str, report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / report).touch()
    command = ["profile", engine, "no-such-recipe", "--output", str(tmp_path)]
    assert run_command_line(command) == 2
    assert "holds a profile already" in capsys.readouterr().err
    assert run_command_line([*command, "--force"]) == 2
    assert "no such recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("verify tokenizer.json --set nonsense.key=1 --steps 5", "--set, --steps: only after `resume`"),
        ("profile kineto old.json --mode step", "--mode: only with a recipe; old.json is recorded already"),
        (
            "profile nsys old.sqlite --engine auto --steps 5",
            "--engine, --steps: only with a recipe; old.sqlite",
        ),
        ("profile nsys --set train.steps=1 -- sh -c true", "--set: only with a recipe; sh is a command"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    command: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokenizer.json", "old.json", "old.sqlite"):
        (tmp_path / name).touch()
    assert run_command_line(command.split()) == 2  # typing what is the default anyway makes no difference
    assert f"error: {complaint}" in capsys.readouterr().err
    assert not (tmp_path / "artifacts").exists()


def test_compare_refuses_what_is_no_result(lmkit: Lmkit, tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("binary", b"\xff\xfe"), ("list", b"[1]\n"), ("words", b"hello\n")):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content)
        refused(lmkit("compare", path, path), 2 if name == "empty" else 1, path.name)


def test_compare_finds_what_became_slower(lmkit: Lmkit, tmp_path: Path) -> None:
    for name, ms in (("before", 1.0), ("after", 2.0)):
        row = {
            "kernel": "k",
            "status": "ok",
            "median_ms": ms,
            "samples_ms": [ms + 0.001 * i for i in range(9)],
        }
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    same = lmkit("compare", "before.jsonl", "before.jsonl")
    assert (same.returncode, "nothing became worse" in same.stdout) == (0, True)
    slower = lmkit("compare", "before.jsonl", "after.jsonl")
    assert (slower.returncode, "slower" in slower.stdout) == (1, True)


def test_errors_name_options_where_options_were_given(lmkit: Lmkit) -> None:
    refused(
        lmkit("recipe", "show", "quickstart", "--set", "model.d_model=abc"),
        2,
        "quickstart and the command line",
    )
    refused(lmkit("tokenizer", "train", "a", "b.json", "--vocab-size", "9"), 2, "tokenizer")


def test_a_trained_model_keeps_its_tables(lmkit: Lmkit) -> None:
    refused(lmkit("generate", "run", "--set", "model.d_model=64"), 2, "only [generate]")


RECIPES = {
    1: b"[train\nsteps = 1\n",
    2: b"[train]\nsteps = 1\nsteps = 2\n",
    3: b'[run]\nname = "\xff"\n',
    4: b"[model]\ncontxt_length = 128\n",
    5: b'[train]\nsteps = "12"\n',
    6: b"[train]\nsteps = true\n",
    7: b"[optimizer]\nlr = nan\n",
    8: b'[run]\nname = "bare"\n',
    11: b"[model]\nd_model = 100\nnum_heads = 3\n[train]\nsteps = 1\n",
}


@pytest.mark.parametrize("fault", RECIPES)
def test_faults_01_to_11_mistakes_in_a_recipe_reach_the_terminal_as_one_line(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_bytes(RECIPES[fault])
    for command in (["train"], ["run"], ["verify", "resume"], ["bench", "model"], ["profile", "kineto"]):
        assert run_command_line([*command, "wrong.toml"]) == 2, command
        out, err = capsys.readouterr()
        error, hint = err.splitlines()
        assert out == ""
        # The file is named, and where only a table is missing, the table.
        assert "]: wrong.toml: " in error or (fault == 8 and "[" in error), error
        assert hint.startswith("hint: ")
        assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that may stand where a file of lmkit's is wanted."""
    folder = tmp_path_factory.mktemp("zoo")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("text.txt").write_text("one fish two fish red fish blue fish\n" * 50)
        assert run_command_line(["tokenizer", "train", "text.txt", "good.json", "--vocab-size", "260"]) == 0
        refused = run_command_line(["data", "encode", "text.txt", "good.npy", "--tokenizer", "good.json"])
        assert refused == 2  # its description would replace the tokenizer
        assert run_command_line(["data", "encode", "text.txt", "whole.npy", "--tokenizer", "good.json"]) == 0
    finally:
        os.chdir(before)
    for suffix in ("", ".npy", ".json", ".toml", ".jsonl"):
        (folder / f"empty{suffix}").touch()
        (folder / f"folder{suffix}").mkdir()
        (folder / f"noise{suffix}").write_bytes(bytes(range(256)) * 9)
        (folder / f"dangling{suffix}").symlink_to("nothing")
        (folder / f"circular{suffix}").symlink_to(f"circular{suffix}")
    for name, description in (
        ("alone", None),
        ("list", "[1]"),
        ("deep", "[" * 50_000),
        ("strange", '{"a": 1}'),
        ("words", '"x"'),
    ):
        shutil.copy(folder / "whole.npy", folder / f"{name}.npy")
        if description is not None:
            (folder / f"{name}.json").write_text(description)
    return folder


# Wording that is Python's and not for people.
FOREIGN = ("Traceback", "codec", "__init__", "Errno", "NoneType", "argument after", "unexpected keyword")


@pytest.mark.parametrize(
    "command",
    [
        ("data", "inspect"),
        ("tokenizer", "inspect"),
        ("tokenizer", "export", "PATH", "gpt2"),
        ("verify",),
        ("generate",),
        ("evaluate",),
        ("train",),
        ("recipe", "validate"),
        ("data", "encode", "text.txt", "out.npy", "--tokenizer"),
        ("data", "encode", "PATH", "out.npy", "--tokenizer", "good.json"),
        ("compare", "PATH", "PATH"),
    ],
    ids=" ".join,
)
def test_every_wrong_kind_of_path_is_one_error_and_one_hint(
    command: tuple[str, ...], zoo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(zoo)
    names = [path.name for path in zoo.iterdir()]
    before = sorted(zoo.iterdir())
    seen = set()
    for name in [*names, "missing", "missing.npy", "missing.json", "", ".", "/dev/null"]:
        arguments = [name if part == "PATH" else part for part in command]
        code = run_command_line(arguments if "PATH" in command else [*command, name])
        out, err = capsys.readouterr()
        for wording in FOREIGN:
            assert wording not in out + err, (name, out + err)
        seen.add(code)
        if code == 0:
            for made in ("gpt2", "out.npy", "out.json"):
                path = zoo / made
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            continue
        if command[0] in ("verify", "compare") and code == 1 and out:  # a verdict
            assert err == ""
            continue
        lines = err.splitlines()
        assert [re.split("[:[]", line)[0] for line in lines[-2:]] == ["error", "hint"], (name, err)
        assert all(line.startswith("warning: ") for line in lines[:-2]), (name, err)
        assert code in (1, 2)
        assert out == "", name
        assert sorted(zoo.iterdir()) == before, name
    assert {1, 2} & seen


def test_a_file_that_cannot_be_written_has_the_name_that_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "out/stories.txt.partial")

    monkeypatch.setattr("lmkit.data.synth.write_stories", refuse)
    assert run_command_line(["data", "synth", "out/stories.txt"]) == 1
    assert capsys.readouterr().err.startswith("error[file.failed]: out/stories.txt: ")


def test_another_kind_of_file_in_place_of_a_tokenizer_is_asked_about(lmkit: Lmkit, text: Path) -> None:
    result = lmkit("data", "encode", text, "tokens.npy", "--tokenizer", text)
    refused(result, 1, "text.txt: not JSON")
    assert "another kind of file?" in result.stderr
    assert "lmkit tokenizer train" in result.stderr


def test_a_run_folder_that_cannot_be_is_wrong_use_and_the_hint_names_the_key(
    lmkit: Lmkit, text: Path
) -> None:
    result = lmkit("run", "quickstart", "--set", f"run.folder={text.name}")
    refused(result, 2, "text.txt/quickstart: cannot write there")
    assert "choose another folder with --set run.folder=" in result.stderr


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (  # as PyTorch says it on a CPU
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 40000000000000 bytes. Error code 12 (Cannot allocate memory)",
            "out of memory: you tried to allocate 37,252.9 GiB",
        ),
        (  # and on a GPU
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3 GiB",
            "out of memory: Tried to allocate 20.00 GiB",
        ),
        ("std::bad_alloc: out of memory", "out of memory"),
        ("the sky falls", None),
    ],
)
def test_out_of_memory_says_how_much_was_asked_for(raised: str, said: str | None) -> None:
    error = out_of_memory(RuntimeError(raised))
    assert (None if error is None else error.message) == said
