"""`lmkit bench step` on a GPU: times of kernels by class, host time and memory are those of the device."""

import pytest

from lmkit.bench.harness import run_bench
from lmkit.recipe.load import validate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", ["lmkit", "plain_eager"])
def test_every_class_of_a_step_is_seen(tmp_path, variant):
    table = {"sizes": ["quickstart"], "variants": [variant], "attention": "flash_triton", "rounds": 2}
    recipe = validate({"run": {"device": "cuda"}, "bench": {"step": table}}, origin="test")
    result = run_bench("step", recipe, tmp_path, progress=lambda stage, done, total: None)
    assert result is not None
    (row,) = result.rows
    spent = row["class_ms"]
    of_step = ("matrix products", "attention forward", "attention backward", "SwiGLU, GELU", "norm")
    for name in (*of_step, "cross-entropy", "clipping, optimizer", "embedding"):
        assert spent[name] > 0, name
    if variant == "lmkit":  # eager RoPE, casts and additions have names of no class
        assert spent["rest"] < sum(spent.values()) / 2
    assert sum(spent.values()) < 1.5 * row["median_ms"]  # kernels of a stream do not overlap; clocks differ
    assert row["host_ms"] > 0
    assert 0.01 < row["peak_gb"] < 2  # weights and moments are 16 MB, logits 17 MB in float32
