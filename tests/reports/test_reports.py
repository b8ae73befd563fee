"""The write-ups say what the rows say, all of it, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmkit.cli.app import run_command_line
from lmkit.commands.report import run
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe
from lmkit.reports import data_parallelism, optimizer_sharding
from lmkit.reports.results import find_results

ENVIRONMENT = {
    "gpus": [{"name": "Some GPU"}, {"name": "Some GPU"}],
    "packages": {"torch": "9.9.9"},
    "time_utc": "2031-02-03T04:05:06",
}


def attention_row(kernel: str, length: int, **changes: Any) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "direction": "forward",
        "num_queries": length,
        "num_keys": length,
        "head_dim": 64,
        "heads": 12,
        "kv_heads": 12,
        "batch": 4,
        "causal": True,
        "dtype": "bf16",
        "layout": "contiguous",
        "status": "ok",
        "detail": "",
        "median_ms": 0.5,
        "tflops": 123.0,
        "share_of_matmul": 0.25,
        "peak_gb": 0.1,
    } | changes


def ddp_row(contender: str, step_ms: float, **changes: Any) -> dict[str, Any]:
    return {
        "part": "ladder",
        "case": "toy",
        "contender": contender,
        "world_size": 2,
        "status": "ok",
        "calls_per_step": 7,
        "link_bytes": 1010.0,
        "expected_link_bytes": 1000.0,
        "communication_alone_ms": 4.0,
        "step_ms": step_ms,
        "p10_ms": step_ms * 0.9,
        "p90_ms": step_ms * 1.1,
        "tokens_per_s": 1e6 / step_ms,
        "scaling": 0.875,
        "scaling_low": 0.861,
        "scaling_high": 0.889,
        "exposed_ms": step_ms - 10.0,
        "peak_bytes": 3_000_000_000,
        "peak_overhead": 0.031,
    } | changes


def optimizer_row(contender: str, state: int, peak: int) -> dict[str, Any]:
    return {
        "case": "toy",
        "contender": contender,
        "world_size": 2,
        "state_bytes": state,
        "state_share": state / 800_000_000,
        "peak_bytes": peak,
        "step_ms": 5.0,
        "p10_ms": 4.9,
        "p90_ms": 5.2,
        "tokens_per_s": 1000.0,
        "state_mb": state / 1e6,
    }


def store(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    store(
        tmp_path / "a" / "attention",
        "sweep.jsonl",
        [
            attention_row("sdpa:cudnn", 1024),
            attention_row("flash_triton", 1024, versus_sdpa=1.04, tflops=354.0),
            attention_row("flash_triton", 2048, versus_sdpa=1.19, tflops=423.0, share_of_matmul=0.61),
            attention_row("vectorized", 2048, status="out of memory", median_ms=None, tflops=None),
        ],
    )
    store(
        tmp_path / "ddp",
        "ladder.jsonl",
        [
            ddp_row("one rank", 9.0, world_size=1),
            ddp_row("naive", 14.0),
            ddp_row("bucketed", 11.0),
            ddp_row("torch_ddp + ZeRO", 12.0),
            ddp_row("zero1", 10.5, peak_bytes=2_400_000_000),
        ],
    )
    store(
        tmp_path / "optimizer",
        "state.jsonl",
        [
            optimizer_row("bucketed", 800_000_000, 2_000_000_000),
            optimizer_row("zero1", 400_000_128, 1_500_000_000),
        ],
    )
    store(
        tmp_path / "memory",
        "memory_peaks.jsonl",
        [
            {"phase": phase, "peak_gib": 2.0}
            | dict.fromkeys(("parameters_gib", "gradients_gib", "optimizer_state_gib", "temporary_gib"), 0.25)
            | {"activations_gib": 1.0}
            for phase in ("forward", "whole run")
        ],
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return tmp_path


def text_of(folder: Path, name: str) -> str:
    return (folder / "reports" / name).read_text()


def test_four_write_ups_from_rows_at_any_depth(artifacts: Path) -> None:
    reported = run(artifacts, None)
    assert sorted(path.name for path in (artifacts / "reports").iterdir()) == [
        "attention.md",
        "data_parallelism.md",
        "optimizer_sharding.md",
        "profiling.md",
    ]
    assert len(reported.written) == 4
    assert reported.sources == (
        "a/attention/sweep.jsonl",
        "ddp/ladder.jsonl",
        "memory/memory_peaks.jsonl",
        "optimizer/state.jsonl",
    ), "a training run's metrics are not results of a bench"


def test_attention_states_range_rate_and_out_of_memory(artifacts: Path) -> None:
    run(artifacts, None)
    text = text_of(artifacts, "attention.md")
    assert "2 x Some GPU, torch 9.9.9, 2031-02-03" in text
    assert "| flash_triton | 354 (1.04x) | 423 (1.19x) |" in text
    assert "is 1.04 (1,024 tokens" in text
    assert "423 TFLOP/s (2,048 tokens, batch 4, head_dim 64, 12 heads, causal, bf16), 61% of" in text
    assert "vectorized runs out of memory at 2,048 tokens" in text


def test_attention_keeps_first_calls_and_cpu_time_apart_from_what_failed(tmp_path: Path) -> None:
    untimed = {"median_ms": None, "tflops": None, "share_of_matmul": None}
    store(
        tmp_path,
        "rows.jsonl",
        [
            attention_row("flash_triton", 128, **untimed, first_call_s=1.25, detail="caches empty"),
            attention_row("bare Function", 128, median_ms=0.0151, tflops=None, share_of_matmul=None),
            *(
                attention_row(
                    "reference", length, **untimed | {"status": "out of memory"}, direction=direction
                )
                for direction in ("forward", "backward")
                for length in (8192, 16384)
            ),
        ],
    )
    run(tmp_path, None)
    text = text_of(tmp_path, "attention.md")
    case = "128 tokens, batch 4, head_dim 64, 12 heads, causal, bf16"
    assert f"| flash_triton | forward | {case} | 1.25 | caches empty |" in text
    assert f"| bare Function | {case} | 15.1 |" in text
    _, _, failed = text.partition("### Not timed\n\n")
    assert failed.splitlines() == [
        "- reference: out of memory at 8,192, 16,384 tokens, batch 4, head_dim 64, 12 heads, causal, bf16 "
        "(forward, backward)"
    ]


def test_data_parallelism_accounts_for_communication(artifacts: Path) -> None:
    run(artifacts, None)
    text = text_of(artifacts, "data_parallelism.md")
    assert "Fastest with fp32 gradients: zero1, 10.50 ms a step, 87.5% of linear scaling" in text
    assert "1.00 ms of bucketed's communication show in the step, 0.25 of naive's 4.00 ms" in text
    assert "zero1, whose 4.00 ms of communication (alone) leave 0.50 ms exposed: 88% hidden" in text
    assert "4 contenders sent differs from the formula by at most 1.00%" in text


def test_one_contender_is_not_several() -> None:
    row = ddp_row("naive", 14.0, link_bytes=101, expected_link_bytes=100)
    said = " ".join(data_parallelism.findings([row]))
    assert "what 1 contender sent differs from the formula by at most 1.00%" in said


@pytest.mark.parametrize(
    ("rounds", "said"), [(5, "too few rounds for an interval"), (6, "95% interval 86.1% to 88.9%")]
)
def test_an_interval_is_told_of_rounds_enough_for_one(rounds: int, said: str) -> None:
    row = ddp_row("zero1", 10.5, samples_ms=[10.5] * rounds)
    assert said in " ".join(data_parallelism.findings([row]))
    assert said in " ".join(optimizer_sharding.speed_findings([row]))


def test_of_several_readings_in_a_folder_the_newest_counts_and_all_stand_side_by_side(
    artifacts: Path,
) -> None:
    again = [
        ddp_row("naive", 13.0),
        ddp_row("bucketed", 11.5, scaling=0.75),
        ddp_row("flat", 12.0, case="other"),
    ]
    store(artifacts / "ddp", "reading2.jsonl", again)
    (artifacts / "ddp" / "ladder.jsonl").rename(artifacts / "ddp" / "reading1.jsonl")
    (artifacts / "ddp" / "overlap.png").write_bytes(b"png")
    run(artifacts, None)
    text = text_of(artifacts, "data_parallelism.md")
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# Data parallelism", "## ddp", "### toy (ladder, reading2)", "### other (ladder)"]
    assert "| bucketed | 11.50 | 20.0% |" in text
    assert "| bucketed | 11.00 | 20.0% |" not in text
    assert "| contender \\ reading | reading1 | reading2 |" in text
    assert "| bucketed | 11.00 (87.5%) | 11.50 (75.0%) |" in text
    assert "| zero1 | " not in text  # measured once, in the older reading
    assert text.count("exposed: step time over") == 1
    assert text.count("overlap.png") == 1


def test_what_follows_the_backward_pass_hides_nothing(tmp_path: Path) -> None:
    store(tmp_path, "rows.jsonl", [ddp_row("flat", 10.1), ddp_row("bucketed", 12.0)])
    run(tmp_path, None)
    assert "Most hidden: bucketed," in text_of(tmp_path, "data_parallelism.md")


def test_nothing_hidden_is_said_in_words(tmp_path: Path) -> None:
    store(tmp_path, "rows.jsonl", [ddp_row("bucketed", 14.0) | {"exposed_ms": 6.0}])
    run(tmp_path, None)
    text = text_of(tmp_path, "data_parallelism.md")
    assert "Nothing is hidden" in text
    assert "Most hidden" not in text


def test_attention_on_other_data_is_named(tmp_path: Path) -> None:
    kinds = [
        attention_row("flash_triton", 128) | {"set": "data", "data": data} for data in ("normal", "sink")
    ]
    store(tmp_path, "rows.jsonl", kinds)
    run(tmp_path, None)
    cases = [line for line in text_of(tmp_path, "attention.md").splitlines() if line.startswith("| data: ")]
    assert ["sink" in line for line in cases] == [False, True]


def test_committed_write_ups_say_what_the_committed_rows_say() -> None:
    """`lmkit report artifacts/h200 --output artifacts/reports` writes them again."""
    committed = Path(__file__).resolve().parents[2] / "artifacts"
    run(committed / "h200", committed / "reports", check=True)


def test_by_default_the_rows_that_benches_and_profiles_write_and_nothing_committed(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "project"
    store(root / "artifacts" / "h200", "sweep.jsonl", [attention_row("sdpa", 128)])
    own = load_recipe("bench_attention_cpu").run.folder.parent / "benches"
    reports = root / "artifacts" / "benches" / "reports"
    monkeypatch.chdir(root)
    assert run_command_line(["report"]) == 2
    assert "error: artifacts/benches and artifacts/profiles: not a folder" in capsys.readouterr().err

    shutil.copytree(artifacts / "memory", root / "artifacts" / "profiles" / "memory")
    assert run_command_line(["report"]) == 0
    assert list(root.rglob("*.md")) == [reports / "profiling.md"], "there are no benches yet"
    assert "(../../profiles/memory/memory_peaks.jsonl)" in (reports / "profiling.md").read_text()

    shutil.copytree(artifacts / "ddp", root / own / "mine")
    assert run_command_line(["report", "--check"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "hint: lmkit report writes it again"
    assert run_command_line(["report"]) == 0
    written = {path.relative_to(reports).as_posix() for path in root.rglob("*.md")}
    assert written == {"data_parallelism.md", "optimizer_sharding.md", "profiling.md"}


def test_optimizer_sharding_states_memory_and_speed(artifacts: Path) -> None:
    run(artifacts, None)
    text = text_of(artifacts, "optimizer_sharding.md")
    assert "400.0 MB of state on a rank, 50.00% of the whole (50.00% plus padding" in text
    assert "peaks at 1.50 GB, -25.0% of bucketed's 2.00 GB" in text
    assert "1.143 times as fast as torch DDP + ZeroRedundancyOptimizer" in text
    assert "-20.0% of bucketed's peak memory" in text


def test_profiling_names_phase_and_category_of_the_peak(artifacts: Path) -> None:
    run(artifacts, None)
    text = text_of(artifacts, "profiling.md")
    assert (
        "The peak, 2.00 GiB (2^30 bytes), is reached in forward; the largest part of it is activations: 50%."
        in text
    )


def summary(unit: str, **changes: Any) -> dict[str, Any]:
    shares = dict.fromkeys(("gpu_busy_share", "dispatch_share", "wait_share", "undisturbed_gpu_share"), 0.5)
    entries = [
        {"name": unit, "instances": 2, "wall_ms": 9.0, "gpu_ms": 6.0},
        {"name": "lmkit.attention", "instances": 8, "wall_ms": 1.0, "gpu_ms": 0.25},
    ]
    return {
        "engine": "kineto",
        "window": f"2 x {unit}",
        "window_ms": 20.0,
        "undisturbed_ms": 8.0,
        "steps": 2,
        "launches_per_forward": 12.0,
        "launches_per_step": None,
        "communication_ms": 0.0,
        "ranges": entries,
        "top_kernels": [],
        "warnings": [],
        **shares,
    } | changes


def test_traces_stand_side_by_side(tmp_path: Path) -> None:
    for name, made in (("pass", summary("pass")), ("step", summary("step", launches_per_step=40.0))):
        store(tmp_path / name, "unused.jsonl", [])
        (tmp_path / name / "profile_summary.json").write_text(json.dumps(made))
    run(tmp_path, None)
    lines = text_of(tmp_path, "profiling.md").splitlines()
    assert "| figure \\ trace | pass | step |" in lines
    assert "| kernel launches of a step | - | 40 |" in lines
    assert "| GPU work: all | 6.00 | 6.00 |" in lines
    assert "| GPU work: attention | 1.00 | 1.00 |" in lines  # four of 0.25 ms in each


def test_memory_says_what_a_longer_context_costs(tmp_path: Path) -> None:
    for mode in ("step", "forward"):
        for length, kept in ((128, 1.0), (1152, 5.0)):
            shared = {
                "model": "toy",
                "context_length": length,
                "batch_size": 2,
                "pass": mode,
                "dtype": "bf16",
            }
            sizes = dict.fromkeys(
                ("parameters_gib", "gradients_gib", "optimizer_state_gib", "temporary_gib"), 0.0
            )
            phase = {"attention": "sdpa", "phase": "forward", "peak_gib": kept + 2, "activations_gib": kept}
            store(tmp_path / f"{mode}_{length}", "memory_peaks.jsonl", [shared | sizes | phase])
    run(tmp_path, None)
    text = text_of(tmp_path, "profiling.md")
    # 4 GiB more for 1024 positions of 2 sequences
    assert (
        "- toy, step: from 128 to 1152 tokens of context the peak grows from 3.0 to 7.0 GiB; what forward keeps for "
        "backward from 1.0 to 5.0 GiB, 2.00 MiB per token.\n" in text
    )
    assert "- toy, forward: from 128 to 1152 tokens of context the peak grows from 3.0 to 7.0 GiB.\n" in text


def model_row(length: int, mode: str, **changes: Any) -> dict[str, Any]:
    return {
        "part": "model",
        "size": "tiny",
        "length": length,
        "precision": "fp32",
        "compile": "none",
        "mode": mode,
        "status": "ok",
        "median_ms": length / 100,
        "tokens_per_s": 100.0,
        "mfu": 0.25,
        "mfu_basis": "some peak",
        "optimizer_floor_ms": 0.5,
        "repeats": 6,
        "peak_gb": 1.5,
    } | changes


def test_models_are_a_line_per_pass_and_a_column_per_length(tmp_path: Path) -> None:
    full = {"status": "out of memory", "median_ms": None, "tokens_per_s": None, "mfu": None, "peak_gb": None}
    rows = [model_row(length, mode) for length in (1024, 256) for mode in ("forward", "step")]
    store(tmp_path / "model", "model_results.jsonl", [*rows, model_row(4096, "step", **full)])
    run(tmp_path, None)
    assert "Every row" not in text_of(tmp_path, "profiling.md")
    (tmp_path / "model" / "model_report.md").write_text("all of them")
    run(tmp_path, None)
    lines = text_of(tmp_path, "profiling.md").splitlines()
    assert "| pass \\ length | 256 | 1024 | 4096 |" in lines
    assert "| tiny, fp32, forward | 2.56 (25%) | 10.24 (25%) | - |" in lines
    assert "| tiny, fp32, step | 2.56 (25%) | 10.24 (25%) | out of memory |" in lines
    assert "| tiny, fp32 | 1.50 | 1.50 | out of memory |" in lines
    assert "Every row in one table: [model/model_report.md](../model/model_report.md)." in lines
    assert lines[4].startswith("- **model**: Best utilisation")


def test_the_matrix_is_a_matrix(tmp_path: Path) -> None:
    rows = [
        {"kernel": kernel, "strategy": strategy, "ranks": 2, "status": "ok", "detail": "", "median_ms": ms}
        | {"tokens_per_s": 1e3, "mfu": 0.1, "mfu_basis": "x", "speedup": 20 / ms, "peak_gb": 3.0}
        | {
            "samples_ms": [ms] * 3,
            "losses": [2.0, 1.0],
            "first_loss": 2.0,
            "final_loss": 1.0,
            "p10_ms": ms,
            "p90_ms": ms,
            "spread": 0.0,
        }
        for kernel in ("sdpa", "reference")
        for strategy, ms in (("none", 20.0), ("flat", 25.0))
    ]
    rows[-1] |= {"status": "out of memory"}
    store(tmp_path, "lm_matrix_results.jsonl", rows)
    run(tmp_path, None)
    lines = text_of(tmp_path, "profiling.md").splitlines()
    assert "| kernel \\ strategy | none | flat |" in lines
    assert "| sdpa | 20.00 (1.00x) | 25.00 (0.80x) |" in lines
    assert "| reference | 20.00 (1.00x) | out of memory |" in lines


def test_links_lead_to_the_rows_from_any_output_folder(artifacts: Path, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere" / "deep"
    run(artifacts, output)
    text = (output / "attention.md").read_text()
    target = text.split("](")[1].split(")")[0]
    assert (output / target).resolve() == (artifacts / "a" / "attention" / "sweep.jsonl").resolve()


def test_check_passes_until_a_row_changes(artifacts: Path) -> None:
    run(artifacts, None)
    run(artifacts, None, check=True)
    rows = (artifacts / "ddp" / "ladder.jsonl").read_text()
    (artifacts / "ddp" / "ladder.jsonl").write_text(rows.replace('"step_ms": 11.0', '"step_ms": 11.5'))
    with pytest.raises(LmkitError, match=r"data_parallelism\.md.*does not say what the rows"):
        run(artifacts, None, check=True)
    with pytest.raises(LmkitError) as stale:
        run(artifacts, artifacts / "reports", check=True)
    assert stale.value.hint == f"lmkit report {artifacts} --output {artifacts / 'reports'} writes it again"
    assert "11.00 |" in text_of(artifacts, "data_parallelism.md"), "checking writes nothing"
    spaced = artifacts.rename(artifacts.with_name("my results"))
    with pytest.raises(LmkitError) as stale:
        run(spaced, None, check=True)
    assert stale.value.hint == f"lmkit report '{spaced}' writes it again"


def test_write_ups_without_rows_are_left_out(tmp_path: Path) -> None:
    store(tmp_path, "sweep.jsonl", [attention_row("sdpa", 128)])
    reported = run(tmp_path, None)
    assert reported.without_results == ("data_parallelism.md", "optimizer_sharding.md", "profiling.md")
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["attention.md"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{]\n", "line 1 is not a JSON object"),
        ("[1]\n", "line 1 is not a JSON object"),
        (json.dumps(attention_row("sdpa", 128)) + "\n{", "line 2 is not a JSON object"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(LmkitError, match=rf"rows\.jsonl: {message}"):
        run(tmp_path, None)


def test_a_row_without_a_field_is_an_error_of_one_line(tmp_path: Path) -> None:
    row = attention_row("sdpa", 128)
    del row["status"]
    store(tmp_path, "rows.jsonl", [row])
    with pytest.raises(LmkitError, match=r"rows\.jsonl: line 1: status: field required"):
        run(tmp_path, None)


def test_numbers_in_names_are_sorted_by_value(tmp_path: Path) -> None:
    for folder in ("step_512", "step_2048", "b"):
        store(tmp_path / folder, "rows.jsonl", [attention_row("sdpa", 128)])
    assert [r.path.parent.name for r in find_results(tmp_path)] == ["b", "step_512", "step_2048"]


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no results of a bench"):
        run(tmp_path, None)
    with pytest.raises(UsageError, match="not a folder"):
        run(tmp_path / "missing", None)


def test_every_picture_that_is_shown_exists(artifacts: Path) -> None:
    (artifacts / "ddp" / "ddp_exposed.png").write_bytes(b"png")
    found = find_results(artifacts)
    assert [r.pictures for r in found if r.kind == "ddp"] == [("ddp_exposed.png",)]
    run(artifacts, None)
    assert text_of(artifacts, "data_parallelism.md").count("![") == 1
