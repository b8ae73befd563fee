"""The options of `lmkit bench`, as the recipe that is measured has them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lmkit.cli.app import run_command_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def bench_table(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The [bench.*] table that a command would measure."""
    words = command.split()
    assert run_command_line(["bench", *words, "--print-recipe"]) == 0
    return tomllib.loads(capsys.readouterr().out)["bench"][words[0].replace("-", "_")]


@pytest.mark.parametrize(
    ("command", "key", "values"),
    [
        ("attention bench_attention_cpu --tiers", "tiers", ["128:64", "256:128", "XL"]),
        ("attention bench_attention_cpu --kernels", "kernels", ["reference", "sdpa:flash+compile", "sdpa"]),
        ("model bench_model_cpu --sizes", "sizes", ["tiny", "small", "2.7b"]),
        ("model bench_model_cpu --lengths", "lengths", [64, 128, 256]),
        ("model bench_model_cpu --compile", "compile", ["none", "block", "whole"]),
        ("lm-matrix lm_matrix_cpu --kernels", "kernels", ["sdpa", "vectorized", "flash_torch"]),
        ("lm-matrix lm_matrix_cpu --strategies", "strategies", ["none", "naive", "zero1"]),
    ],
)
def test_several_values_come_with_commas_or_one_by_one(
    command: str, key: str, values: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    option = command.split()[-1]
    first, second, third = map(str, values)
    for typed in (f"{first},{second},{third}", f"{first} {option} {second},{third}"):
        assert bench_table(f"{command} {typed}", capsys)[key] == values
    assert run_command_line(["bench", *command.split(), f"{first}, {second}", "--print-recipe"]) == 0


@pytest.mark.parametrize("length", ["abc", "", "--5", "9" * 5000])
def test_a_length_that_is_no_number_is_one_error(length: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["bench", "model", "bench_model_cpu", f"--lengths=64,{length}"]) == 2
    assert "bench.model.lengths.1: must be a whole number" in capsys.readouterr().err


BENCHES = ["attention", "model", "lm-matrix", "ddp", "all-reduce", "optimizer"]


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command_line(["bench", *command.split(), "--print-recipe"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench_without_a_recipe_takes_what_suits_the_machine(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_gpu = {"lm-matrix": "lm_matrix", "all-reduce": "bench_ddp", "optimizer": "bench_ddp"}.get(
        bench, f"bench_{bench}"
    )
    on_gpu, on_cpu = printed(f"{bench} {of_gpu}", capsys), printed(f"{bench} {of_gpu}_cpu", capsys)
    assert on_gpu != on_cpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert printed(bench, capsys) == on_cpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert printed(bench, capsys) == on_gpu
    assert printed(f"{bench} --set run.device=cpu", capsys) == on_cpu
    assert run_command_line(["bench", bench, "--help"]) == 0
    assert f"{of_gpu} where there is CUDA, else {of_gpu}_cpu" in " ".join(capsys.readouterr().out.split())


def test_the_tokenizer_bench_has_one_recipe_for_all_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("tokenizer", capsys) == printed("tokenizer bench_tokenizer", capsys)


@pytest.mark.parametrize("bench", [*BENCHES, "tokenizer"])
def test_mistakes_are_found_without_a_recipe_too(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["bench", bench, "--set", "run.sead=1"]) == 2
    assert "did you mean seed?" in capsys.readouterr().err


def test_an_empty_name_is_not_a_recipe_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["bench", "attention", "", "--print-recipe"]) == 2
    assert capsys.readouterr().out == ""
