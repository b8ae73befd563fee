"""The parts of the race (`race.py`) that need no rival, and lmkit's side of it."""

import json
import math
import sys

import numpy as np
import pytest
import race
import race_in_nanochat
import torch
from race import Failed, Side
from tiny import tiny_recipe
from torch.nn import functional as F

from lmkit.model import ModelConfig, TransformerLM
from lmkit.training.judging import log_likelihoods, windows_of

END = race_in_nanochat.END
VOCABULARY = 64


def _documents(count=9):
    draw = np.random.default_rng(0)
    return [draw.integers(0, VOCABULARY, size=size).tolist() for size in draw.integers(1, 40, size=count)]


@pytest.mark.parametrize("context", [1, 2, 8, 100])
def test_a_document_is_cut_as_lmkit_cuts_it(context):
    for ids in _documents():
        ours = [(list(text.ids), text.num_scored) for text in windows_of([5], np.array(ids), context)]
        assert list(race_in_nanochat.windows(ids, 5, context)) == ours


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_for_each_token():
    documents = _documents()
    texts = [window for ids in documents for window in race_in_nanochat.windows(ids, 0, 8)]
    nats = race_in_nanochat.nats(
        lambda inputs, targets: torch.full(targets.shape, math.log(VOCABULARY), dtype=torch.float64), texts
    )
    tokens = sum(map(len, documents))
    found = race.judgement(sum(nats), 1000, tokens, len(documents), 8)
    # sums of float64: only their rounding
    assert found["bits_per_byte"] == pytest.approx(math.log2(VOCABULARY) * tokens / 1000, rel=1e-12)


def test_both_evaluators_agree_on_a_model_of_lmkit(monkeypatch):
    monkeypatch.setattr(race_in_nanochat, "TOKENS_AT_ONCE", 20)  # several batches, with padding
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY, context_length=8, d_model=16, d_ff=32, num_layers=2, num_heads=2
    )
    model = TransformerLM(config).double()

    @torch.no_grad()
    def losses(inputs, targets):
        return F.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-1
        )

    texts = [window for ids in _documents() for window in race_in_nanochat.windows(ids, 3, 8)]
    scored = [scored for ids in _documents() for scored in windows_of([3], np.array(ids), 8)]
    expected = [-value for value in log_likelihoods(model, scored)]
    # float64; batches of other widths sum in another order
    assert race_in_nanochat.nats(losses, texts) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("chunk", [1, 5, 17, 1000])
def test_documents_of_a_text_whatever_the_chunks(tmp_path, chunk):
    path = tmp_path / "text.txt"
    path.write_bytes(f"eins\r\n{END}{END}\nzwei é{END}drei".encode())
    assert list(race_in_nanochat.documents(path, chunk)) == ["eins\r\n", "\nzwei é", "drei"]


def test_seconds_of_training_leave_out_the_first_step_and_evaluations():
    records = [
        {"kind": "train", "step": 1, "tokens": 100, "tokens_per_second": 1.0, "seconds": 100.0},
        {"kind": "train", "step": 11, "tokens": 1100, "tokens_per_second": 500.0, "seconds": 102.0},
        {"kind": "valid", "step": 11, "bits_per_byte": 2.0},
        {"kind": "train", "step": 21, "tokens": 2100, "tokens_per_second": 250.0, "seconds": 150.0},
    ]
    seconds = race.seconds_of(records)
    assert seconds == {1: 0.0, 11: 2.0, 21: 6.0}
    assert race.lengths_of(records) == ([0.2, 0.4], [44.0])
    assert [race.between(seconds, step) for step in (1, 6, 16, 30)] == [0.0, 1.0, 4.0, 6.0]


REST = "tok/sec: 18,054 | bf16_mfu: 0.00"
PRINTED = f"""
Parameter counts:
total                   : 1,179,702
Total batch size 131,072 => gradient accumulation steps: 2
Step 00000 | Validation bpb: 4.326454
step 00000/00003 (0.00%) | loss: 7.6 | lrm: 0.03 | dt: 27988.66ms | {REST} | epoch: 1 pq: 0 rg: 0 | total time: 0.00m
step 00001/00003 (33.3%) | loss: 7.6 | lrm: 0.05 | dt: 1500.00ms | {REST} | epoch: 1 pq: 0 rg: 1 | total time: 0.00m
Step 00002 | Validation bpb: 2.500000
step 00002/00003 (66.7%) | loss: 7.6 | lrm: 0.08 | dt: 2500.00ms | {REST} | epoch: 2 pq: 0 rg: 0 | total time: 0.00m
Step 00003 | Validation bpb: 2.000000
"""


def test_what_nanochat_prints_is_read():
    printed = race.printed_by_nanochat(PRINTED.splitlines())
    assert printed.seconds == [27.98866, 1.5, 2.5]
    assert (printed.training, printed.batch_tokens, printed.epoch) == (4.0, 131072, 2)
    assert printed.parameters == 1179702
    assert printed.curve == [(1.5 / 60, 2.5), (4.0 / 60, 2.0)]
    with pytest.raises(Failed):
        race.printed_by_nanochat(PRINTED.replace("dt:", "time:").splitlines())


def test_iterations_fill_the_minutes_behind_the_first_step():
    compiles = [30.0] + [9.0] * (race.UNMEASURED - 1)
    assert race.iterations_for(1.5, compiles + [0.5] * 20) == 181
    assert race.iterations_for(1.5, [30.0, 0.5, 0.5]) == 181
    assert race.iterations_for(0.001, [30.0, 9.0]) == 2


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ValueError('no such shard')", "ValueError: no such shard"),
        ("print('error[data.no_tokens]: x\\nhint: y'); raise SystemExit(2)", "error[data.no_tokens]: x"),
        ("raise SystemExit(3)", "exit code 3, and no word"),
    ],
)
def test_a_command_that_fails_says_its_last_line(tmp_path, program, message):
    with pytest.raises(Failed) as caught:
        race.watch((sys.executable, "-c", program), log=tmp_path / "log")
    assert str(caught.value) == message


def test_a_command_is_watched_until_its_first_step(tmp_path):
    program = "print('step 2/3'); print('step 1/3'); print('end')"
    ended = race.watch((sys.executable, "-c", program), log=tmp_path / "a" / "log", first_step="step 1/")
    assert ended.lines == ["step 2/3", "step 1/3", "end"]
    assert 0 < ended.first_step_s <= ended.wall_s
    assert (tmp_path / "a" / "log").read_text() == "step 2/3\nstep 1/3\nend\n"
    with pytest.raises(Failed):
        race.watch((tmp_path / "missing",), log=tmp_path / "log")


class Planned(Side):
    """A side whose results are given; an error is raised."""

    def __init__(self, course, name, prepared, *results):
        self.name = name
        super().__init__(course)
        self._prepared, self._results, self.turns = prepared, iter(results), []

    def settings(self):
        return {}

    def prepare(self):
        self.turns.append("prepare")
        return self._given(self._prepared)

    def run(self, seed):
        self.turns.append(seed)
        return self._given(next(self._results))

    @staticmethod
    def _given(result):
        if isinstance(result, Failed):
            raise result
        return result


def _result(bits, size=100):
    figures = {"training_min": 1.5, "steps": 5, "tokens": 10, "tokens_per_s": 2.0, "epochs": 1.0}
    times = {"first_step_s": 3.0, "wall_s": 9.0, "curve": [(0.5, 3.0)]}
    return figures | times | {"bits_per_byte": bits, "judged": {"bytes": size}}


@pytest.fixture
def course(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    return race.Course(tmp_path / "t.txt", tmp_path / "v.txt", out, 1.5, 8, "cpu", 10)


def test_a_side_that_fails_is_a_row_and_the_other_goes_on(course, capsys):
    ours = Planned(course, "ours", {"a": 1}, _result(1.0), Failed("out of memory"), _result(1.2))
    theirs = Planned(course, "theirs", Failed("no rustbpe"))
    rows = race.race([ours, theirs], [0, 1, 2], course.out, {"minutes": 1.5})
    assert (ours.turns, theirs.turns) == (["prepare", 0, 1, 2], ["prepare"])
    states = [(row["side"], row["seed"], row.get("error")) for row in rows]
    no_module = [("theirs", seed, "no rustbpe") for seed in (0, 1, 2)]
    assert states[0::2] == [("ours", 0, None), ("ours", 1, "out of memory"), ("ours", 2, None)]
    assert states[1::2] == no_module
    assert json.loads((course.out / "race.json").read_text())["rows"] == rows
    summary = race.summarise(rows)
    assert [(it["rows"], it["failed"]) for it in summary] == [(3, 1), (3, 3)]
    assert [summary[0][f"bits_per_byte_{of}"] for of in ("median", "lowest", "highest")] == [1.1, 1.0, 1.2]
    race.report(rows, course.out)
    assert "no rustbpe" in capsys.readouterr().out
    assert (course.out / "race.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_call_repeats_what_failed_and_adds_seeds(course):
    ours = Planned(course, "ours", {"a": 1}, _result(1.0), Failed("x"))
    race.race([ours], [0, 1], course.out, {"minutes": 1.5})
    again = Planned(course, "ours", {"a": 2}, _result(1.1), _result(1.2))
    rows = race.race([again], [0, 1, 2], course.out, {"minutes": 1.5})
    assert again.turns == [1, 2]  # prepared already
    assert again.prepared == {"a": 1}
    assert [(row["seed"], row["bits_per_byte"]) for row in rows] == [(0, 1.0), (1, 1.1), (2, 1.2)]
    rows = race.race([Planned(course, "theirs", {"b": 3})], [], course.out, {"minutes": 1.5})
    assert (len(rows), json.loads((course.out / "race.json").read_text())["prepared"]["theirs"]) == (
        3,
        {"b": 3},
    )
    with pytest.raises(Failed):
        race.race([again], [3], course.out, {"minutes": 5.0})


def test_sides_that_were_judged_on_other_text_are_not_compared(course):
    sides = [Planned(course, "ours", {}, _result(1.0, 100)), Planned(course, "theirs", {}, _result(1.0, 99))]
    rows = race.race(sides, [0], course.out, {})
    assert [row["status"] for row in rows] == ["ok", "failed"]


@pytest.mark.full
def test_lmkits_side_from_text_to_bits_per_byte(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["the", "cat", "sat", "on", "mat", "and", "dog", "lay", "log"]
    draw = np.random.default_rng(0)
    for name, count in (("train", 300), ("valid", 20)):
        text = "".join(" ".join(draw.choice(words, 30)) + END for _ in range(count))
        (tmp_path / f"{name}.txt").write_text(text)
    recipe = tiny_recipe("tokenizer.vocab_size=270", "train.batch_size=4", 'data.sampling="packed"')
    (tmp_path / "ours.toml").write_text(recipe)
    command = [
        "train.txt",
        "valid.txt",
        "--out",
        "out",
        "--minutes",
        "0.02",
        "--depth",
        "1",
        "--seeds",
        "0,1",
    ]
    assert race.main([*command, "--ours", "ours.toml", "--device", "cpu", "--points", "3"]) == 0
    state = json.loads((tmp_path / "out" / "race.json").read_text())
    rows = state["rows"]
    assert [(row["side"], row["seed"], row["status"]) for row in rows] == [
        ("lmkit", 0, "ok"),
        ("lmkit", 1, "ok"),
    ]
    size = len((tmp_path / "valid.txt").read_text().replace(END, ""))
    for row in rows:
        assert row["judged"]["bytes"] == size
        assert row["judged"]["documents"] == 20
        assert 0 < row["bits_per_byte"] < 8  # of an untrained model: about 8
        assert row["first_step_s"] < row["wall_s"]
        assert row["curve"][-1][0] <= row["training_min"]
    assert rows[0]["bits_per_byte"] != rows[1]["bits_per_byte"]
    assert state["setup"]["lmkit"]["model"]["num_layers"] == 1
