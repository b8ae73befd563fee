"""Every command line, option and recipe of the first edition still works."""

import shlex
from pathlib import Path

import pytest
from typer.core import TyperCommand

from lmkit.cli.app import root_command, run_command_line
from lmkit.recipe.load import load_recipe, shipped_recipes

OPTIONS = {
    "run": "--set --skip-data --from --force --print-recipe --dry-run",
    "train": "--set --steps --device --name --resume --stop-at-step --nproc --print-recipe --dry-run",
    "evaluate": "--tokens --device",
    "generate": "--prompt -p --max-new-tokens --temperature --top-k --top-p --seed --stop-at-end --no-stop-at-end "
    "--allow-special --tokenizer --device --set",
    "env": "",
    "compare": "--threshold",
    "report": "--output --check",
    "verify": "--set --steps",
    "data synth": "--size-mb --seed --force",
    "data download": "--folder",
    "data encode": "--tokenizer --workers --errors --force",
    "data inspect": "--tokenizer",
    "tokenizer train": "--vocab-size --special --workers --errors --force",
    "tokenizer encode": "",
    "tokenizer decode": "",
    "tokenizer inspect": "--text",
    "tokenizer import": "--force",
    "tokenizer export": "--force",
    "bench attention": "--set --tiers --custom-tiers --custom_tiers --kernels --backward --no-backward --warmup "
    "--iters --output --force --print-recipe",
    "bench model": "--set --sizes --lengths --compare-precision --compile --output --force --print-recipe",
    "bench lm-matrix": "--set --kernels --strategies --wrappers --timed-epochs --batch-size --num-layers --d-model "
    "--d-ff --num-heads --context-length --nproc --output --force --print-recipe",
    "bench tokenizer": "--set --output --force --print-recipe",
    "bench ddp": "--set --nproc --output --force --print-recipe",
    "bench all-reduce": "--set --nproc --output --force --print-recipe",
    "bench optimizer": "--set --nproc --output --force --print-recipe",
    "profile nsys": "--set --engine --mode --steps --output --force",
    "profile kineto": "--set --mode --steps --output --force",
    "profile memory": "--set --mode --steps --output --force",
    "recipe list": "",
    "recipe show": "--set",
    "recipe validate": "--set",
    "recipe copy": "--force",
}

README = """
lmkit run quickstart
lmkit generate artifacts/runs/quickstart --seed 1
lmkit recipe list
lmkit recipe show quickstart
lmkit run quickstart --set run.name=wider --set model.d_model=192
lmkit recipe copy text_files mine.toml
lmkit run mine.toml
lmkit generate artifacts/runs/quickstart --prompt "One day, Lily" --temperature 0.7
lmkit evaluate artifacts/runs/quickstart
lmkit train quickstart --nproc 2 --steps 1000
lmkit train quickstart --steps 1150
lmkit data synth stories.txt --size-mb 200
lmkit tokenizer train stories.txt tokenizer.json --vocab-size 4096
lmkit data encode stories.txt tokens.npy --tokenizer tokenizer.json
lmkit tokenizer import gpt2 tokenizer.json
lmkit data download tinystories
lmkit bench attention bench_attention_cpu
lmkit bench model bench_model_cpu
lmkit bench ddp bench_ddp_cpu --nproc 2
lmkit bench optimizer bench_ddp_cpu --nproc 2
lmkit profile kineto quickstart
lmkit profile nsys quickstart
lmkit profile nsys -- lmkit train quickstart
lmkit profile memory quickstart
lmkit compare before/ after/
lmkit report
lmkit verify artifacts/runs/quickstart
lmkit verify resume quickstart
lmkit env
lmkit run artifacts/runs/quickstart/recipe.toml
lmkit bench attention bench_attention_acceptance
lmkit report artifacts/h200 --output artifacts/reports
lmkit bench attention bench_attention
lmkit bench lm-matrix lm_matrix --nproc 2
lmkit bench tokenizer bench_tokenizer
lmkit profile memory profile --mode forward
"""

RECIPES = sorted((Path(__file__).parent.parent / "recipe" / "first_edition").glob("*.toml"))


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_exists(command):
    found = root_command()
    for word in command.split():
        found = found.get_command(None, word)
    options = {name for parameter in found.params for name in [*parameter.opts, *parameter.secondary_opts]}
    assert {*OPTIONS[command].split(), "--json", "--debug"} <= options


@pytest.mark.parametrize("line", README.strip().splitlines())
def test_every_command_line_of_the_readme_is_understood(line, monkeypatch, capsys):
    understood = []
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, context: understood.append(context.params))
    assert run_command_line(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert len(understood) == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_still_there_and_the_old_file_still_loads(path):
    old, new = load_recipe(path), load_recipe(path.stem)
    assert path.stem in shipped_recipes()
    assert old.run.name == new.run.name
