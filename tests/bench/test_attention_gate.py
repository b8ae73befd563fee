"""The gate of the attention bench: what it refuses, and what it must let pass."""

import itertools
from functools import cache

import planted_kernels as planted
import pytest
import torch
from marking import full_except

from lmkit.attention.vectorized import vectorized
from lmkit.bench import attention_gate
from lmkit.bench.attention import Options, build_variant, precision_of
from lmkit.bench.attention_gate import EXACT, TF32, Gate, Inputs, arithmetic_of, exact_at
from lmkit.registry import ATTENTION

CPU = torch.device("cpu")
SMALL = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}


def inputs_of(queries, keys, *, backward=False, seed=0, **options):
    options = Options(**SMALL | options)
    sizes = (queries, keys, options.head_dim)
    return attention_gate.make_inputs(options, *sizes, device=CPU, seed=seed, backward=backward)


@pytest.mark.parametrize("backward", full_except(True, False))
@pytest.mark.parametrize("dtype", full_except("fp32", "bf16"))
@pytest.mark.parametrize("function", planted.WRONG)
def test_a_sample_of_the_rows_of_a_long_case_shows_the_same_faults(function, dtype, backward):
    """1100 tokens: past `FULL_CHECK_LENGTH`. The late rows, which see many keys, are where a fault is smallest."""
    gate = long_gate(dtype, backward=backward)
    assert judge(gate, vectorized, arithmetic_of(dtype, keeps_scores=True)) == []
    assert judge(gate, function)


@pytest.mark.parametrize("start", [1000, 1696, 2900])
def test_a_tile_of_every_head_that_no_sampled_row_meets_is_found_beside_pytorch(monkeypatch, start):
    """In bfloat16, where the budget is largest."""
    without = torch.tensor([row for row in range(0, 3000, 40) if not start <= row < start + 16])
    monkeypatch.setattr(attention_gate, "rows_to_check", lambda *_: without)

    def forgetful(q, k, v, *, causal):
        out = vectorized(q, k, v, causal=causal).clone()
        out[:, :, start : start + 16] = 0.0
        return out

    gate = Gate(inputs_of(3000, 3000, dtype="bf16"))
    arithmetic = arithmetic_of("bf16", keeps_scores=True)
    assert judge(gate, vectorized, arithmetic) == []
    (fault,) = judge(gate, forgetful, arithmetic)
    assert fault.startswith("out: a row ")


@pytest.mark.parametrize("length", [129, 1100, 5120, 131072])
def test_sampled_rows_leave_no_large_gap_and_another_seed_chooses_others(length):
    first, second = (attention_gate.rows_to_check(length, 200_000, CPU, seed).tolist() for seed in (0, 1))
    for rows in (first, second):
        assert (rows[0], rows[-1]) == (0, length - 1)
        assert rows == sorted(set(rows))
        assert len(rows) <= attention_gate.SAMPLED_ROWS
        assert max(b - a for a, b in itertools.pairwise(rows)) <= length / 64 + 1
    assert length < 1100 or len({*second} - {*first}) > 60


def test_rows_are_measured_by_their_own_size():
    """Of 3000 keys the last 16 are missing: 7% of the last rows, which are a hundredth of the first ones' size."""
    gate = Gate(inputs_of(3000, 3000, dtype="bf16"))
    (fault,) = judge(gate, planted.last_tile_skipped)
    assert fault.startswith("out: worst_row")


@cache
def long_gate(dtype, *, backward):
    return Gate(inputs_of(1100, 1100, dtype=dtype, backward=backward))


def judge(gate: Gate, function, arithmetic=EXACT):
    spots = gate.faults_at_spots(gate.probe.run(function), arithmetic)
    return spots + gate.faults_against_pytorch(gate.inputs.run(function), arithmetic)


@pytest.mark.parametrize("length", full_except(300, 1100))
def test_tf32_is_judged_by_ten_bits_of_mantissa(length):
    gate = Gate(inputs_of(length, length))
    for honest in (planted.cut_operands, planted.nearest_operands):
        assert judge(gate, honest, TF32) == []
        assert judge(gate, honest, EXACT), "passes for fp32"
    assert judge(gate, planted.bfloat16_operands, TF32), "seven bits pass for ten"
    assert judge(gate, planted.scaled, TF32)
    assert judge(gate, planted.mask_too_wide, TF32)


def test_labels_and_budgets_of_precisions():
    assert precision_of("flash_triton:tf32", "fp32") == "tf32"
    assert precision_of("flash_triton:tf32+compile", "fp32") == "tf32"
    assert precision_of("vectorized", "fp32") == "fp32"
    assert arithmetic_of("tf32", keeps_scores=True) is TF32
    assert arithmetic_of("fp32", keeps_scores=True) is EXACT
    assert arithmetic_of("bf16", keeps_scores=False) is EXACT
    assert arithmetic_of("bf16", keeps_scores=True).scores(torch.tensor(1.001)) == 1.0


@pytest.mark.parametrize("name", ["vectorized", "reference"])
@pytest.mark.parametrize("length", full_except(300, 2048))
def test_kernels_that_keep_bfloat16_scores_pass_and_no_others_get_their_budget(name, length):
    """Scores of 30 and more are off by 0.1 in bfloat16: far more than PyTorch's kernel is."""
    shape = {"dtype": "bf16", "data": "logits x 8", "head_dim": 64, "heads": 2}
    gate = Gate(inputs_of(length, length, backward=True, **shape))
    function = build_variant(name, "bf16")
    assert judge(gate, function, arithmetic_of("bf16", keeps_scores=True)) == []
    assert judge(gate, function, EXACT)


@pytest.mark.parametrize("data", ["normal", "logits x 8", "sink", "late sink", "ramp up", "ramp down"])
def test_kinds_of_data(data):
    inputs = inputs_of(200, 200, data=data)
    scores = (inputs.q[:, :2] @ inputs.k[:, :1].mT * 16**-0.5).mean(dim=(0, 1, 2))  # (keys,)
    lifted = scores - scores.median()
    if data in ("sink", "late sink"):
        position = 3 if data == "sink" else 100
        assert lifted.argmax() == position
        assert lifted.max() == pytest.approx(60.0, abs=2.0)  # the other dimensions add noise of about 1
    elif data.startswith("ramp"):
        ends = (scores[-1] - scores[0]).item()
        # Two positions, each with noise of about 1.
        assert ends == pytest.approx(60.0 if data == "ramp up" else -60.0, abs=3.0)
    elif data == "logits x 8":
        assert inputs.q.std() == pytest.approx(8.0, rel=0.1)  # a sample of thousands: good to 1% or so
    assert all(x.isfinite().all() for x in (inputs.q, inputs.k))
    few = inputs_of(5, 2, data="sink")
    assert (few.k[..., 0].argmax(dim=-1) == 1).all()  # the last


@pytest.mark.parametrize("chosen", [None, [0, 1, 7, 31, 32]])
@pytest.mark.parametrize("causal", [True, False])
def test_exact_at_equals_autograd_in_float64(causal, chosen, monkeypatch):
    monkeypatch.setattr("lmkit.bench.attention_gate.BLOCK_ELEMENTS", 3 * 24)  # blocks of 3 queries, ragged
    whole = inputs_of(33, 24, backward=True, causal=causal).of_key_head(1, 1)
    rows = torch.arange(33) if chosen is None else torch.tensor(chosen)
    dout = torch.zeros_like(whole.dout)
    dout[:, :, rows] = whole.dout[:, :, rows]
    leaves = [x.double().requires_grad_() for x in (whole.q, whole.k, whole.v)]
    out = vectorized(*leaves, causal=causal)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout.double())
    inputs = Inputs(whole.q, whole.k, whole.v, dout, causal)
    expected = (out.detach()[:, :, rows], dq[:, :, rows], dk, dv)
    for mine, theirs in zip(exact_at(inputs, rows), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)  # both are float64


@pytest.mark.parametrize("length", full_except(40, 2048))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_gate_lets_every_honest_kernel_pass(dtype, length):
    shape = {"dtype": dtype, "projection_layout": True, "heads": 2, "head_dim": 64}
    inputs = inputs_of(length, length, backward=True, **shape)
    assert not inputs.q.is_contiguous()
    gate = Gate(inputs)
    for name in ("reference", "vectorized", "flash_torch", "sdpa"):
        arithmetic = arithmetic_of(dtype, keeps_scores=ATTENTION.facts(name).keeps_scores)
        assert judge(gate, build_variant(name, dtype), arithmetic) == []


@pytest.mark.parametrize(
    ("dtype", "data", "shape", "seed"),
    [
        ("bf16", "sink", (16, 16, 16), 817620),
        ("bf16", "late sink", (5, 5, 64), 494054),
        ("bf16", "ramp up", (1, 64, 64), 769477),
        ("bf16", "ramp down", (3, 3, 64), 867542),
        ("fp16", "ramp down", (16, 64, 16), 11204),
        ("fp32", "sink", (2, 2, 64), 158088),
        ("fp32", "logits x 8", (16, 7, 64), 736096),
    ],
)
def test_rows_whose_terms_cancel_are_measured_by_their_terms(dtype, data, shape, seed):
    """A query that looks at one key has dq = 0: what an honest kernel returns is rounding errors alone."""
    for causal in (True, False):
        kind = {"dtype": dtype, "data": data, "causal": causal, "head_dim": shape[2]}
        gate = Gate(inputs_of(*shape[:2], backward=True, seed=seed, **kind))
        for name in ("reference", "flash_torch", "sdpa"):
            arithmetic = arithmetic_of(dtype, keeps_scores=ATTENTION.facts(name).keeps_scores)
            assert judge(gate, build_variant(name, dtype), arithmetic) == [], (name, causal)
        assert judge(gate, planted.scaled)
        assert shape[0] == 1 or not causal or judge(gate, planted.mask_too_narrow)
