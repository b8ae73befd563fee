from __future__ import annotations

import io
import json
import random
import re
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import losses, saved, train_here

from lmkit.errors import LmkitError
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe
from lmkit.training import console as console_module
from lmkit.training import metrics as wandb_sink
from lmkit.training.console import PlainConsole, console, describe, duration
from lmkit.training.metrics import Fanout, MetricsFile, WandbSink, read_metrics
from lmkit.training.session import open_sink


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "train",
        "step": step,
        "loss": 4.0,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens": 64 * step,
        "tokens_per_second": 1234.5,
        "mfu": None,
        "memory_bytes": 2_500_000_000,
        "seconds": 1.0,
        "progress": step / 100,
        "eta_seconds": 75.0,
    }
    return {**record, **changes}


def test_going_on_drops_later_records_and_a_line_that_was_cut(tmp_path: Path) -> None:
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


def test_damaged_metrics_are_read_as_far_as_they_can_be(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path, after_step=0)
    for step in range(20):
        sink.record(train_record(step))
    sink.close()
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(whole))] = generator.randrange(256)
        path.write_bytes(damaged[: generator.randrange(len(whole))])
        assert len(read_metrics(path)) <= 20
    path.write_text("[" * 100_000 + "\n" + json.dumps(train_record(1)) + "\n")
    assert len(read_metrics(path)) == 1


def test_a_full_disk_is_an_error_with_the_file_in_it() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    sink = MetricsFile.__new__(MetricsFile)
    sink._path = Path("run/metrics.jsonl")
    sink._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(LmkitError, match=r"run/metrics\.jsonl: no space left on device"):
        sink.record(train_record(1))
    with pytest.raises(OSError, match="No space"):
        sink._file.close()


def test_the_progress_line_says_what_matters() -> None:
    assert describe(train_record(10, mfu=0.412), 100) == (
        "step 10/100  loss 4.0000  lr 1.0e-3  norm 1.50  1,234 tok/s  MFU 41.2%  2.50 GB  1:15 left"
    )
    assert "MFU" not in describe(train_record(10), 100)
    assert "lr 1.2e-12" in describe(train_record(10, lr=1.2e-12), 100)
    assert "loss nan" in describe(train_record(10, loss=float("nan")), 100)


LARGE = {"loss": 10.8249, "grad_norm": 98.76, "mfu": 0.5123, "memory_bytes": 140_200_000_000}


@pytest.mark.parametrize(
    ("tokens_per_second", "eta_seconds", "parts"),
    [
        (8_765_432.1, 9 * 3600 + 59 * 60 + 29, ("8.77M tok/s", "9h59m left")),
        (876_543.2, 123 * 3600 + 45 * 60, ("877k tok/s", "124h left")),
        (98_765.4, 3599.0, ("98.8k tok/s", "59:59 left")),
        (9_876.4, 10 * 3600, ("9,876 tok/s", "10h left")),
    ],
)
def test_a_line_fits_100_columns(
    tokens_per_second: float, eta_seconds: float, parts: tuple[str, ...]
) -> None:
    large = {**LARGE, "tokens_per_second": tokens_per_second, "eta_seconds": eta_seconds}
    text = describe(train_record(1_234_567, **large), 9_999_999)
    assert len(text) <= 100, text
    for part in ("step 1234567/9999999", "loss 10.825", "norm 98.8", "MFU 51.2%", "140 GB", *parts):
        assert part in text.split("  ")
    evaluated = {"perplexity": 50257.12, "bits_per_byte": 3.1234}
    for kind in ("valid", "final", "skip"):
        assert len(describe(train_record(1_234_567, **large, **evaluated, kind=kind), 9_999_999)) <= 100


@pytest.mark.parametrize(("mfu", "shortest_bar"), [(None, 8), (0.5123, 4)])
def test_a_bar_and_its_numbers_fit_100_columns(
    as_terminal: Callable[[], io.StringIO], mfu: float | None, shortest_bar: int
) -> None:
    terminal = as_terminal()
    large = {**LARGE, "mfu": mfu, "tokens_per_second": 8_765_432.1, "eta_seconds": 35_969.0}
    bar = console(9_999_999)
    bar.record(train_record(1_234_567, **large))
    bar.close()
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue()))
    (shown,) = {frame for frame in frames if "loss" in frame}
    assert len(shown) <= 100
    assert shown.startswith("━" * (shortest_bar - 1))
    assert shown.endswith("9h59m left")


def test_durations_are_clock_times() -> None:
    assert duration(75) == "1:15"
    assert duration(3675) == "1:01:15"


def test_fault_14_no_escape_codes_without_a_terminal_or_with_no_color(monkeypatch) -> None:
    assert isinstance(console(10), PlainConsole)  # pytest's stderr is no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert isinstance(console(10), PlainConsole)
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_LINES", 1e9)  # however slow this machine is
    stream = io.StringIO()
    lines = PlainConsole(3, stream=stream)
    for step in (1, 2, 3):
        lines.record(train_record(step))
    lines.note("done")
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    # Of steps that come fast the first is shown, and the last.
    assert [line.split()[1] for line in text.splitlines()[:2]] == ["1/3", "3/3"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    bar = console(100)
    bar.record(train_record(50))
    bar.record({"kind": "valid", "step": 50, "loss": 1.0, "perplexity": 2.7, "bits_per_byte": 0.5})
    bar.close()
    assert "0.5000 bits per byte" in terminal.getvalue()


def test_the_bar_of_a_resumed_run_begins_where_the_run_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    recipe = load_recipe("quickstart", [f"run.folder={tmp_path.as_posix()}", "train.steps=100"])
    recipe.run.path.mkdir(parents=True)
    open_sink(recipe, Ranks(), after_step=40).close()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"^━{9}╸━{14} step 40/100", shown)  # 9.5 of 24 columns are done


class FakeWandb(types.ModuleType):
    """Stands for the wandb package; `fail_at` names the call that breaks."""

    def __init__(self, fail_at: str = "") -> None:
        super().__init__("wandb")
        self.fail_at = fail_at
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **options: Any) -> FakeWandb:
        self.options = options
        return self._maybe("init")

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.logged.append((step, numbers))
        self._maybe("log")

    def finish(self) -> None:
        self._maybe("finish")
        if self.fail_at == "hang":
            threading.Event().wait()
        self.finished = True

    def _maybe(self, name: str) -> FakeWandb:
        if self.fail_at == name:
            raise ConnectionResetError("the service is gone")
        return self


Tiny = Callable[..., Recipe]


def drive(sink: WandbSink) -> None:
    fan = Fanout([sink])
    for step in (1, 2):
        fan.record(train_record(step))
    fan.note("text")
    fan.close()


def test_wandb_gets_every_number(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    drive(WandbSink(tiny('wandb.mode="offline"', "run.name=abc"), tmp_path))
    assert fake.options["mode"] == "offline"
    assert fake.options["name"] == "abc"
    assert [step for step, _ in fake.logged] == [1, 2]
    assert fake.logged[0][1]["train/loss"] == 4.0
    assert fake.finished


@pytest.mark.parametrize("fail_at", ["init", "log", "finish", "hang"])
def test_fault_79_a_dead_wandb_is_one_warning(
    fail_at: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeWandb(fail_at)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_sink, "FINISH_TIMEOUT_S", 0.05)
    drive(WandbSink(tiny(), tmp_path))
    assert len(caplog.records) == 1
    assert "metrics.jsonl has everything" in caplog.text
    assert len(fake.logged) <= {"init": 0}.get(fail_at, 2)


def test_fault_79_a_missing_wandb_is_one_warning(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    drive(WandbSink(tiny(), tmp_path))
    assert "not installed" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fail_at", ["missing", "init", "log", "finish", "hang"])
def test_fault_79_training_goes_on_without_wandb(
    fail_at: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train_here(tiny("run.name=alone"))
    monkeypatch.setitem(sys.modules, "wandb", None if fail_at == "missing" else FakeWandb(fail_at))
    monkeypatch.setattr(wandb_sink, "FINISH_TIMEOUT_S", 0.05)
    recipe = tiny("wandb.enabled=true", 'wandb.mode="offline"')
    assert train_here(recipe).status == "finished"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["W&B is off"]
    for kind in ("train", "valid", "final"):
        assert losses(recipe, kind) == losses(tiny("run.name=alone"), kind) != []
    assert saved(recipe) == saved(tiny("run.name=alone"))
