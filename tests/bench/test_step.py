"""The step bench: what is timed, what is not, and that the rivals compute what they are said to."""

import json
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from lmkit.bench import step as bench
from lmkit.bench.context import Journal
from lmkit.bench.step import ABLATIONS, SIZES, class_table, config_of, findings
from lmkit.bench.step_variants import METHODS, Ablated, NanoGPT, Plain, RivalStep
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.trace import CLASSES
from lmkit.model.accounting import count_parameters, flops_per_token
from lmkit.model.operations import Operations
from lmkit.model.transformer import TransformerLM, join
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import TrainConfig
from lmkit.training.setup import TrainingStep

QUICK = {"sizes": ("tiny",), "precision": "fp32", "rounds": 2, "steps_per_sample": 1, "profiled_steps": 1}
EAGER = {**QUICK, "variants": ("lmkit", "plain_eager"), "profiled_steps": 0}
TINY = config_of("tiny", "lmkit", "sdpa")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.fixture
def _uncompiled(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)


@pytest.mark.usefixtures("_planted_kernels")
def test_a_wrong_kernel_is_wrong_in_every_variant_of_lmkit(run_bench):
    variants = ("lmkit", "lmkit:no_graph", "plain_eager")
    result = run_bench("step", **{**EAGER, "variants": variants, "attention": "scaled"})
    rows = {row["variant"]: row for row in result.rows}
    for variant in variants[:2]:
        assert rows[variant]["status"] == "wrong result"
        assert "step 1: the gradient of " in rows[variant]["detail"]
        assert "median_ms" not in rows[variant]
    assert rows["plain_eager"]["status"] == "ok"
    assert "first_is" not in rows["plain_eager"]  # over what is wrong
    assert result.table.startswith("tiny lmkit; tiny lmkit:no_graph: wrong result: ")


@pytest.mark.usefixtures("_planted_kernels")
@pytest.mark.parametrize("kernel", ["nan_later", "backward_halves_later"])
def test_a_kernel_that_is_wrong_while_it_is_timed_is_wrong(run_bench, kernel):
    keys = {**EAGER, "variants": ("plain_eager", "lmkit", "lmkit:no_graph"), "steps_per_sample": 4}
    result = run_bench("step", **{**keys, "attention": kernel, "precision": "bf16"})
    rows = {row["variant"]: row for row in result.rows}
    assert rows["plain_eager"]["status"] == "ok"
    for variant in ("lmkit", "lmkit:no_graph"):
        assert rows[variant]["status"] == "wrong result", rows[variant]
        assert rows[variant]["detail"].startswith("after timing: ")
        assert not {"median_ms", "class_ms", "last_loss", "first_is"} & rows[variant].keys()


def test_a_rival_whose_loss_is_not_finite_after_timing_is_wrong(run_bench, monkeypatch):
    real, steps = RivalStep.run, []
    monkeypatch.setattr(
        RivalStep, "run", lambda rival: real(rival) * (1 if steps.append(1) or len(steps) < 12 else math.nan)
    )
    ours, theirs = run_bench("step", **EAGER).rows
    assert (ours["status"], theirs["status"]) == ("ok", "wrong result")
    assert "median_ms" not in theirs


@pytest.mark.usefixtures("_uncompiled")
def test_everything_is_measured_and_every_file_is_there(run_bench, tmp_path):
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
    assert max(map(len, result.table.splitlines())) <= 100


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


@pytest.mark.parametrize("factor", [0.0, math.nan])
def test_a_variant_that_does_not_learn_is_not_timed(run_bench, monkeypatch, factor):
    real = RivalStep.run
    monkeypatch.setattr(RivalStep, "run", lambda rival: real(rival) * factor)
    ours, theirs = run_bench("step", **EAGER).rows
    assert (ours["status"], theirs["status"]) == ("ok", "wrong result")
    assert "median_ms" not in theirs
    assert ours["median_ms"] > 0


@pytest.mark.parametrize(
    ("variant", "compiled"), [("lmkit", "none"), ("lmkit_block", "block"), ("lmkit_whole", "whole")]
)
def test_ours_is_the_step_that_train_runs(run_bench, monkeypatch, variant, compiled):
    built = []

    def build(recipe, ranks, batches):
        built.append((recipe.model, recipe.train.precision))
        return TrainingStep(recipe.changed(model={"compile": "none"}), ranks, batches)

    monkeypatch.setattr("lmkit.training.setup.TrainingStep", build)
    run_bench("step", **{**EAGER, "variants": (variant,), "attention": "vectorized", "precision": "bf16"})
    assert built == [(config_of("tiny", variant, "vectorized"), "bf16")]
    assert (built[0][0].compile, built[0][0].attention) == (compiled, "vectorized")


class Counted(Operations):
    """Operations that note their calls; what an ablation takes from `Operations` notes nothing."""

    called: ClassVar[set[str]] = set()

    @staticmethod
    def noting(method):
        def call(self, *args, **options):
            Counted.called.add(method)
            return getattr(super(), method)(*args, **options)

        return call


for method in METHODS.values():
    setattr(Counted, method, Counted.noting(method))


@pytest.mark.parametrize("variant", ABLATIONS)
def test_an_ablation_takes_out_what_it_says_and_puts_it_back(monkeypatch, variant):
    batches = bench.FewBatches((batch()[:, None],))
    recipe = Recipe(model=config_of("tiny", variant, "vectorized"), train=TrainConfig())
    training = TrainingStep(recipe, Ranks(), batches)
    training.model.operations = whole = Counted()
    attention = [block.attn.attention for block in training.model.layers]
    attended, waited = [], []
    monkeypatch.setattr(
        "lmkit.bench.training_gate.attention_function",
        lambda name: lambda *args, **options: attended.append(name) or attention[0](*args, **options),
    )
    run = training.run
    monkeypatch.setattr(training, "run", lambda *, wait: waited.append(wait) or run(wait=wait))
    Counted.called.clear()
    Ablated(variant, training).run()
    left_out = set(METHODS.values()) - Counted.called
    assert left_out == (
        set(METHODS.values())
        if variant in ("lmkit:plain", "lmkit:none")
        else {METHODS[variant]}
        if variant in METHODS
        else set()
    )
    assert attended == ["sdpa"] * (2 if variant in ("lmkit:sdpa", "lmkit:none") else 0)
    assert waited == [variant in ("lmkit:waits", "lmkit:none")]
    assert training.model.operations is whole
    assert [block.attn.attention for block in training.model.layers] == attention


def test_ablations_share_weights_but_those_of_another_precision(run_bench, monkeypatch):
    built = []

    def build(recipe, ranks, batches):
        built.append((recipe.train.precision, recipe.train.cuda_graph))
        return TrainingStep(recipe, ranks, batches)

    monkeypatch.setattr("lmkit.training.setup.TrainingStep", build)
    variants = ("lmkit", "lmkit:no_graph", "lmkit:plain", "lmkit:autocast", "lmkit:none")
    rows = run_bench("step", **{**EAGER, "variants": variants, "precision": "bf16"}).rows
    assert built == [("bf16", "auto"), ("bf16", "off"), ("bf16-autocast", "off")]
    assert [row["status"] for row in rows] == ["ok"] * 5


def batch(generator_seed=0):
    generator = torch.Generator().manual_seed(generator_seed)
    return torch.randint(256, (2, 2, 32), generator=generator)  # ids and targets, (rows, seq)


def test_plain_is_our_architecture():
    """In float64 both agree to its rounding errors, in the loss and in every gradient."""
    torch.manual_seed(0)
    ours = TransformerLM(TINY, dtype=torch.float64)
    for parameter in ours.parameters():  # gains are ones: make every weight count
        parameter.data += 0.1 * torch.randn_like(parameter)
    plain = Plain(TINY).double()
    pairs = [
        (plain.embedding, ours.token_embeddings),
        (plain.norm, ours.ln_final),
        (plain.head, ours.lm_head),
    ]
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

    x = model.tokens.weight[ids] + model.positions.weight[:32]
    for block in model.blocks:
        joined = norm(x, block.attention_norm.weight) @ block.qkv.weight.T
        q, k, v = (part.split(16, dim=-1) for part in joined.split(64, dim=-1))  # of each of 4 heads
        heads = [torch.zeros_like(part) for part in v]
        for head in range(4):
            for i in range(32):
                scores = q[head][:, i : i + 1] @ k[head][:, : i + 1].mT / 4.0  # sqrt(16)
                weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
                heads[head][:, i] = (weights @ v[head][:, : i + 1])[:, 0]
        x = x + torch.cat(heads, dim=-1) @ block.attention_out.weight.T
        inner = norm(x, block.mlp_norm.weight) @ block.mlp_in.weight.T
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        x = x + inner @ block.mlp_out.weight.T
    logits = norm(x, model.norm.weight) @ model.tokens.weight.T
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
        assert nanogpt.blocks[0].mlp_in.weight.shape == (4 * 768, 768)  # GPT-2's own width


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_of_a_rival_run_in_the_precision_and_its_weights_are_float32(precision, dtype):
    rival = RivalStep(
        "plain_eager", TINY, torch.device("cpu"), bench.FewBatches((batch()[:, None],)), precision=precision
    )
    found = []
    for module in rival.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    rival.run()
    assert found == [dtype] * (4 * 2 + 1)
    assert {parameter.dtype for parameter in rival.model.parameters()} == {torch.float32}


def row(variant, **keys):
    return {"size": "tiny", "variant": variant, "versus": "lmkit", **keys}


def test_findings_compare_with_the_first():
    compared = {"first_is": 1.25, "first_is_low": 1.2, "first_is_high": 1.3, "verdict": "faster"}
    (found,) = findings([row("lmkit"), row("nanogpt", **compared), row("plain", status="out of memory")])
    assert "tiny: lmkit is 1.250x as fast as nanogpt (95%: 1.200 to 1.300; faster)" in found


def test_the_class_table_has_sums_and_steps():
    spent = dict.fromkeys(CLASSES, 2.0)
    floors = {"norm": 0.5, "RoPE": 0.25}
    rows = [
        row("lmkit", class_ms=spent, floor_ms=floors, median_ms=30.0),
        row("plain", status="out of memory"),
    ]
    table = class_table(rows).splitlines()
    assert table[0] == "| ms | floor | lmkit |"
    assert "| norm | 0.50 | 2.00 |" in table
    assert "| rest | - | 2.00 |" in table
    assert f"| sum | 0.75 | {2 * len(CLASSES):.2f} |" in table
    assert "| step | - | 30.00 |" in table
    assert class_table([row("lmkit")]) == ""
