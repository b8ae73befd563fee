"""The rivals of `lmkit bench step`: models of plain PyTorch modules.

Each trains as its users do: float32 weights under autocast, logits of all tokens at once, PyTorch's fused AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.bench.failures import wrong_result
from lmkit.bench.training_gate import Budget, after_timing
from lmkit.core.adamw import decay_groups
from lmkit.core.batches import BatchSource
from lmkit.core.model import RotaryEmbedding
from lmkit.recipe.tables import ModelConfig
from lmkit.training.step import load_batch

if TYPE_CHECKING:
    from lmkit.training.setup import TrainingStep


def causal_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """PyTorch's attention of q, k and v (batch, seq, d_model); the result has their shape."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """The attention half of a pre-norm layer without biases; subclasses have the other half."""

    def __init__(self, config: ModelConfig, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.ln1, self.ln2 = norm(config.d_model), norm(config.d_model)
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)


class NanoGPTBlock(Block):
    """Layer of GPT-2: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, partial(nn.LayerNorm, bias=False))
        # As many products as SwiGLU's three matrices; 4 d_model where d_ff is 8/3 d_model.
        d_hidden = 3 * config.d_ff // 2
        self.up = nn.Linear(config.d_model, d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)"""
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        x = x + self.output(causal_attention(q, k, v, self.num_heads))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class PlainBlock(Block):
    """The layer of `lmkit.model.TransformerBlock` in PyTorch's modules, with joined projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, partial(nn.RMSNorm, eps=config.norm_eps))
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """(batch, seq, d_model), (seq, head_dim / 2, 2) -> (batch, seq, d_model)"""
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k = (self.rotated(part, cos_sin) for part in (q, k))
        x = x + self.output(causal_attention(q, k, v, self.num_heads))
        gate, up = self.gate_up(self.ln2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def rotated(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotate the pairs of channels of each head of x (batch, seq, d_model)."""
        even, odd = x.unflatten(-1, (self.num_heads, -1, 2)).unbind(-1)  # (batch, seq, heads, head_dim / 2)
        cos, sin = cos_sin.unsqueeze(1).unbind(-1)  # (seq, 1, head_dim / 2), float32
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(2).to(x.dtype)


class Model(nn.Module):
    """Embedding, blocks, norm and head; `model(ids, targets)` is the mean cross-entropy, in nats per token."""

    def __init__(self, config: ModelConfig, block: type[Block], norm: nn.Module) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([block(config) for _ in range(config.num_layers)])  # type: ignore[call-arg]
        self.norm = norm
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def loss(self, x: Tensor, targets: Tensor, *of_blocks: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *of_blocks)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class NanoGPT(Model):
    """GPT-2 as https://github.com/karpathy/nanoGPT describes its training: learned positions, LayerNorm, GELU, no
    biases, no dropout, a tied head, weights from N(0, 0.02), those before a residual addition smaller by
    sqrt(2 layers) (Radford et al. 2019, section 2.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, NanoGPTBlock, nn.LayerNorm(config.d_model, bias=False))
        self.positions = nn.Embedding(config.context_length, config.d_model)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.loss(self.embedding(ids) + self.positions(positions), targets)


class Plain(Model):
    """The architecture of `lmkit.model.TransformerLM` in PyTorch's modules."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, PlainBlock, nn.RMSNorm(config.d_model, eps=config.norm_eps))
        self.rope = RotaryEmbedding(
            head_dim=config.head_dim, context_length=config.context_length, theta=config.rope_theta
        )

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.embedding(ids), targets, self.rope(ids.shape[1]))


RIVALS = {"nanogpt": (NanoGPT, True), "plain": (Plain, True), "plain_eager": (Plain, False)}
"""Name -> the model, and whether torch.compile compiles it as a whole."""


class RivalStep:
    """Train a rival of `RIVALS` step by step, as `lmkit.training.setup.TrainingStep.run` does.

    Args:
        batches: int64, (1, rows, seq) each.
        precision: of the matrix products: "fp32", or bfloat16 by autocast.
    """

    def __init__(
        self, name: str, config: ModelConfig, device: torch.device, batches: BatchSource, precision: str
    ) -> None:
        make, compiled = RIVALS[name]
        with device:
            self.model = make(config).to(device)
        if compiled:
            self.model.compile()
        groups = decay_groups(self.model.parameters(), 0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
        self._device, self._batches, self._narrow = device, batches, precision != "fp32"
        self._done = 0

    def run(self) -> Tensor:
        """Make one step on the next batch: forward, backward, clipping to norm 1, AdamW; return the loss."""
        inputs, targets = load_batch(self._batches, self._done, self._device)
        self._done += 1
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._narrow):
            loss: Tensor = self.model(inputs[0], targets[0])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def wrong_by_now(training: TrainingStep | RivalStep, budget: Budget) -> dict[str, Any]:
    """Return status and detail of a variant that was timed and is wrong by now, else {}."""
    if not isinstance(training, RivalStep):
        return after_timing(training, budget)
    finite = math.isfinite(training.run().item())
    return {} if finite else wrong_result("after timing: the loss is not finite")
