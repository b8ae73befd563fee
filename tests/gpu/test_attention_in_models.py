"""Models on a GPU around each attention kernel: one loss curve from one seed, and whole under torch.compile."""

from itertools import pairwise

import pytest
import torch

from lmkit.attention import check_kernel
from lmkit.errors import UsageError
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import ATTENTION
from lmkit.training.setup import build_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
STEPS = 50
VOCABULARY = 256


def build(attention, **fields):
    torch.manual_seed(0)
    # head_dim 64: Hopper's kernels serve the bfloat16 run
    sizes = {"vocab_size": VOCABULARY, "context_length": 250, "d_model": 128, "d_ff": 256}
    config = ModelConfig(**sizes, num_layers=2, num_heads=2, attention=attention, **fields)
    return TransformerLM(config, device="cuda")


def batches(steps):
    """(ids, targets) of a text with something to learn: a walk over the vocabulary with small steps."""
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        steps_taken = torch.randint(0, 3, (8, 251), generator=generator, device="cuda")
        ids = steps_taken.cumsum(dim=1) % VOCABULARY
        yield ids[:, :-1], ids[:, 1:]


def loss_curve(attention, dtype):
    model = build(attention)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids, targets in batches(STEPS):
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = model.loss(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def supports(attention, head):
    try:
        check_kernel(attention, head)
    except UsageError:  # of flash_cuda: float32, or no nvcc
        return False
    return True


# float32: sums in different orders, 1e-7 each, which 50 steps of AdamW magnify a little (measured on an H200: 5e-7
# nats). bfloat16: roundings of 4e-3, of which the mean over 2000 tokens leaves little (measured: 8e-4 nats).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kernel_gives_the_same_loss_curve(dtype):
    head = torch.empty(1, 1, 1, 64, dtype=dtype, device="cuda")
    curves = {name: loss_curve(name, dtype) for name in ATTENTION.names if supports(name, head)}
    assert "flash_triton" in curves
    expected = curves.pop("reference")
    assert expected[0] > 5.0  # log(256) = 5.5: nothing is known at first
    assert expected[-1] < 0.7 * expected[0]  # and much is learnt: a dropped gradient would show
    for name, curve in curves.items():
        apart = (curve - expected).abs().max().item()
        print(f"{name} {dtype}: at most {apart:.2e} nats from reference")
        assert apart < TOLERANCE[dtype], name


def test_a_compiled_model_has_one_graph_and_the_same_gradients():
    ids, targets = next(batches(1))
    model = build("flash_triton")
    names = [name for name, _ in model.named_parameters()]

    def gradients(loss_of):
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(ids, targets)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    eager_loss, eager = gradients(model.loss)
    compiled_loss, compiled = gradients(torch.compile(model.loss, fullgraph=True))
    # The compiler fuses casts, so that some sums skip a rounding to bfloat16 (2^-9 each).
    assert abs(eager_loss - compiled_loss) < 2e-3 * eager_loss
    for name, mine, theirs in zip(names, compiled, eager, strict=True):
        assert (mine - theirs).norm() < 0.03 * theirs.norm(), name


@pytest.mark.parametrize("window", [None, 60])
def test_documents_of_a_row_are_as_each_alone(window):
    """By the kernels on the joined projection, and by sdpa with a mask; losses and gradients."""
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(VOCABULARY, (3, 250), generator=generator, device="cuda")
    targets = ids.roll(-1, 1)
    for row, starts in enumerate(([0, 17, 130], [0, 1, 2, 249], [0, 128])):
        ids[row, starts] = ~ids[row, starts]
    found = []
    for attention in ("flash_triton", "sdpa"):
        model = build(attention, separate_documents=True, attention_window=window).bfloat16()
        assert (model.layers[0].attn.joined_attention is not None) == (attention == "flash_triton")
        loss = model.loss(ids, targets)
        loss.backward()
        gradient = model.layers[0].attn.k_proj.weight.grad
        alone, tokens = 0.0, 0
        with torch.no_grad():
            for row, wanted in zip(ids, targets, strict=True):
                places = [*(row < 0).nonzero().flatten().tolist(), len(row)]
                for start, end in pairwise(places):
                    part = model.loss(row[None, start:end], wanted[None, start:end])
                    alone, tokens = alone + part.item() * (end - start), tokens + end - start
        assert tokens == ids.numel()
        assert loss.item() == pytest.approx(alone / tokens, rel=2e-3)  # bfloat16 logits
        found.append((loss.item(), gradient.float()))
    (one, mine), (other, theirs) = found
    assert one == pytest.approx(other, rel=2e-3)
    assert (mine - theirs).norm() < 2e-2 * theirs.norm()


def test_documents_of_each_batch_are_found_in_a_graph():
    """The bounds follow from the marks inside the graph: what was captured with one batch serves another."""
    losses = []
    for cuda_graph in ("off", "on"):
        config = build("flash_triton", separate_documents=True, operations="fused").config
        torch.manual_seed(0)
        step = build_step(config, Ranks(device=torch.device("cuda")), precision="bf16", cuda_graph=cuda_graph)
        found = []
        for number, (ids, targets) in enumerate(batches(6)):
            ids = torch.where(torch.arange(250, device="cuda") % (10 + 7 * number) == 0, ~ids, ids)
            found.append(step(ids[None], targets[None], lr=1e-3).loss.item())
        assert (step.graph is not None) == (cuda_graph == "on")
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)  # atomics add up in another order every time
