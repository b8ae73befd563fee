"""`lmkit run` and `lmkit train` go on with each other's runs by one rule."""

import json
import shutil
from pathlib import Path

import pytest


def step(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


def evaluated(folder: Path) -> int:
    return json.loads((folder / "evaluation.json").read_text())["step"]


def test_fault_106_run_goes_on_with_more_steps_as_train_does(run, terminal):
    terminal("run fish.toml --set train.steps=4")
    assert (step(run), evaluated(run)) == (4, 4)
    terminal("train fish.toml --steps 5")
    assert step(run) == 5
    terminal("run fish.toml --set train.steps=6 --set optimizer.lr=2e-3")
    assert (step(run), evaluated(run)) == (6, 6)
    assert "optimizer.lr: 0.001 -> 0.002" in terminal.err


def test_fault_106_run_after_a_longer_train_takes_its_model(run, terminal):
    terminal("train fish.toml --steps 4 --set checkpoint.keep_last=1")
    first = str(run / "checkpoints" / "step-00000002")
    assert not Path(first).exists()
    assert first not in terminal("run fish.toml --dry-run")  # that checkpoint is not missed
    planned = json.loads(terminal("run fish.toml --dry-run --json"))["stages"]
    made_again = [stage for stage, state in planned.items() if state == "would run"]
    assert made_again == ["train", "evaluate", "generate"]
    done = json.loads(terminal("run fish.toml --json"))
    assert (done["steps"], step(run), evaluated(run)) == (4, 4, 4)
    assert first not in terminal.err
    assert set(json.loads(terminal("run fish.toml --json"))["stages"].values()) == {"up to date"}


@pytest.mark.parametrize("fewer", ["train.steps=1", "train.epochs=0.001"])
def test_fault_150_a_run_with_fewer_steps_keeps_the_recipe_of_its_model(run, terminal, fewer):
    before = (run / "recipe.toml").read_text()
    assert json.loads(terminal(f"run fish.toml --set {fewer} --json"))["steps"] == 2
    assert "train.steps" in terminal.err
    assert (run / "recipe.toml").read_text() == before


def test_fault_106_a_change_that_no_step_would_obey_is_refused(run, terminal):
    before = (run / "recipe.toml").read_text()
    for command in ("run fish.toml", "train fish.toml", "train fish.toml --dry-run"):
        words = f"{command} --set optimizer.lr=2e-3"
        assert "steps" in terminal.refuses(words, code="resume.no_effect", says=["optimizer.lr"]).hint
    assert (run / "recipe.toml").read_text() == before
    assert json.loads(terminal("run fish.toml --json"))["steps"] == 2


@pytest.mark.parametrize(
    ("command", "code"), [("run", "run.other_recipe"), ("train", "resume.other_recipe")], ids=["run", "train"]
)
def test_fault_106_another_model_is_refused_by_both(command, code, run, terminal):
    words = f"{command} fish.toml --set model.d_ff=64 --set train.steps=4"
    assert "--set run.name=" in terminal.refuses(words, code=code, says=["d_ff"]).hint
    assert step(run) == 2


def test_train_leaves_the_tokenizer_that_its_recipe_names(run, terminal):
    words = ["train fish.toml --set run.name=new --set tokenizer.path=elsewhere/mine.json"]
    words += [f"--set data.{part}={run}/tokens/{part}.npy" for part in ("train", "valid")]
    Path("elsewhere").mkdir()
    shutil.copy(run / "tokenizer.json", "elsewhere/mine.json")
    template = {"before": "{role}:\n", "begin": "", "after": "<|endoftext|>"}
    Path("elsewhere/chat_template.json").write_text(json.dumps(template))
    terminal(" ".join(words))
    new = run.with_name("new")
    assert (new / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert json.loads((new / "chat_template.json").read_text()) == template
    shutil.rmtree("elsewhere")
    terminal(f"evaluate {new} --text corpus.txt --by-document")
    terminal(f"generate {new}")
    assert "nothing to do" in terminal(" ".join(words))


def test_train_refuses_a_folder_with_another_tokenizer_than_its_tokens(run, terminal):
    shutil.copy(run / "tokenizer.json", "mine.json")
    new = run.with_name("new")
    new.mkdir()
    terminal(f"tokenizer train corpus.txt {new}/tokenizer.json --vocab-size 261")
    before = (new / "tokenizer.json").read_bytes()
    words = "train fish.toml --set run.name=new --set tokenizer.path=mine.json"
    words += f" --set data.train={run}/tokens/train.npy"
    for option in ("", " --dry-run"):
        says = [str(new / "tokenizer.json")]
        terminal.refuses(words + option, code="data.other_tokenizer", says=says)
    assert [path.name for path in new.iterdir()] == ["tokenizer.json"]
    assert (new / "tokenizer.json").read_bytes() == before
