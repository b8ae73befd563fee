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
