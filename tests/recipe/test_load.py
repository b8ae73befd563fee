"""Recipes: what is accepted, what is refused, and what the refusal names."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from lmkit.errors import UsageError
from lmkit.recipe.load import load_recipe, read_toml, recipe_to_toml, required, shipped_recipes, validate
from lmkit.recipe.recipe import TABLES, Recipe
from lmkit.registry import OPTIMIZERS


def refusal(source: Path | None, *overrides: str, code: str, **flags: object) -> str:
    """The message of the error that loading this recipe gives."""
    with raises(UsageError, code) as caught:
        given = {name.replace("__", "."): flags[name] for name in flags}
        load_recipe(source, overrides, flags=given, benches=True)
    assert "\n" not in caught.value.message
    assert source is None or str(source) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid_and_survive_a_round_trip(name, write):
    recipe = load_recipe(name, benches=True)
    assert load_recipe(write(recipe_to_toml(recipe))) == recipe


TWICE = ("[train]\nsteps = 1\nsteps = 2\n", "[train]\n[train]\n", "train = {steps = 1, steps = 2}\n")
ENDLESS = (f"x = {'[' * 2000}", f"x = {'9' * 5000}")  # would take Python long, or deep


@pytest.mark.parametrize(
    ("text", "place"),
    [
        *(("[train\nsteps = 1\n", "line 1, column 7"), ("[train]\nsteps 1\n", "line 2, column 7")),
        *(('[run]\nname = "story\n', "line 2, column 14"), *((text, "") for text in (*TWICE, *ENDLESS))),
    ],
)
def test_bad_syntax_names_line_and_column(write, text, place):
    assert place in refusal(write(text), code="recipe.syntax")


def test_a_byte_order_mark_is_no_part_of_a_recipe(write):
    assert read_toml(write("[train]\nsteps = 7\n".encode("utf-8-sig"))) == {"train": {"steps": 7}}


@pytest.mark.parametrize(
    ("text", "near"),
    [
        *(("[model]\ncontxt_length = 128\n", "context_length"), ("[modle]\n", "model")),
        *(("[bench.ddp]\nrow = 4\n", "rows"), ("train.step = 1", "steps")),
    ],
)
def test_unknown_key_with_did_you_mean(write, text, near):
    assert f"did you mean {near}?" in refusal(write(text), code="recipe.unknown_key")


@pytest.mark.parametrize(
    ("fault", "text", "path", "shown"),
    [
        (5, '[train]\nsteps = "12"\n', "train.steps", '"12"'),
        (6, "[train]\nsteps = 1e1\n", "train.steps", "10.0"),
        (7, "[optimizer]\nlr = nan\n", "optimizer.lr", "nan"),
        (7, "[optimizer]\nlr = -0.1\n", "optimizer.lr", "-0.1"),
        (11, "[model]\nd_model = 100\nnum_heads = 3\n", "model", "d_model 100"),
        (27, "[tokenizer]\nvocab_size = 256\n", "tokenizer", "257"),
        (135, "[model]\nnum_layers = 100000000\n", "model.num_layers", "100000000"),
        (142, "[train]\nepochs = 1e300\n", "train.epochs", "1e+300"),
        (170, "[train]\nbatch_size = 9223372036854775807\n", "train.batch_size", "9223372036854775807"),
        (170, "[optimizer]\neps = 1e-300\n", "optimizer.eps", "1e-30, "),
        (170, "[model]\nrope_theta = 1e300\n", "model.rope_theta", "1e+30"),
        (0, "[train]\nsteps = 2026-01-01\n", "train", "2026-01-01"),
    ],
)
def test_fault_170_wrong_values(write, fault, text, path, shown):
    message = refusal(write(text), code="recipe.wrong_value")
    assert path in message
    assert shown in message


@pytest.mark.parametrize(
    ("override", "key", "wanted"),
    [
        ("train.steps=ten", "train.steps", "whole number"),
        ("run.name=[3]", "run.name", "string"),
        ("corpus.train=my.txt", "corpus.train", '["my.txt"]'),
        ("optimizer.betas=[0.9]", "optimizer.betas", "too few"),
        ("bench.model.attention=sdp", "bench.model.attention", "did you mean sdpa?"),
        *((f"run.name={name!r}", "run.name", "letters") for name in ("../up", ".hidden", "", "x" * 101)),
        ('generate.prompts=["\udcff"]', "generate", "UTF-8"),
    ],
)
def test_wrong_values_on_the_command_line(override, key, wanted):
    message = refusal(None, override, code="recipe.wrong_value")
    assert key in message
    assert wanted in message


def test_every_mistake_is_reported_at_once(write):
    message = refusal(
        write(
            '[train]\nsteps = "x"\nprecision = "bf61"\n[optimizer]\nlr = -1\n[corpsu]\n[run]\nnane = "a"\n'
            "[parallel]\nstrategy = 'naive'\nweights = 'bf16'\nreduce_dtype = 'bf16'\noptions.x = 1\n"
        ),
        "model.use_flsh=true",
        code="recipe.mistakes",
    )
    keys = ("train.steps", "did you mean bf16?", "optimizer.lr", "did you mean corpus?", "model.use_flsh")
    across_tables = ("parallel.weights", "parallel.reduce_dtype", "parallel.options.x")
    assert [name for name in (*keys, *across_tables) if name not in message] == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["run.device=cpu", "train.precision=fp16"], "train.precision"),
        (['data.sampling="packed"', "model.attention=flash_cuda"], "data.sampling"),
        (["model.d_model=12", "data.source=random"], "model.vocab_size"),
        (["parallel.options.depth=2"], "parallel.options.depth"),
        (["optimizer.name=muon", "optimizer.options.momentums=0.9"], "optimizer.options.momentums"),
        (["optimizer.name=muon", "optimizer.options.iterations=2.5"], "optimizer.options.iterations"),
        (
            ["optimizer.name=adamw", "optimizer.options.momentum=0.9"],
            "optimizer.options.momentum",
        ),  # has none
        (["optimizer.name=muon", "parallel.strategy=torch_fsdp"], "torch_fsdp"),
        # Their state is sharded on the GPUs.
        *(
            (["optimizer.name=adamw_host", f"parallel.strategy={name}"], "parallel.strategy")
            for name in ("zero1", "fsdp")
        ),
        (["parallel.strategy=torch_ddp", "parallel.options.static_graph=1"], "parallel.options.static_graph"),
        (["corpus.size_mb=1", "tokenizer.vocab_size=2048", "model.vocab_size=1000"], "model.vocab_size"),
    ],
)
def test_tables_that_contradict_one_another(overrides, key):
    assert key in refusal(None, *overrides, code="recipe.conflict")


def test_an_optimizer_of_whole_matrices_is_not_sharded():
    OPTIMIZERS.register("matrices", elementwise=False)(test_an_optimizer_of_whole_matrices_is_not_sharded)
    overrides = ("optimizer.name=matrices", "parallel.strategy=zero1")
    assert "parallel.strategy" in refusal(None, *overrides, code="recipe.conflict")
    load_recipe(None, overrides[:1])


def test_another_optimizer_leaves_the_options_of_the_former_behind():
    assert load_recipe("quickstart").optimizer.options["iterations"] == 3
    assert load_recipe("quickstart", ["optimizer.name=adamw"]).optimizer.options == {}
    assert load_recipe("quickstart", ["optimizer.name=muon"]).optimizer.options["iterations"] == 3
    given = ["optimizer.name=adamw", "optimizer.options.iterations=4"]
    with raises(UsageError, "recipe.conflict"):
        load_recipe("quickstart", given)


def test_missing_table_is_named_with_the_recipes_that_have_it():
    recipe = load_recipe("quickstart", ["run.seed=1"])
    other = load_recipe(None, ["run.seed=2", "run.seed=1"])
    assert recipe == other.model_copy(update=dict(recipe))
    with raises(
        UsageError, "recipe.missing_table", "quickstart", "[bench.ddp]", hint="bench_ddp, bench_ddp_cpu"
    ):
        required(recipe.bench.get("ddp"), "bench.ddp", recipe.model_copy(), command="bench ddp")


def test_loading_a_recipe_imports_neither_benches_nor_torch(tmp_path):
    """Also that of a bench: `lmkit bench` and `lmkit recipe` validate its table."""
    (tmp_path / "wrong.toml").write_text("[bench.ddp]\nroundz = 3\n")
    program = """
import sys
from lmkit.recipe.load import load_recipe
load_recipe("quickstart")
assert load_recipe("wrong.toml").bench == {"ddp": {"roundz": 3}}
modules = [name for name in sys.modules if name.partition(".")[0] == "lmkit"]
assert len(modules) <= 12, modules
assert not {"torch", "numpy", "lmkit.bench", "lmkit.measure"} & sys.modules.keys()
load_recipe("bench_ddp_cpu", benches=True).bench_table("model")
from lmkit.cli.app import run_command_line
assert run_command_line(["recipe", "show", "quickstart"]) == 0
assert not {"torch", "numpy", "matplotlib"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    with raises(UsageError, "recipe.unknown_key", "bench.ddp.roundz", "did you mean rounds?"):
        load_recipe(tmp_path / "wrong.toml", benches=True)
    with raises(UsageError, "recipe.unknown_key", "did you mean bench.ddp?"):
        load_recipe(None, ["bench.dpd.rows=3"])
    with raises(UsageError, "recipe.wrong_value", "bench.ddp"):
        load_recipe(None, ["bench.ddp=3"])


def test_missing_file_or_folder(tmp_path):
    refusal(tmp_path, code="recipe.not_found")
    assert "did you mean quickstart?" in refusal(Path("quickstrat"), code="recipe.not_found")


def test_a_folder_does_not_hide_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_recipe("quickstart").run.name == "quickstart"


@pytest.mark.parametrize("override", ["train.steps", "steps=1"])
def test_wrong_override(override):
    assert f"--set {override}" in refusal(None, override, code="recipe.wrong_override")


def test_overrides_are_toml_and_bare_words_are_strings():
    more = ["run.deterministic=true", "run.folder=a=b"]
    recipe = load_recipe(None, ["run.name=first", "optimizer.betas=[0.8, 0.9]", *more])
    assert recipe.run.name == "first"
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.run.deterministic is True
    assert recipe.run.folder == Path("a=b")


@pytest.mark.parametrize("text", ["42", "007", "nan", "2024-01-01", "'42'"])
def test_a_key_that_takes_text_takes_what_looks_like_a_number(text):
    said = text.strip("'\"")
    for key in ("run.name", "run.folder", "tokenizer.path", "train.init_from"):
        table, _, name = key.partition(".")
        assert str(getattr(getattr(load_recipe(None, [f"{key}={text}"]), table), name)) == said
    assert load_recipe(None, flags={"run.name": said}).run.name == said


def test_a_tilde_at_the_beginning_of_a_path_is_the_home_folder(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    path = write(
        """
        run.folder = "~/runs"
        corpus = {source = "files", train = ["~/a.txt", "b~/~c.txt"], valid = ["/~/d.txt"], folder = "~"}
        tokenizer.path = "~ada/tokenizer.json"
        """
    )
    settings = ("data.train=~/train.npy", "train.init_from=~/model", "checkpoint.resume=~/step")
    recipe = load_recipe(path, settings)
    assert recipe.run.path == Path("/home/ada/runs/run")
    assert recipe.corpus.train == (Path("/home/ada/a.txt"), Path("b~/~c.txt"))
    assert (recipe.corpus.valid, recipe.corpus.folder) == ((Path("/~/d.txt"),), Path("/home/ada"))
    assert recipe.tokenizer.path == Path("~ada/tokenizer.json")
    home = Path("/home/ada")
    assert (recipe.data.train, recipe.train.init_from) == (home / "train.npy", home / "model")
    assert recipe.checkpoint.resume == "/home/ada/step"
    monkeypatch.setenv("HOME", "/home/bob")
    assert load_recipe(write(recipe_to_toml(recipe))) == recipe


def test_order_is_defaults_recipe_overrides_flags(write):
    path = write("[train]\nsteps = 2\nbatch_size = 2\nlog_interval = 2\n")
    overrides = ["train.batch_size=3", "train.log_interval=3"]
    train = load_recipe(path, overrides, flags={"train.log_interval": 4}).train
    assert train is not None
    assert (train.eval_interval, train.steps, train.batch_size, train.log_interval) == (200, 2, 3, 4)


def sizes(recipe: Recipe) -> tuple[int, ...]:
    assert recipe.model is not None
    return recipe.model.d_model, recipe.model.d_ff, recipe.model.num_layers, recipe.model.num_heads


def test_a_preset_fills_what_the_file_leaves_out_and_on_the_command_line_replaces_its_sizes(write):
    path = write('[model]\npreset = "small"\nd_model = 96\n')
    assert sizes(load_recipe(path)) == (96, 3072, 12, 12)
    path = write("[model]\nd_model = 64\nnum_layers = 3\ncontext_length = 99\n")
    recipe = load_recipe(path, ["model.num_layers=2", "model.preset=small"])
    assert sizes(recipe) == (768, 3072, 2, 12)
    assert recipe.model is not None
    assert recipe.model.context_length == 99


@pytest.mark.parametrize(
    ("written", "override", "key", "value"),
    [
        ("", "model.attention=vectorized_torch", "model.attention", "vectorized"),
        ("", "model.use_flash=true", "model.attention", "flash_triton"),
        ("[model]\nuse_flash = false", "model.attention=sdpa", "model.attention", "sdpa"),
        ("[model]\nattention = 'sdpa'", "model.use_flash=false", "model.attention", "vectorized"),
        ("", "parallel.strategy=Naive DDP", "parallel.strategy", "naive"),
        ("", "checkpoint.checkpointing_interval=7", "checkpoint.interval", 7),
        ("[optimizer]\nlearning_rate = 1e-3", "optimizer.lr=2e-3", "optimizer.lr", 2e-3),
        ("", "bench.attention.kernels=['vectorized_torch+compile']", "", ("vectorized+compile",)),
        ("", "bench.lm_matrix.strategies=['Local No DDP']", "", ("one rank",)),
        ("", "bench.ddp.variants=['pytorch', 'zero1 bf16']", "", ("torch_ddp", "zero1 bf16")),
    ],
)
def test_aliases_of_keys_and_values(write, written, override, key, value):
    recipe = load_recipe(write(written), [override])
    table, _, name = (key or override.partition("=")[0]).rpartition(".")
    bench = table.removeprefix("bench.")
    assert getattr(getattr(recipe, table) if bench == table else recipe.bench_table(bench), name) == value


def test_a_key_under_both_of_its_names_is_refused(write):
    path = write("[optimizer]\nlr = 1e-3\nlearning_rate = 2e-3\n")
    assert "optimizer.learning_rate" in refusal(path, code="recipe.unknown_key")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TABLES)) | st.text(max_size=5), json_values, max_size=4))
def test_any_content_is_loaded_or_refused_in_one_line(raw):
    try:
        recipe = validate(raw, origin="here")
    except UsageError as error:
        assert error.message.startswith("here: ")
        assert "\n" not in error.message
    else:
        assert isinstance(recipe, Recipe)


def test_recipes_of_stored_results_are_read():
    """So that `lmkit rerun` makes the figures again."""
    stored = sorted((Path(__file__).resolve().parents[2] / "artifacts").glob("*/*/recipe.toml"))
    assert len(stored) > 10
    for path in stored:
        load_recipe(str(path), benches=True)


def test_token_files_are_one_path_or_several(write):
    recipe = load_recipe(write('data.train = ["~a/x.npy", "b*.npy"]'), ["data.valid=7"])
    assert recipe.data.train == (Path("~a/x.npy"), Path("b*.npy"))
    assert recipe.data.valid == Path("7")
    assert load_recipe(write(recipe_to_toml(recipe))) == recipe
    assert load_recipe(None, ['data.train=["a.npy"]']).data.train == (Path("a.npy"),)
    for value in ("3.5", "[]", "[3]", "{a = 1}"):
        with raises(UsageError, "recipe.wrong_value", "data.train"):
            load_recipe(write(f"data.train = {value}"))
