"""The language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmkit.measure.ranges import range_
from lmkit.model.block import LayerCache, TransformerBlock
from lmkit.model.embedding import Embedding
from lmkit.model.head import Head
from lmkit.model.loss import SliceLoss, cross_entropy_slice
from lmkit.model.rms_norm import RMSNorm
from lmkit.model.rope import RotaryTable
from lmkit.recipe.model import ModelConfig


class ModelCache(Protocol):
    """What the model asks of a KV cache (see `lmkit.generation.kv_cache`)."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    def positions(self, seq: int) -> Tensor:
        """The positions of the next `seq` tokens of each row, (batch, seq)."""
        ...


class Layers(nn.ModuleList):
    """The stack of blocks; compiled as one where the whole model is."""

    def __init__(self, blocks: Sequence[TransformerBlock], *, checkpointing: bool) -> None:
        super().__init__(blocks)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, rotations: Tensor, caches: Sequence[LayerCache] | None = None) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)"""
        for index, block in enumerate(self):
            if caches is not None:
                # Not through __call__, which may be compiled: a graph for every length would be made.
                x = block.forward(x, rotations, caches[index])
            elif self.checkpointing and torch.is_grad_enabled():
                # Keep a block's input alone and compute its inside again during backward (Chen et al. 2016). Nothing
                # in it is random, so no generator state is kept.
                x = checkpoint(block, x, rotations, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotations)
        return x


class TransformerLM(nn.Module):
    """A decoder-only Transformer in the style of LLaMA (Touvron et al. 2023): pre-norm blocks with RMSNorm, rotary
    positions, causal attention and SwiGLU.

    Args:
        config: the recipe's `[model]` table with `vocab_size` filled in.
        device, dtype: of the parameters. Mixed precision keeps float32 here and wraps calls in `torch.autocast`.

    Raises:
        ValueError: the configuration has no vocabulary size.
        UsageError: no attention kernel of that name.

    Parameters draw their first values from torch's default generator. With `tie_embeddings` the head's matrix is the
    embedding (Press and Wolf 2017) and starts as a head should, small.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: the tokenizer decides it")
        self.config = config
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, device=device, dtype=dtype)
        self.layers = Layers(
            [TransformerBlock(config, device=device, dtype=dtype) for _ in range(config.num_layers)],
            checkpointing=config.activation_checkpointing,
        )
        self.ln_final = RMSNorm(config.d_model, eps=config.norm_eps, device=device, dtype=dtype)
        self.lm_head = Head(config.d_model, config.vocab_size, device=device, dtype=dtype)
        if config.tie_embeddings:
            self.token_embeddings.weight = self.lm_head.weight
        self.rope = RotaryTable(
            head_dim=config.head_dim,
            context_length=config.context_length,
            theta=config.rope_theta,
            device=device,
        )
        self.slice_loss: SliceLoss = cross_entropy_slice

    def hidden_states(self, ids: Tensor, kv_cache: ModelCache | None = None) -> Tensor:
        """(batch, seq) ids -> (batch, seq, d_model), normalised, ready for the head.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        x = self.token_embeddings(ids)  # (batch, seq, d_model)
        if kv_cache is None:
            x = self.layers(x, self.rope(ids.shape[1]))
        else:
            rotations = self.rope.at(kv_cache.positions(ids.shape[1]))
            x = self.layers.forward(x, rotations, kv_cache.layers)  # uncompiled, as in `Layers`
        return self.ln_final(x)

    def forward(self, ids: Tensor, kv_cache: ModelCache | None = None) -> Tensor:
        """Logits of the token that follows each position: (batch, seq) -> (batch, seq, vocab_size).

        With a cache, `ids` continue what the cache holds.
        """
        return self.lm_head(self.hidden_states(ids, kv_cache))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the targets in nats per token, a float32 scalar.

        Args:
            ids: (batch, seq)
            targets: (batch, seq), the token that follows each of `ids`.
        """
        hidden = self.hidden_states(ids)  # (batch, seq, d_model)
        with range_("loss"):
            return self.lm_head(hidden, targets, slice_loss=self.slice_loss)
