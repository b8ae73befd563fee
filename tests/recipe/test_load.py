"""Recipes: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.commands.recipe import list_recipes
from lmkit.errors import UsageError
from lmkit.measure.tables import TERMINAL_WIDTH
from lmkit.recipe.bench import BenchConfig
from lmkit.recipe.load import load_recipe, recipe_to_toml, validate
from lmkit.recipe.schema import TABLES, Recipe, required
from lmkit.recipe.shipped import shipped_recipes, shipped_with


def refusal(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "recipe.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid_and_survive_a_round_trip(name: str) -> None:
    recipe = load_recipe(name)
    text = recipe_to_toml(recipe)
    import tomli

    assert validate(tomli.loads(text), origin=name) == recipe


def test_no_two_shipped_recipes_share_a_run_name() -> None:
    """Nor, therefore, a folder of runs or of results."""
    names = [load_recipe(name).run.name for name in shipped_recipes()]
    assert sorted(set(names)) == sorted(names)


def test_the_list_of_recipes_fits_a_terminal_in_whole_sentences() -> None:
    for line in str(list_recipes()).splitlines():
        assert len(line) <= TERMINAL_WIDTH
        assert line.endswith(".")


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("[train\nsteps = 1\n", 1, 7),
        ("[train]\nsteps 1\n", 2, 7),
        ("[run]\nname = story\n", 2, 8),
        ('[run]\nname = "story\n', 2, 14),
        ("[train]\nsteps = \n", 2, 9),
    ],
)
def test_fault_01_bad_syntax_names_line_and_column(tmp_path: Path, text: str, line: int, column: int) -> None:
    message = refusal(tmp_path, text)
    assert f"line {line}" in message
    assert f"column {column}" in message


def test_fault_02_duplicate_key(tmp_path: Path) -> None:
    assert "line 3" in refusal(tmp_path, "[train]\nsteps = 1\nsteps = 2\n")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[run]\nname = story\n", "strings need quotes"),
        ("[train]\nsteps = 1\nsteps = 2\n", "given once"),
        ("[train]\n[train]\n", "given once"),
        ("train = {steps = 1, steps = 2}\n", "given once"),
        ("[train\nsteps = 1\n", "tables of keys"),
        ("[train]\nsteps\n", "tables of keys"),
    ],
)
def test_the_hint_about_syntax_fits_the_mistake(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert hint in caught.value.hint


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nsteps = 7\n", encoding="utf-8-sig")
    train = load_recipe(path).train
    assert train is not None
    assert train.steps == 7


def test_fault_03_not_utf8(tmp_path: Path) -> None:
    assert "byte 8" in refusal(tmp_path, b'name = "\xff"')


def test_a_recipe_that_exists_but_cannot_be_read(tmp_path: Path) -> None:
    memory = tmp_path / "recipe.toml"
    memory.symlink_to("/proc/self/mem")  # whoever reads its first page, root too, gets an input/output error
    with pytest.raises(UsageError, match=r"recipe\.toml: .*error"):
        load_recipe(memory)


def test_fault_04_unknown_key_with_did_you_mean(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[model]\ncontxt_length = 128\n")
    assert "model.contxt_length" in message
    assert "did you mean context_length?" in message
    assert "did you mean model?" in refusal(tmp_path, "[modle]\n")


@pytest.mark.parametrize(
    ("fault", "text", "path", "shown"),
    [
        (5, '[train]\nsteps = "12"\n', "train.steps", '"12"'),
        (6, "[train]\nsteps = true\n", "train.steps", "true"),
        (6, "[train]\nsteps = 1e1\n", "train.steps", "10.0"),
        (7, "[optimizer]\nlr = nan\n", "optimizer.lr", "nan"),
        (7, "[optimizer]\nlr = inf\n", "optimizer.lr", "inf"),
        (7, "[optimizer]\nlr = -0.1\n", "optimizer.lr", "-0.1"),
        (7, "[model]\nrope_theta = inf\n", "model.rope_theta", "inf"),
        (11, "[model]\nd_model = 100\nnum_heads = 3\n", "model", "d_model 100"),
        (11, "[model]\nd_model = 96\nnum_heads = 6\nnum_kv_heads = 4\n", "model", "num_kv_heads 4"),
        (27, "[tokenizer]\nvocab_size = 256\n", "tokenizer", "257"),
    ],
)
def test_faults_05_06_07_11_27_wrong_values(
    tmp_path: Path, fault: int, text: str, path: str, shown: str
) -> None:
    message = refusal(tmp_path, text)
    assert path in message
    assert shown in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=ten", 'train.steps: must be a whole number, got "ten"'),
        ("train.steps=1.5", "train.steps: must be a whole number, got 1.5"),
        ("optimizer.lr=fast", 'optimizer.lr: must be a number, got "fast"'),
        ("optimizer.lr=0", "optimizer.lr: must be greater than 0, got 0"),
        ("run.deterministic=yes", 'run.deterministic: must be true or false, got "yes"'),
        ("run.name=3", "run.name: must be a string, got 3"),
        ("corpus.train=my.txt", 'corpus.train: must be an array, as in ["my.txt"], got "my.txt"'),
        ("generate.prompts=[1]", "generate.prompts.0: must be a string, got 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas: has too few items: [0.9]"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas: has too many items: [0.9, 0.9, 0.9]"),
        ("bench.ddp=3", "bench.ddp: must be a table, got 3"),
        ("bench.lm_matrix.d_model=33", "bench.lm_matrix: d_model 33 is not divisible by num_heads 4"),
        (
            "bench.lm_matrix.d_model=36",
            "bench.lm_matrix: d_model / num_heads = 9 is odd, and RoPE rotates pairs",
        ),
        (
            "bench.model.attention=sdp",
            'bench.model.attention: "sdp" is not one of reference, vectorized, flash_torch, flash_triton, sdpa '
            "(did you mean sdpa?)",
        ),
    ],
)
def test_wrong_values_are_explained_in_toml_s_words(override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(None, [override])
    assert caught.value.message == f"your options: {message}"


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=1e300",
        "optimizer.weight_decay=1e300",
        "parallel.timeout_s=1e300",
        "generate.max_new_tokens=9000000000000000000",
        'generate.prompts=["\udcff"]',
    ],
)
def test_values_that_nothing_could_compute_with_are_refused(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UsageError, match=key.partition(".")[0]) as caught:
        load_recipe(None, [override])
    assert key in caught.value.message or "not UTF-8" in caught.value.message


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        '[train]\nsteps = "x"\nprecision = "bf61"\n[optimizer]\nlr = -1\n[corpsu]\n[run]\nnane = "a"\n'
        "[parallel]\nstrategy = 'naive'\nweights = 'bf16'\nwire_dtype = 'bf16'\n",
    )
    for expected in (
        "train.steps",
        "did you mean bf16?",
        "optimizer.lr",
        "did you mean corpus?",
        "did you mean name?",
        'parallel.weights: "bf16" needs',  # a check across tables, beside mistakes in other tables
        'parallel.wire_dtype: "naive" sends gradients as they are; "bf16" is for flat, bucketed, torch_ddp, zero1',
    ):
        assert expected in message


def test_fault_08_missing_table_is_named() -> None:
    with pytest.raises(UsageError, match=r"no \[model\] table"):
        required(Recipe().model, "model", command="train")


def test_fault_09_missing_file_or_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(UsageError, match=r"no such recipe \(did you mean quickstart\?\)"):
        load_recipe("quickstrat")


def test_a_folder_does_not_hide_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_recipe("quickstart").run.name == "quickstart"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.steps", "expected table.key=value"),
        ("steps=1", "expected table.key=value"),
        ("train..steps=1", "expected table.key=value"),
        ("trian.steps=1", "did you mean train"),
        ("train.step=1", "did you mean steps"),
        ("train.steps.more=1", "unknown key 'more'"),
    ],
)
def test_fault_10_wrong_override(override: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(None, [override])
    assert complaint in caught.value.message
    assert caught.value.hint


def test_overrides_are_toml_and_bare_words_are_strings() -> None:
    recipe = load_recipe(
        None,
        ["run.name=first", "optimizer.betas=[0.8, 0.9]", "run.deterministic=true", "run.folder=a=b"],
    )
    assert recipe.run.name == "first"
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.run.deterministic is True
    assert recipe.run.folder == Path("a=b")


def test_order_is_defaults_recipe_overrides_flags(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nsteps = 2\nbatch_size = 2\nlog_interval = 2\n")
    train = load_recipe(
        path, ["train.batch_size=3", "train.log_interval=3"], flags={"train.log_interval": 4}
    ).train
    assert train is not None
    assert (train.eval_interval, train.steps, train.batch_size, train.log_interval) == (200, 2, 3, 4)


def test_presets_fill_what_is_left_out() -> None:
    model = load_recipe(None, ["model.preset=small", "model.num_layers=2"]).model
    assert model is not None
    assert (model.d_model, model.d_ff, model.num_layers, model.num_heads) == (768, 3072, 2, 12)


def test_a_preset_on_the_command_line_replaces_the_sizes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[model]\nd_model = 64\nnum_layers = 3\ncontext_length = 99\n")
    model = load_recipe(path, ["model.num_layers=2", "model.preset=small"]).model
    assert model is not None
    assert (model.d_model, model.d_ff, model.num_layers, model.num_heads) == (768, 3072, 2, 12)
    assert model.context_length == 99
    path.write_text('[model]\npreset = "small"\nd_model = 96\n')  # in a file both were meant
    model = load_recipe(path).model
    assert model is not None
    assert (model.d_model, model.num_heads) == (96, 12)


@pytest.mark.parametrize("name", ["../up", "", "a b", ".hidden", "x" * 101, "a\n"])
def test_a_run_is_named_as_a_folder_can_be(name: str) -> None:
    with pytest.raises(UsageError, match=r"run\.name: .* is no name: 1 to 100 letters, digits"):
        load_recipe(None, flags={"run.name": name})


def test_a_vocabulary_that_the_model_cannot_hold_is_refused_before_the_corpus_is_made() -> None:
    with pytest.raises(UsageError, match=r"model\.vocab_size: 1000 is less than the tokenizer's 2048"):
        load_recipe("quickstart", ["model.vocab_size=1000"])
    assert load_recipe("quickstart", ["model.vocab_size=2048"]).model is not None
    for other_tokens in ("tokenizer.path=t.json", "data.train=t.npy", "data.source=random"):
        assert load_recipe("quickstart", ["model.vocab_size=1000", other_tokens]).model is not None


@pytest.mark.parametrize(
    ("override", "example"),
    [
        ("train.steps=ten", "quickstart"),
        ("bench.ddp.rows=x", "bench_ddp"),
        ("bench.lm_matrix.lr=0", "lm_matrix"),
    ],
)
def test_the_hint_leads_to_a_recipe_with_such_keys(override: str, example: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(None, [override])
    assert caught.value.hint == f"every key and what it takes: lmkit recipe show {example}"


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("model.attention=vectorized_torch", "model", "attention", "vectorized"),
        ("model.attention=scaled_dot_prod_attention", "model", "attention", "reference"),
        ("model.use_flash=true", "model", "attention", "flash_triton"),
        ("parallel.strategy=flashddp", "parallel", "strategy", "bucketed"),
        ("parallel.strategy=Naive DDP", "parallel", "strategy", "naive"),
        ("checkpoint.checkpointing_interval=7", "checkpoint", "interval", 7),
    ],
)
def test_older_spellings_of_a_key_or_value(override: str, table: str, key: str, value: object) -> None:
    assert getattr(getattr(load_recipe(None, [override]), table), key) == value


@pytest.mark.parametrize(
    ("written", "override", "table", "key", "value"),
    [
        ("[optimizer]\nlearning_rate = 1e-3", "optimizer.lr=2e-3", "optimizer", "lr", 2e-3),
        ("[optimizer]\nlr = 1e-3", "optimizer.learning_rate=2e-3", "optimizer", "lr", 2e-3),
        ("[model]\nuse_flash = false", "model.attention=sdpa", "model", "attention", "sdpa"),
        ("[model]\nattention = 'sdpa'", "model.use_flash=false", "model", "attention", "vectorized"),
    ],
)
def test_an_override_may_be_spelled_otherwise_than_the_file(
    tmp_path: Path, written: str, override: str, table: str, key: str, value: object
) -> None:
    path = tmp_path / "old.toml"
    path.write_text(written)
    assert getattr(getattr(load_recipe(path, [override]), table), key) == value


@pytest.mark.parametrize(
    ("bench", "key", "given", "value"),
    [
        (
            "attention",
            "kernels",
            ["vectorized_torch+compile", "sdpa:cudnn"],
            ("vectorized+compile", "sdpa:cudnn"),
        ),
        ("attention", "grid_kernels", ["flash_attention_triton"], ("flash_triton",)),
        ("attention", "baseline", "scaled_dot_prod_attention", "reference"),
        ("model", "attention", "vectorized_torch", "vectorized"),
        ("lm_matrix", "kernels", ["scaled_dot_prod_attention", "sdpa"], ("reference", "sdpa")),
        ("lm_matrix", "strategies", ["Local No DDP", "Bucketed Overlapping DDP"], ("none", "bucketed")),
        ("ddp", "contenders", ["pytorch", "zero1 bf16"], ("torch_ddp", "zero1 bf16")),
    ],
)
def test_older_spellings_in_benches(bench: str, key: str, given: object, value: object) -> None:
    recipe = load_recipe(None, flags={f"bench.{bench}.{key}": given})
    assert getattr(getattr(recipe.bench, bench), key) == value


def test_recipes_are_frozen() -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="frozen"):
        Recipe().run.name = "other"  # type: ignore[misc]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TABLES)) | st.text(max_size=5), json_values, max_size=4))
def test_any_content_is_loaded_or_refused_in_one_line(raw: dict[str, object]) -> None:
    try:
        recipe = validate(raw, origin="here")
    except UsageError as error:
        assert error.message.startswith("here: ")
        assert "\n" not in error.message
    else:
        assert isinstance(recipe, Recipe)


def test_who_misses_a_table_is_told_which_recipes_have_it() -> None:
    with pytest.raises(UsageError, match=r"no \[bench\.ddp\] table") as caught:
        required(None, "bench.ddp", command="bench ddp")
    assert (
        caught.value.hint == "add [bench.ddp], or take a shipped recipe that has it: bench_ddp, bench_ddp_cpu"
    )
    for name in TABLES:
        tables = [f"bench.{part}" for part in BenchConfig.model_fields] if name == "bench" else [name]
        for table in tables:
            for recipe in shipped_with(table):
                loaded = load_recipe(recipe)
                assert (
                    getattr(loaded.bench, table[6:]) if name == "bench" else getattr(loaded, name)
                ) is not None
