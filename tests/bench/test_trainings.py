"""The engine of benches: what is wrong or does not fit is a row, whichever bench has the variant."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marking import full_but

from lmkit.bench.trainings import time_what_fits
from lmkit.parallel.ranks import Ranks

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
SHAPE = {"d_model": 32, "d_ff": 64, "num_heads": 2, "context_length": 32, "num_layers": 2}
SIZES = {"lengths": (8,), "vocab_size": 64, "batch_size": 2, "modes": ("fwd+bwd", "step")}
FP32 = {"precision": "fp32", "profiled_steps": 0}
# Small, but with more steps than the planted kernels that are wrong later are right.
BENCHES: dict[str, dict[str, Any]] = {
    "step": {**FP32, "variants": ("lmkit", "plain_eager"), "rounds": 8, "steps_per_sample": 4},
    "model": {**SIZES, "precisions": ("fp32", "bf16"), "warmup": 20, "iters": 3, "warmup_study": ()},
    "lm_matrix": {**SHAPE, "strategies": ("none", "flat"), "batch_size": 4, "timed_epochs": 16},
}


LATER = {"step": "nan_later", "lm_matrix": "nan_later", "model": "halves_later"}
OFTEN = [("step", "backward_halves_later"), ("model", "mask_too_wide")]
CASES = [
    (bench, kernel)
    for bench in BENCHES
    for kernel in ("mask_too_wide", "backward_halves_later", LATER[bench])
]


@pytest.mark.usefixtures("_planted_kernels")
@pytest.mark.parametrize(("bench", "kernel"), full_but(OFTEN, CASES))
def test_a_wrong_kernel_is_wrong_in_every_variant_that_has_it(run_bench, bench, kernel):
    when = "after timing: " if kernel.endswith("later") else "step 1: "
    which: dict[str, Any] = {"kernels": (kernel, "sdpa")} if bench == "lm_matrix" else {"attention": kernel}
    if bench == "model" and kernel == "mask_too_wide":
        which["warmup_study"] = (0,)  # whose rows come before the check
    result = run_bench(bench, **{**BENCHES[bench], **which})
    wrong = [row for row in result.rows if kernel in (row.get("kernel"), row.get("attention"))]
    assert wrong
    for row in wrong:
        assert row["status"] == "wrong result", row
        assert row["detail"].startswith(when)
        assert not row.keys() & {"median_ms", "mean_ms", "samples_ms", "first_is", "valid_loss", "last_loss"}
    for row in (row for row in result.rows if row not in wrong):
        assert row["median_ms"] > 0
        assert "first_is" not in row  # over what is wrong
    assert f"wrong result: {when}" in result.table.splitlines()[0]
    report = next(text for name, text in result.files.items() if name.endswith("report.md"))
    assert f": wrong result: {when}" in report.split("What was found")[1].splitlines()[2]


@pytest.mark.parametrize("fault", [FULL, KeyError("k")])
def test_a_variant_gives_way_the_largest_if_they_do_not_fit_together_else_the_one_in_turn(fault):
    rows = {name: {"status": "ok", "peak_gb": peak} for name, peak in {"a": 1.0, "b": 3.0, "c": 2.0}.items()}
    timed = []

    def time_together(left: Any, turn: Any) -> dict[str, str]:
        timed.append(list(left))
        for name in left:
            turn(name)
            if len(left) > 1 and (fault is FULL or name == "a"):
                raise fault
        return dict.fromkeys(left, "timed")

    context: Any = SimpleNamespace(ranks=Ranks())
    found = time_what_fits(dict.fromkeys(rows), rows, context, time_together)
    statuses = [rows[name]["status"] for name in "abc"]
    if fault is FULL:
        assert (found, statuses) == ({"a": "timed"}, ["ok", "out of memory", "out of memory"])
        assert timed == [["a", "b", "c"], ["a", "c"], ["a"]]
    else:
        assert (found, statuses) == ({"b": "timed", "c": "timed"}, ["failed", "ok", "ok"])
