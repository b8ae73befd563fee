"""The bench of decode steps: what is timed, against which bytes, and what is refused."""

import pytest
import torch
from raising import raises

from lmkit.bench import context as bench_context
from lmkit.bench import generate as bench
from lmkit.bench.generate import OwnWriter
from lmkit.bench.step import config_of
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.model.accounting import least_bytes
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.load import validate

TINY = config_of("tiny", "", "sdpa").model_copy(update={"context_length": 40})
QUICK = {"precision": "fp32", "rounds": 2, "steps_per_sample": 2, "contexts": (8, 20), "capacity": 40}


def test_every_case_is_measured_against_its_least_bytes(run_bench):
    result = run_bench("generate", **QUICK, batch_sizes=(1, 3), variants=("lmkit",))
    assert [(row["batch_size"], row["context"]) for row in result.rows] == [(1, 8), (1, 20), (3, 8), (3, 20)]
    for row in result.rows:
        seconds = row["median_ms"] / 1e3
        assert (row["status"], len(row["samples_ms"])) == ("ok", 2)
        assert row["tokens_per_s"] == pytest.approx(row["batch_size"] / seconds)
        assert row["least_bytes"] == least_bytes(TINY, row["batch_size"], row["context"], 4)
        assert row["share"] == pytest.approx(row["least_bytes"] / seconds / 1e10)
        assert row["first_ms"] > 0
    assert set(result.files) >= {"generate_results.jsonl", "generate_report.md", "generate_share.png"}


def test_a_share_of_the_bandwidth_above_what_reads_can_reach_is_refused(run_bench, monkeypatch):
    """Bytes that fit into a cache are not limited by the memory: they have no share."""
    slow = Limits("a test", {"fp32": 1e12}, 1.0)
    monkeypatch.setattr(bench_context, "measure_limits", lambda device, dtypes: slow)
    (cached,) = run_bench("generate", **{**QUICK, "contexts": (8,)}, variants=("lmkit",)).rows
    assert cached["status"] == "ok"
    assert "share" not in cached
    monkeypatch.setattr(bench, "cache_bytes", lambda device: 0)
    refused = run_bench("generate", **{**QUICK, "contexts": (8,)}, variants=("lmkit", "lmkit_torch"))
    for row in refused.rows:
        assert row["status"] == "impossible rate"
        assert not {"median_ms", "tokens_per_s", "share", "first_is", "prefill_ms"} & row.keys()
    assert "copy bandwidth" in refused.table.splitlines()[0] + refused.table.splitlines()[1]


@pytest.mark.parametrize(
    "switches", [{"tie_embeddings": True}, {}, {"qkv_bias": True, "qk_norm": True}], ids=str
)
def test_least_bytes_are_the_weights_and_the_filled_cache(switches):
    """Weights in fp8 are a byte each, and a scale for each row of a matrix."""
    config = TINY.changed(num_kv_heads=2, **switches)
    names = dict(TransformerLM(config).named_parameters())
    if not config.tie_embeddings:
        del names["token_embeddings.weight"]
    matrices = [x for x in names.values() if x.dim() == 2]
    weights = sum(x.numel() for x in names.values())
    cache = 2 * config.num_layers * 2 * config.head_dim * 7 * 3
    assert least_bytes(config, 3, 7, 2) == 2 * (weights + cache)
    in_fp8 = sum(x.numel() for x in matrices)
    scales = 4 * sum(map(len, matrices))
    assert least_bytes(config, 3, 7, 2, fp8=True) == scales + in_fp8 + 2 * (weights - in_fp8 + cache)
    # All layers but the last see four tokens, one of which is the new one.
    config = config.changed(attention_window=4, attention_pattern="S")
    unseen = 2 * (config.num_layers - 1) * 2 * config.head_dim * 4 * 3
    assert least_bytes(config, 3, 7, 2) == 2 * (weights + cache - unseen)


def test_no_step_writes_beyond_the_cache(run_bench, monkeypatch):
    """Also where few steps are timed: on a GPU, a step beyond the cache is an illegal memory access."""
    keys = {**QUICK, "contexts": (20,), "batch_sizes": (3,), "steps_per_sample": 1, "variants": ("lmkit",)}
    places = []

    def step(self):
        places.append(int(self.decoder.state.place.max()))
        timed(self)

    timed = OwnWriter.step
    monkeypatch.setattr(OwnWriter, "step", step)
    recipe = validate({"bench": {"generate": {**keys, "capacity": 32}}}, origin="test")
    with raises(UsageError, "bench.capacity"):
        bench.check(recipe)
    # Of the 33 places, five are for the steps of `host_ms`, which is measured on a GPU.
    assert run_bench("generate", **{**keys, "capacity": 33}).rows[0]["status"] == "ok"
    assert max(places) < 33 - bench.FEW


def test_what_is_timed_writes_tokens_at_the_context():
    writer = OwnWriter(TransformerLM(TINY), 2, 8, temperature=0.0)
    writer.refill()
    for _ in range(3):
        writer.step()
    assert writer.decoder.state.place.tolist() == [11, 11]
    writer.first_token()
    assert writer.decoder.state.place[0] == 8


@pytest.mark.full
def test_transformers_is_measured_beside_it(run_bench):
    pytest.importorskip("transformers")
    keys = {**QUICK, "contexts": (8,), "rounds": 6}
    own, rival = run_bench("generate", **keys, variants=("lmkit", "transformers")).rows
    assert own["status"] == rival["status"] == "ok"
    assert rival["first_is"] > 0
    assert rival["least_bytes"] == own["least_bytes"]


@pytest.mark.full
def test_the_rival_steps_through_its_cache():
    transformers = pytest.importorskip("transformers")
    from lmkit.bench.generate_rivals import TransformersWriter

    torch.manual_seed(0)
    rival = TransformersWriter(TINY, 1, 8, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    text = [0] * 8
    for _ in range(3):
        text.append(int(rival.tokens))
        rival.step()
    with torch.inference_mode():
        logits = rival.model(torch.tensor([text])).logits[0, -1]
    assert transformers is not None
    assert int(rival.tokens) == logits.argmax()
