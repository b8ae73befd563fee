"""Sinks of a run: metrics.jsonl, the console, W&B, TensorBoard."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from run_folders import losses, saved, train_here

from lmkit.training import metrics
from lmkit.training.metrics import MetricsFile, ServiceSink, read_metrics, tensorboard_sink, wandb_sink


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    record = {"kind": "train", "step": step, "loss": 4.0, "lr": 1e-3, "grad_norm": 1.5, "tokens": 64 * step}
    record |= {"tokens_per_second": 1234.5, "mfu": None, "memory_bytes": 2_500_000_000, "seconds": 1.0}
    record |= {"progress": step / 100, "eta_seconds": 75.0}
    return {**record, **changes}


def test_resuming_drops_later_records_and_a_line_that_was_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, after_step=0)
    for step in range(1, 8):
        first.record(train_record(step))
    first.close()
    with open(path, "a") as file:
        file.write('{"kind": "train", "step": 8, "lo')
    second = MetricsFile(path, after_step=5)
    second.record(train_record(6, loss=float("nan")))
    second.close()
    records = read_metrics(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["loss"] is None  # JSON has no NaN
    json.loads(path.read_text().splitlines()[-1], parse_constant=pytest.fail)


WRONG = {
    "lr": ["0.1", True, float("inf"), 10**400, {}],
    "loss": ["low", [4.0], float("nan")],
    "seconds": ["1.0"],
    "tokens": ["64", 64.0, -1, None, 1 << 70],
    "step": ["1", 1.0, True, -1, None],
    "tokens_per_second": ["fast"],
    "kind": [1, None],
}


def test_other_lines_than_lmkit_writes_are_skipped_and_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = [train_record(1), train_record(2, loss=4, seconds=1)]  # as programs write 4.0 that read it
    bad = [train_record(1) | {key: value} for key, values in WRONG.items() for value in values]
    bad += [{"kind": "valid", "step": 1}, {"kind": "sample", "step": 1, "number": 0, "text": 5}, [], "x", 5]
    for record in bad:
        caplog.clear()
        path.write_text("".join(json.dumps(line) + "\n" for line in (good[0], record, good[1])))
        assert read_metrics(path) == good
        (warning,) = caplog.records
        assert str(path) in warning.getMessage()
        assert "line 2 " in warning.getMessage()
    caplog.clear()
    path.write_text(json.dumps(good[0]) + "\n" + json.dumps(good[1])[:-5])  # cut by a kill
    assert read_metrics(path) == good[:1]
    assert caplog.records == []
    path.write_bytes(bytes(5_000_000) + b"\n" + json.dumps(good[0]).encode())  # no line is read in one piece
    assert read_metrics(path) == good[:1]


def service(monkeypatch: pytest.MonkeyPatch, name: str, **broken: Any) -> MagicMock:
    """Stands for the packages wandb and torch.utils.tensorboard; `broken` says what a call does instead."""
    fake = MagicMock()
    fake.init.return_value = fake.SummaryWriter.return_value = fake
    for call, effect in broken.items():
        getattr(fake, call).side_effect = effect
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


def drive(service: ServiceSink, folder: Path) -> None:
    sink = MetricsFile(folder / "metrics.jsonl", after_step=0, others=[service])
    for step in (1, 2):
        sink.record(train_record(step))
    sink.record({"kind": "sample", "step": 2, "number": 0, "text": "once"})
    sink.note("text")
    sink.close()


def test_wandb_and_tensorboard_get_every_number_and_text(tiny, tmp_path, monkeypatch):
    wandb, tensorboard = (service(monkeypatch, name) for name in ("wandb", "torch.utils.tensorboard"))
    drive(wandb_sink(tiny('wandb.mode="offline"', "run.name=abc"), tmp_path), tmp_path)
    opened = wandb.init.call_args.kwargs
    assert (opened["mode"], opened["name"]) == ("offline", "abc")
    drive(tensorboard_sink(tmp_path, after_step=2), tmp_path)
    tensorboard.SummaryWriter.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=3)
    found: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for call in wandb.log.call_args_list:
        found[call.kwargs["step"]].update(call.args[0])
    assert (found[1]["train/loss"], found[2]["sample/1"]) == (4.0, "once")
    tensorboard.add_scalar.assert_any_call("train/loss", 4.0, 1)
    tensorboard.add_text.assert_called_once_with("sample/1", "once", 2)
    wandb.finish.assert_called_once()
    tensorboard.close.assert_called_once()


def test_a_resumed_training_goes_on_with_its_wandb_run(tiny, monkeypatch):
    fake, ids = service(monkeypatch, "wandb"), []

    def train(name: str, steps: int) -> None:
        train_here(
            tiny("wandb.enabled=true", 'wandb.mode="offline"', f"run.name={name}", f"train.steps={steps}")
        )
        ids.append(fake.init.call_args.kwargs["id"])

    train("one", 2)
    train("one", 4)
    folder = tiny("run.name=one").run.path
    shutil.copytree(folder, folder.with_name("copy"))
    train("copy", 6)  # writes nothing into the run of the original
    (folder / "wandb.json").write_text('{"id": 5}')
    train("one", 6)
    shutil.rmtree(folder / "checkpoints")
    train("one", 2)  # from scratch
    first, second, *others = ids
    assert first == second
    assert len({first, *others}) == 4


@pytest.mark.parametrize(
    "broken",
    [
        None,  # not installed
        *({call: ConnectionResetError("the service is gone")} for call in ("init", "log", "finish")),
        {"finish": lambda: threading.Event().wait()},
    ],
    ids=["missing", "init", "log", "finish", "waits"],
)
def test_fault_79_training_goes_on_without_wandb_after_one_warning(broken, tiny, monkeypatch, caplog):
    train_here(tiny("run.name=alone"))
    service(monkeypatch, "wandb", **broken or {})
    if broken is None:
        monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(metrics, "FINISH_TIMEOUT_S", 0.05)
    recipe = tiny("wandb.enabled=true", 'wandb.mode="offline"')
    assert train_here(recipe).status == "finished"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["W&B"]
    assert ("lmkit[wandb]" in caplog.text) == (broken is None)
    for kind in ("train", "valid", "final"):
        assert losses(recipe, kind) == losses(tiny("run.name=alone"), kind) != []
    assert saved(recipe) == saved(tiny("run.name=alone"))
