"""Trainings compared at equal steps, tokens and minutes; differences by hand."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.statistics import mean_difference
from lmkit.training.results import compare_training


def write_run(
    folder: Path, losses: Sequence[float], *, seconds: float, batch: int = 100, lr: float = 0.1, seed: int = 0
) -> Path:
    """A run that was evaluated every ten steps, `seconds` apart."""
    records: list[dict[str, object]] = []
    for number, loss in enumerate(losses, 1):
        step = 10 * number
        spent = {"tokens": step * batch, "seconds": number * seconds}
        records.append({"kind": "train", "step": step, "loss": 9.0, **spent})
        bits = {"bits_per_byte": loss / 2, "bytes_per_token": 2.9}
        records.append({"kind": "valid", "step": step, "loss": loss, **bits})
    records.append(records[-1] | {"kind": "final"})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "recipe.toml").write_text(
        f"[run]\nfolder = '{folder.parent}'\nname = '{folder.name}'\nseed = {seed}\n[optimizer]\nlr = {lr}\n"
    )
    return folder


def test_each_axis_compares_at_the_last_place_that_both_reached(tmp_path):
    # After: half the tokens a step, a quarter of the time.
    before = write_run(tmp_path / "a", [8.0, 6.0], seconds=60)
    after = write_run(tmp_path / "b", [9.0, 8.0, 5.0, 4.0], seconds=15, batch=50, lr=0.2)
    result = compare_training(before, after)
    assert result.metric == "bits_per_byte"
    assert result.changes == ("optimizer.lr: 0.1 -> 0.2",)
    assert [(row.at, row.place, row.before, row.after) for row in result.rows] == [
        *(("steps", 20, 3.0, 4.0), ("tokens", 2000, 3.0, 2.0), ("minutes", 1.0, 4.0, 2.0)),
        ("the end", None, 3.0, 2.0),
    ]
    assert {row.verdict for row in result.rows} == {"one seed"}
    # Between two evaluations: linearly.
    late = write_run(tmp_path / "c", [9.0, 8.0], seconds=22.5)
    steps, _, minutes, _ = compare_training(late, after).rows
    assert (steps.place, minutes.place) == (20, pytest.approx(0.75))
    assert minutes.after == pytest.approx(2.5)


def test_intervals_are_over_seeds(tmp_path, terminal):
    losses = {"a": [4.0, 4.1, 4.2], "better": [3.5, 3.6, 3.4]}
    losses |= {"unclear": [4.0, 4.3, 4.15], "same": [4.1, 4.11, 4.09]}
    for name, ends in losses.items():
        for seed, end in enumerate(ends):
            write_run(tmp_path / name / f"seed-{seed}", [5.0, end], seconds=9, seed=seed)
    threshold = {"same": "0.1"}
    for name, verdict in {"better": "better", "unclear": "unclear", "same": "no difference"}.items():
        words = ["compare", tmp_path / "a", tmp_path / name, "--threshold", threshold.get(name, "0.005")]
        found = json.loads(terminal(*words, "--json"))
        assert found["runs"] == [3, 3]
        (row, *_) = found["rows"]
        ours, theirs = ([value / 2 for value in losses[key]] for key in ("a", name))
        error = ((stdev(ours) ** 2 + stdev(theirs) ** 2) / 3) ** 0.5
        difference = fmean(theirs) - fmean(ours)
        assert row["difference"] == pytest.approx(difference)
        interval = (difference - 2.776 * error, difference + 2.776 * error)
        assert (row["low"], row["high"]) == pytest.approx(interval)
        assert row["verdict"] == verdict
        assert row["threshold"] == pytest.approx(float(words[-1]) * fmean(ours))
        assert verdict in terminal(*words)
    assert compare_training(tmp_path / "better", tmp_path / "a").rows[0].verdict == "worse"


def test_the_interval_holds_the_truth_in_95_of_100():
    generator = random.Random(1)
    missed = 0
    for _ in range(2000):
        before = [generator.gauss(0, 1) for _ in range(3)]
        after = [generator.gauss(1, 1) for _ in range(4)]
        difference, reach = mean_difference(before, after)
        missed += abs(difference - 1) > reach
    assert 70 < missed < 130  # 100 expected, standard deviation 10


def test_what_cannot_be_compared_is_named(tmp_path):
    run = write_run(tmp_path / "a", [3.0], seconds=1)
    (tmp_path / "b").mkdir()
    with raises(LmkitError, "compare.no_run", tmp_path / "b"):
        compare_training(run, tmp_path / "b")
    with raises(LmkitError, "compare.no_run", tmp_path / "nowhere", "no such folder"):
        compare_training(run, tmp_path / "nowhere")
    (tmp_path / "b/metrics.jsonl").write_text("")
    with raises(LmkitError, "compare.not_evaluated", tmp_path / "b"):
        compare_training(run, tmp_path / "b")


@pytest.mark.parametrize("kind", ["valid", "final"])
def test_a_run_whose_held_out_loss_is_not_finite_is_refused(tmp_path, kind):
    fine, bad = (write_run(tmp_path / name, [5.0, 4.0], seconds=9) for name in ("fine", "bad"))
    lines = [json.loads(line) for line in (bad / "metrics.jsonl").read_text().splitlines()]
    last = max(number for number, line in enumerate(lines) if line["kind"] == kind)
    lines[last]["loss"] = None  # as the file has NaN
    (bad / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with raises(LmkitError, "compare.not_finite", bad / "metrics.jsonl", lines[last]["step"]):
        compare_training(fine, bad)


def describe(run: Path, part: str, **fields) -> None:
    """A token file with a description."""
    meta = {"tokenizer_sha256": "t", "vocab_size": 300, "num_tokens": 9, "num_documents": 2, "num_bytes": 20}
    (run / "tokens").mkdir(exist_ok=True)
    (run / f"tokens/{part}.npy").write_bytes(b"")
    text = json.dumps(meta | {"source_sha256": "a", "format": 2} | fields)
    (run / f"tokens/{part}.json").write_text(text)


def test_losses_on_different_texts_get_no_verdict(tmp_path):
    before, after = (write_run(tmp_path / name, [5.0, 4.0], seconds=9) for name in ("a", "b"))
    for run in (before, after):
        describe(run, "train")
        describe(run, "valid")
    assert compare_training(before, after).changes == ()
    describe(after, "train", source_sha256="b")
    (change,) = compare_training(before, after).changes
    assert "training text" in change
    describe(after, "valid", source_sha256="b")
    result = compare_training(before, after)
    assert {row.verdict for row in result.rows} == {"another text"}
    assert any("held-out text" in change for change in result.changes)
    # Another tokenizer may write another end of text behind the same documents.
    describe(after, "valid", source_sha256="b", tokenizer_sha256="u")
    assert {row.verdict for row in compare_training(before, after).rows} == {"one seed"}


def test_losses_per_token_of_two_tokenizers_do_not_compare(tmp_path):
    runs = [write_run(tmp_path / name, [5.0, 4.0], seconds=9) for name in ("a", "b")]
    for run, tokenizer in zip(runs, "tu", strict=True):
        describe(run, "valid", tokenizer_sha256=tokenizer)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(line | {"bits_per_byte": None}) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text)
    with raises(UsageError, "compare.other_tokenizers"):
        compare_training(*runs)
    describe(runs[1], "valid")
    assert compare_training(*runs).metric == "loss"


def test_runs_of_one_folder_have_one_recipe_and_several_seeds(tmp_path):
    alone = write_run(tmp_path / "a", [5.0, 4.0], seconds=9)
    for seed, lr in enumerate((0.1, 0.2)):
        write_run(tmp_path / "mixed" / str(seed), [5.0, 4.0], seconds=9, seed=seed, lr=lr)
        write_run(tmp_path / "twice" / str(seed), [5.0, 4.0], seconds=9, seed=7)
    with raises(UsageError, "compare.other_recipes", "optimizer.lr"):
        compare_training(alone, tmp_path / "mixed")
    with raises(UsageError, "compare.one_seed_twice"):
        compare_training(tmp_path / "twice", alone)
