import pytest
import torch

from lmkit.measure import limits, timing
from lmkit.measure.environment import known_peak
from lmkit.measure.timing import Timing


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H2000", "bf16", None),
    ],
)
def test_known_chips(name, dtype, peak):
    assert known_peak(name, dtype) == peak


def test_measured_rates_are_possible_for_a_cpu():
    before = torch.get_float32_matmul_precision()
    found = limits.measure_limits("cpu", ["tf32"])
    assert torch.get_float32_matmul_precision() == before
    # From a slow single core to the largest host: a wrong unit or a lost factor 1000 falls outside.
    assert 1e9 < found.matmul_flops["tf32"] < 1e14
    assert 1e8 < found.copy_bytes_per_s < 2e12


def test_the_rate_counts_two_flops_per_multiply_add(monkeypatch):
    fixed = Timing((3.0, 1.0, 2.0), (0, 1, 2), "fake", "warm", 1)  # the best counts: it is a limit
    monkeypatch.setattr(timing, "time_variants", lambda variants, **_: dict.fromkeys(variants, fixed))
    assert limits.measure_matmul_peak("cpu", "fp32") == 2.0 * 1024**3 / 1e-3
    assert limits.measure_copy_bandwidth("cpu") == 2.0 * 2**27 / 1e-3


def test_utilization_names_its_basis(monkeypatch):
    measured = limits.Limits("x", {"bf16": 100e12}, 1e12)
    on_cpu = limits.mfu_fields(50e12, "cpu", "bf16", measured)
    assert on_cpu == {"mfu": 0.5, "mfu_basis": "measured bf16 matmul rate, 100 TFLOP/s"}
    monkeypatch.setattr("lmkit.measure.limits.device_name", lambda device: "NVIDIA H200")
    on_h200 = limits.mfu_fields(494.5e12, "cpu", "bf16", measured)
    assert on_h200["mfu"] == pytest.approx(0.5)
    assert on_h200["mfu_basis"] == "dense bf16 peak of NVIDIA H200, 989 TFLOP/s"
