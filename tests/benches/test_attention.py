import csv
import io
import json

import pytest
import torch

from lmkit.attention import ATTENTION
from lmkit.attention.vectorized import vectorized
from lmkit.benches import attention as bench
from lmkit.benches import attention_variants as variants
from lmkit.benches.attention import run_bench
from lmkit.benches.attention_cases import AttentionOptions, Case, build_cases, make_inputs, parse_tier
from lmkit.benches.attention_gate import Gate, exact_in_blocks
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits

SMALL = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "iters": 6, "warmup": 1, "max_seconds": 1.0}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from threads, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def zeros(q, k, v, *, causal):
    return q * 0.0 + k.mean() * 0.0 + v.mean() * 0.0


def scaled(q, k, v, *, causal):
    return vectorized(q, k, v, causal=causal) * 1.02


def mask_too_wide(q, k, v, *, causal):
    """Query i sees key i + 1 too."""
    longer = torch.cat([q[:, :, 1:], q[:, :, -1:]], dim=2)
    shifted = vectorized(longer, k, v, causal=causal)
    return shifted + 0.0 * q


def last_tile_skipped(q, k, v, *, causal):
    return vectorized(q, k[:, :, :-16], v[:, :, :-16], causal=causal)


def one_head_forgotten(q, k, v, *, causal):
    """Batch row 0, head 2 belongs to neither of the two heads that are compared with float64."""
    keep = torch.ones((*q.shape[:2], 1, 1), dtype=q.dtype)
    keep[0, 2] = 0.0
    return vectorized(q, k, v, causal=causal) * keep


def gradient_dropped(q, k, v, *, causal):
    return vectorized(q, k.detach() + 0.0 * k, v, causal=causal)


def out_of_memory(q, k, v, *, causal):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 51 GiB. GPU 0 has less")


def unsupported(q, k, v, *, causal):
    raise UsageError("head_dim 16 is not supported", hint="use 64")


def broken(q, k, v, *, causal):
    raise RuntimeError("ptxas died\nlong story")


@pytest.fixture
def _kernels_of_this_file(monkeypatch):
    """Registers the functions above as attention kernels."""
    functions = (zeros, scaled, mask_too_wide, last_tile_skipped, one_head_forgotten, gradient_dropped)
    by_name = {function.__name__: function for function in (*functions, out_of_memory, unsupported, broken)}
    original = variants.attention_function
    monkeypatch.setattr(variants, "ATTENTION", {**ATTENTION, **dict.fromkeys(by_name, "here")})
    monkeypatch.setattr(variants, "attention_function", lambda name: by_name.get(name) or original(name))


@pytest.fixture
def _limits_at_hand(monkeypatch):
    measured = Limits("a test", {"fp32": 1e12, "bf16": 2e12, "tf32": 1e12}, 1e10)
    monkeypatch.setattr(bench, "measure_limits", lambda device, dtypes: measured)


def rows_by(result, *keys):
    return {tuple(row[key] for key in keys): row for row in result.rows}


@pytest.mark.usefixtures("_limits_at_hand")
def test_everything_is_measured_and_every_file_is_there():
    options = AttentionOptions(
        tiers=("32", "40:24"),
        kernels=("reference", "vectorized", "flash_torch", "sdpa", "sdpa:cudnn"),
        backward=True,
        grid_head_dims=(16, 32),
        grid_lengths=(24,),
        **SMALL,
    )
    result = run_bench(options)
    # 4 cases x 3 directions x 5 kernels
    assert len(result.rows) == 60
    for row in result.rows:
        if row["kernel"] == "sdpa:cudnn":
            assert row["status"] == "unsupported"  # on a CPU
            continue
        assert row["status"] == "ok", row
        assert 1 <= len(row["samples_ms"]) <= 6
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["share_of_matmul"] == pytest.approx(row["tflops"])  # of 1 TFLOP/s
        assert row["best_sdpa" if row["kernel"] != "sdpa" else "kernel"] == "sdpa"
    assert set(result.files) == {
        "attention_sweep_results.csv",
        "attention_sweep_results.jsonl",
        "attention_sweep_forward.png",
        "attention_sweep_backward.png",
        "attention_sweep_heatmap.png",
        "attention_sweep_scaling.png",
        "attention_sweep_report.md",
    }
    assert all(content[:4] == b"\x89PNG" for name, content in result.files.items() if name.endswith(".png"))
    assert [
        json.loads(line) for line in result.files["attention_sweep_results.jsonl"].splitlines()
    ] == result.rows
    assert len(list(csv.DictReader(io.StringIO(result.files["attention_sweep_results.csv"])))) == 60
    assert max(map(len, result.table().splitlines())) <= 100
    assert "fastest" in result.files["attention_sweep_report.md"]


@pytest.mark.usefixtures("_limits_at_hand")
def test_a_compiled_variant_is_compiled_anew_for_every_shape(monkeypatch):
    compiled_for = []

    def spy(graph, example_inputs):
        compiled_for.append(tuple(example_inputs[0].shape))
        return graph.forward

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **kw: real_compile(function, **kw, backend=spy))
    tiers = tuple(str(length) for length in range(8, 18))  # more than torch's limit of 8 recompilations
    result = run_bench(
        AttentionOptions(tiers=tiers, kernels=("vectorized+compile",), **{**SMALL, "iters": 1})
    )
    assert all(row["status"] == "ok" for row in result.rows)
    assert len(set(compiled_for)) == len(tiers)
    assert "vectorized+compile" in result.table()  # names are not cut


@pytest.mark.usefixtures("_kernels_of_this_file", "_limits_at_hand")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_wrong_is_not_timed(dtype):
    wrong = ("zeros", "scaled", "mask_too_wide", "last_tile_skipped", "one_head_forgotten")
    result = run_bench(AttentionOptions(tiers=("48",), kernels=("vectorized", *wrong), dtype=dtype, **SMALL))
    rows = rows_by(result, "kernel")
    assert rows["vectorized",]["status"] == "ok"
    for name in wrong:
        assert rows[name,]["status"] == "wrong result", name
        assert "allowed" in rows[name,]["detail"]
        assert "median_ms" not in rows[name,]
    assert "wrong result" in result.files["attention_sweep_report.md"]


@pytest.mark.usefixtures("_kernels_of_this_file", "_limits_at_hand")
def test_a_dropped_gradient_is_found_in_the_backward_pass_only():
    options = AttentionOptions(
        tiers=("32",), kernels=("vectorized", "gradient_dropped"), backward=True, **SMALL
    )
    rows = rows_by(run_bench(options), "kernel", "direction")
    assert rows["gradient_dropped", "forward"]["status"] == "ok"
    assert rows["gradient_dropped", "backward"]["status"] == "wrong result"
    assert "dk" in rows["gradient_dropped", "backward"]["detail"]
    assert rows["vectorized", "backward"]["status"] == "ok"


@pytest.mark.usefixtures("_kernels_of_this_file", "_limits_at_hand")
def test_what_does_not_fit_or_fails_is_a_row_and_the_others_complete():
    kernels = ("out_of_memory", "unsupported", "broken", "vectorized", "sdpa")
    result = run_bench(AttentionOptions(tiers=("32", "16"), kernels=kernels, **SMALL))
    rows = rows_by(result, "kernel", "tier")
    for tier in ("32", "16"):
        assert rows["out_of_memory", tier]["status"] == "out of memory"
        assert rows["unsupported", tier]["status"] == "unsupported"
        assert (rows["broken", tier]["status"], rows["broken", tier]["detail"]) == ("failed", "ptxas died")
        assert rows["vectorized", tier]["median_ms"] > 0
        assert rows["sdpa", tier]["speedup"] > 0
    report = result.files["attention_sweep_report.md"]
    assert "out_of_memory runs out of memory at 16 tokens" in report


@pytest.mark.usefixtures("_limits_at_hand")
def test_host_memory_is_asked_for_before_the_kernel_kills_the_process(monkeypatch):
    monkeypatch.setattr(bench, "available_memory", lambda: 10_000)
    result = run_bench(AttentionOptions(tiers=("64",), kernels=("vectorized", "sdpa"), **SMALL))
    rows = rows_by(result, "kernel")
    assert rows["vectorized",]["status"] == "out of memory"
    assert rows["sdpa",]["status"] == "ok"


@pytest.mark.parametrize("causal", [True, False])
def test_exact_in_blocks_equals_autograd_in_float64(causal, monkeypatch):
    monkeypatch.setattr("lmkit.benches.attention_gate.BLOCK_ELEMENTS", 5 * 24)  # blocks of 5 queries, ragged
    options = AttentionOptions(causal=causal, **SMALL)
    inputs = make_inputs(Case("tiers", "", 33, 24, 16), options, backward=True).of_key_head(1, 1)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = vectorized(*leaves, causal=causal)
    expected = (out, *torch.autograd.grad(out, leaves, inputs.dout.double()))
    for mine, theirs in zip(exact_in_blocks(inputs), expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-12)  # both are float64


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_gate_lets_every_honest_kernel_pass(dtype):
    options = AttentionOptions(dtype=dtype, projection_layout=True, **SMALL)
    inputs = make_inputs(Case("tiers", "", 40, 40, 16), options, backward=True)
    assert not inputs.q.is_contiguous()
    gate = Gate(inputs)
    for name in ("reference", "vectorized", "flash_torch", "sdpa"):
        assert gate.faults_of(variants.build_variant(name, dtype)) == []


def test_flops_by_hand():
    options = AttentionOptions(batch=2, heads=3)
    case = Case("tiers", "", 4, 4, 8)
    assert case.forward_flops(options) == 4 * 2 * 3 * 8 * (4 * 4 / 2)
    assert Case("tiers", "", 6, 4, 8).forward_flops(options) == 4 * 2 * 3 * 8 * (4 * 4 / 2 + 2 * 4)
    assert Case("tiers", "", 4, 9, 8).forward_flops(options) == 4 * 2 * 3 * 8 * (4 * 4 / 2)
    assert case.forward_flops(AttentionOptions(batch=2, heads=3, causal=False)) == 4 * 2 * 3 * 8 * 16


def test_tiers():
    assert parse_tier("XXL") == (2048, 2048)
    assert parse_tier("131072") == (131072, 131072)
    assert parse_tier("128:64") == (128, 64)
    options = AttentionOptions(tiers=("Small", "8:4"), grid_head_dims=(16, 32), grid_lengths=(256, 512))
    assert [(case.part, case.tier, case.head_dim) for case in build_cases(options)] == [
        ("tiers", "Small", 64),
        ("tiers", "8:4", 64),
        ("grid", "256", 16),
        ("grid", "512", 16),
        ("grid", "256", 32),
        ("grid", "512", 32),
    ]


@pytest.mark.parametrize("tier", ["Smal", "0", "-1", "12:", ":12", "1:0", "1.5", ""])
def test_bad_tiers(tier):
    with pytest.raises(UsageError, match="tier") as caught:
        parse_tier(tier)
    assert "XXL" in caught.value.hint


@pytest.mark.parametrize("change", [{"kernels": ("flash",)}, {"dtype": "int8"}, {"heads": 5}])
def test_bad_options(change):
    with pytest.raises(UsageError, match="bench attention"):
        run_bench(AttentionOptions(**{**SMALL, "tiers": ("16",), "kernels": ("sdpa",), **change}))
