"""The step bench: what is timed, what is not, and that the rivals compute what they are said to."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from lmkit.bench import step as bench
from lmkit.bench.context import Journal
from lmkit.bench.step import SIZES, config_of
from lmkit.bench.step_rivals import NanoGPT, Plain, RivalStep
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.trace import CLASSES
from lmkit.model.accounting import count_parameters, flops_per_token
from lmkit.model.transformer import TransformerLM, join

QUICK = {"sizes": ("tiny",), "precision": "fp32", "rounds": 2, "steps_per_sample": 1, "profiled_steps": 1}
EAGER = {**QUICK, "variants": ("lmkit", "plain_eager"), "profiled_steps": 0}
TINY = config_of("tiny", "lmkit", "sdpa")


@pytest.mark.parametrize(("factor", "right"), [(0.0, 0), (math.nan, 0), (math.nan, 11)])
def test_a_rival_that_does_not_learn_or_ends_not_finite_is_wrong(run_bench, monkeypatch, factor, right):
    real, steps = RivalStep.run, []

    def run(rival):
        steps.append(1)
        return real(rival) * (1 if len(steps) <= right else factor)

    monkeypatch.setattr(RivalStep, "run", run)
    ours, theirs = run_bench("step", **EAGER).rows
    assert (ours["status"], theirs["status"]) == ("ok", "wrong result")
    assert "median_ms" not in theirs


def test_everything_is_measured_and_every_file_is_there(run_bench, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    journal = Journal(tmp_path / "new folder" / "rows.partial")
    result = run_bench("step", journal, **QUICK)
    rows = {row["variant"]: row for row in result.rows}
    assert list(rows) == ["lmkit", "nanogpt", "plain", "plain_eager"]
    flops = flops_per_token(TINY, 32, causal=True)
    for variant, row in rows.items():
        assert (row["status"], row["size"], len(row["samples_ms"])) == ("ok", "tiny", 2)
        assert row["last_loss"] < row["first_loss"] < 10
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / (row["median_ms"] / 1e3))
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / 1e12)
        assert list(row["class_ms"]) == list(CLASSES)
        assert row["class_ms"]["matrix products"] > 0
        if variant != "lmkit":  # compared round by round
            assert row["first_is"] == paired_ratio(rows["lmkit"]["samples_ms"], row["samples_ms"]).speedup
            assert row["verdict"] == "too few repeats"
    assert rows["plain"]["parameters"] == rows["lmkit"]["parameters"] == count_parameters(TINY).total
    assert rows["lmkit"]["floor_ms"]["SwiGLU, GELU"] == pytest.approx(8 * 192 * 2 * 4 * 128 / 1e10 * 1e3)
    assert set(result.files) == {"step_results.csv", "step_results.jsonl", "step_report.md", "step_mfu.png"}
    assert "| matrix products |" in result.files["step_report.md"]
    assert [json.loads(line) for line in result.files["step_results.jsonl"].splitlines()] == result.rows
    assert journal.rows() == result.rows


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at every tensor's
def test_compiled_variants_run(run_bench, monkeypatch):
    real, modules = torch.nn.Module.compile, []

    def compile_(module, **options):
        modules.append(type(module).__name__)
        real(module, backend="aot_eager")  # inductor takes a minute

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    variants = ("lmkit_block", "nanogpt", "plain", "plain_eager", "lmkit_whole")
    result = run_bench("step", **{**QUICK, "variants": variants})
    assert {row["variant"]: row["status"] for row in result.rows} == dict.fromkeys(variants, "ok")
    ours = [*["TransformerBlock"] * 2, "SliceLoss"], ["Layers", "SliceLoss"]
    assert modules == [*ours[0], "NanoGPT", "Plain", *ours[1]]


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, 2, 32), generator=generator)  # ids and targets, (rows, seq)


def test_plain_is_our_architecture():
    """In float64 both agree to its rounding errors, in the loss and in every gradient."""
    torch.manual_seed(0)
    ours = TransformerLM(TINY, dtype=torch.float64)
    for parameter in ours.parameters():  # gains are ones: make every weight count
        parameter.data += 0.1 * torch.randn_like(parameter)
    plain = Plain(TINY).double()
    pairs = [(plain.embedding, ours.token_embeddings)]
    pairs += [(plain.norm, ours.ln_final), (plain.head, ours.lm_head)]
    for rival, block in zip(plain.blocks, ours.layers, strict=True):
        pairs += [(rival.ln1, block.ln1), (rival.output, block.attn.output_proj)]
        pairs += [(rival.ln2, block.ln2), (rival.down, block.ffn.w2)]
        for joined, owner in ((rival.qkv, block.attn), (rival.gate_up, block.ffn)):
            weights = [x.weight for x in owner.joined_layers()]
            pairs.append((joined, SimpleNamespace(weight=join(weights), parts=weights)))
    for rival, part in pairs:
        rival.weight.data = part.weight.detach().clone()
    assert {id(p) for p in plain.parameters()} == {id(rival.weight) for rival, _ in pairs}
    ids, targets = batch()
    loss, wanted = plain(ids, targets), ours.loss(ids, targets)
    # Cosines and sines are float32 in both; everything else has 2e-16 of rounding per operation.
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    loss.backward()
    wanted.backward()
    for rival, part in pairs:
        gradient = torch.cat([weight.grad for weight in getattr(part, "parts", [part.weight])])
        torch.testing.assert_close(rival.weight.grad, gradient, rtol=1e-9, atol=1e-12)


def test_nanogpt_is_gpt2():
    """Against the formulas of Radford et al. 2019 and Vaswani et al. 2017, one head and one position at a time."""
    torch.manual_seed(0)
    model = NanoGPT(TINY).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids, targets = batch()

    def norm(x, gain):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    x = model.embedding.weight[ids] + model.positions.weight[:32]
    for block in model.blocks:
        joined = norm(x, block.ln1.weight) @ block.qkv.weight.T
        q, k, v = (part.split(16, dim=-1) for part in joined.split(64, dim=-1))  # of each of 4 heads
        heads = [torch.zeros_like(part) for part in v]
        for head in range(4):
            for i in range(32):
                scores = q[head][:, i : i + 1] @ k[head][:, : i + 1].mT / 4.0  # sqrt(16)
                weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
                heads[head][:, i] = (weights @ v[head][:, : i + 1])[:, 0]
        x = x + torch.cat(heads, dim=-1) @ block.output.weight.T
        inner = norm(x, block.ln2.weight) @ block.up.weight.T
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        x = x + inner @ block.down.weight.T
    logits = norm(x, model.norm.weight) @ model.embedding.weight.T
    losses = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]
    assert model(ids, targets).item() == pytest.approx(losses.mean().item(), rel=1e-12)  # float64


@pytest.mark.parametrize("size", SIZES)
def test_nanogpt_multiplies_as_much_as_ours(size):
    config = config_of(size, "lmkit", "sdpa")
    with torch.device("meta"):
        nanogpt, plain = NanoGPT(config), Plain(config)
    products = [sum(p.numel() for p in model.parameters() if p.ndim == 2) for model in (nanogpt, plain)]
    looked_up = [nanogpt.positions.weight.numel(), plain.embedding.weight.numel()]
    assert products[0] - looked_up[0] == products[1] - looked_up[1]
    if size == "162M":
        assert nanogpt.blocks[0].up.weight.shape == (4 * 768, 768)  # GPT-2's own width


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_of_a_rival_run_in_the_precision_and_its_weights_are_float32(precision, dtype):
    batches = bench.FewBatches((batch()[:, None],))
    rival = RivalStep("plain_eager", TINY, torch.device("cpu"), batches, precision=precision)
    found = []
    for module in rival.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    rival.run()
    assert found == [dtype] * (4 * 2 + 1)
    assert {parameter.dtype for parameter in rival.model.parameters()} == {torch.float32}
