"""The options of `lmkit bench`, as the recipe that is measured has them."""

import json

import pytest


@pytest.mark.parametrize(
    ("command", "key", "values"),
    [
        ("attention bench_attention_cpu --tiers", "tiers", ["128:64", "256:128", "XL"]),
        ("attention bench_attention_cpu --kernels", "kernels", ["reference", "sdpa:flash+compile", "sdpa"]),
        ("model bench_model_cpu --lengths", "lengths", [64, 128, 256]),
        ("lm-matrix lm_matrix_cpu --strategies", "strategies", ["none", "naive", "zero1"]),
    ],
)
def test_several_values_come_with_commas_or_one_by_one(command, key, values, terminal):
    option = command.split()[-1]
    first, second, third = map(str, values)
    for typed in ([f"{first}, {second},{third}"], [first, option, f"{second},{third}"]):
        printed = json.loads(terminal("bench", *command.split(), *typed, "--print-recipe", "--json"))
        assert printed["bench"][command.split()[0].replace("-", "_")][key] == values


@pytest.mark.parametrize("length", ["abc", "--5", "9" * 5000])
def test_a_length_that_is_no_number_is_one_error(length, terminal):
    command = f"bench model bench_model_cpu --lengths=64,{length}"
    terminal.refuses(command, code="recipe.wrong_value", says=["bench.model.lengths.1"])


BENCHES = {
    "attention": "bench_attention",
    "model": "bench_model",
    "lm-matrix": "lm_matrix",
    "ddp": "bench_ddp",
    "all-reduce": "bench_ddp",
    "optimizer": "bench_ddp",
}


@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench_without_a_recipe_takes_what_suits_the_machine(bench, monkeypatch, terminal):
    def printed(words: str) -> str:
        return terminal(f"bench {bench} {words} --print-recipe")

    of_gpu = BENCHES[bench]
    on_gpu, on_cpu = printed(of_gpu), printed(f"{of_gpu}_cpu")
    assert on_gpu != on_cpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert printed("") == on_cpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert printed("") == on_gpu
    assert printed("--set run.device=cpu") == on_cpu
    help_ = " ".join(terminal(f"bench {bench} --help").split())
    assert f"{of_gpu} where there is CUDA, else {of_gpu}_cpu" in help_
