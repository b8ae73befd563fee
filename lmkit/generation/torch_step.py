"""The step of a `Decoder` by as few PyTorch operations as possible: on a CPU, dispatching them takes longer than the
arithmetic of a small model. So arrays are allocated once, and views of them are made once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.kernels.decode.reference import plain_advance, plain_rules
from lmkit.model.operations import rms_norm

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder


def advance(decoder: Decoder, logits: Tensor) -> None:
    """Draw the next token of every row from its logits, (rows, vocab_size)."""
    plain_advance(
        plain_rules(logits, decoder.rules),
        decoder.state,
        decoder.sampling,
        decoder.rules,
        most=decoder.most,
        logprobs=decoder.logprobs,
    )


class TorchStep:
    """Call it with the number of tokens of the longest row to make a step.

    Attributes:
        switches: the switches of [model] that it implements; `SingleRowStep` has the same.
    """

    switches = frozenset({"qkv_bias", "qk_norm"})

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        config, weight = decoder.model.config, decoder.model.lm_head.weight
        rows, width, head_dim = decoder.rows, config.d_model, config.head_dim
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        # A last column of sqrt(eps width) makes the norm of a row sqrt(width (mean square + eps)).
        self.padded = weight.new_full((rows, width + 1), math.sqrt(config.norm_eps * width))
        self.x = self.padded[:, :width]
        gains = [gain for layer in decoder.layers for gain in (layer.norm1, layer.norm2)]
        gains.append(decoder.model.ln_final.weight)
        self.gains = [gain.to(self.wide) * width**0.5 for gain in gains]
        self.qkv = weight.new_zeros(rows, (config.num_heads + 2 * config.kv_heads) * head_dim)
        heads = self.qkv.unflatten(-1, (-1, head_dim))  # (rows, heads + 2 kv_heads, head_dim)
        q, self.k, self.v = heads.split((config.num_heads, config.kv_heads, config.kv_heads), dim=1)
        self.q = q[:, :, None]  # (rows, heads, 1, head_dim)
        self.qk = heads[:, : -config.kv_heads].unflatten(-1, (-1, 2))  # (..., head_dim / 2, 2)
        self.joint = weight.new_zeros(rows, 2 * config.d_ff)
        self.gate, self.up = self.joint.chunk(2, dim=1)
        self.hidden = weight.new_zeros(rows, config.d_ff)
        self.turns = torch.view_as_complex(
            decoder.model.rope.cos_sin.to(self.wide)
        )  # (capacity, head_dim / 2)
        self.positions = torch.arange(decoder.capacity, device=weight.device)
        # Where in (rows * kv_heads * capacity) the places of a row and head begin.
        starts = torch.arange(rows * config.kv_heads, device=weight.device) * decoder.capacity
        self.starts = starts.view(rows, config.kv_heads)
        self.caches = [
            (keys.view(-1, head_dim), values.view(-1, head_dim))
            for keys, values in zip(decoder.keys, decoder.values, strict=True)
        ]
        self.matrices = [  # transposed
            (layer.qkv.T, layer.qkv_bias, layer.qk_gain, layer.output.T, layer.gate_up.T, layer.down.T)
            for layer in decoder.layers
        ]
        self.grouped = config.num_heads != config.kv_heads

    def begin(self, rows: Tensor, tokens: Tensor) -> None:
        """Prepare nothing: a step reads its tokens from the rows' texts."""

    def __call__(self, longest: int) -> None:
        advance(self.decoder, self.logits(longest))

    def logits(self, longest: int) -> Tensor:
        """Read the newest token of every row; return the logits of the next, (rows, vocab_size)."""
        decoder, x = self.decoder, self.x
        place = decoder.state.place
        ids = decoder.state.text.gather(1, place[:, None])[:, 0]
        x.copy_(F.embedding(ids, decoder.model.token_embeddings.weight))
        turn = self.turns[place][:, None]  # (rows, 1, head_dim / 2)
        at = (self.starts + place[:, None]).view(-1)  # (rows * kv_heads)
        hidden = None  # -inf at keys that a row must not see, (rows, 1, 1, longest)
        if decoder.rows > 1:
            beyond = self.positions[:longest] > place[:, None]
            hidden = x.new_zeros(beyond.shape).masked_fill_(beyond, -math.inf)[:, None, None]
        all_keys = decoder.keys[:, :, :, :longest].unbind()
        all_values = decoder.values[:, :, :, :longest].unbind()
        gains = iter(self.gains)
        for (qkv, bias, qk_gain, output, gate_up, down), caches, keys, values in zip(
            self.matrices, self.caches, all_keys, all_values, strict=True
        ):
            torch.mm(self.normed(next(gains)), qkv, out=self.qkv)
            if bias is not None:
                self.qkv += bias
            if qk_gain is not None:
                qk = self.qk.flatten(-2)  # (rows, heads + kv_heads, head_dim)
                qk.copy_(rms_norm(qk, qk_gain, decoder.model.config.norm_eps))
            self.rotate(turn)
            caches[0].index_copy_(0, at, self.k.flatten(0, 1))
            caches[1].index_copy_(0, at, self.v.flatten(0, 1))
            attended = F.scaled_dot_product_attention(
                self.q, keys, values, attn_mask=hidden, enable_gqa=self.grouped
            )
            attended = attended.flatten(1).to(x.dtype)  # under autocast it is narrow
            torch.addmm(x, attended, output, out=x)
            torch.mm(self.normed(next(gains)), gate_up, out=self.joint)
            torch.mul(F.silu(self.gate), self.up, out=self.hidden)
            torch.addmm(x, self.hidden, down, out=x)
        return torch.mm(self.normed(next(gains)), decoder.model.lm_head.weight.T)

    def normed(self, gain: Tensor) -> Tensor:
        """Return the RMSNorm of x (rows, width); `gain` is the norm's gain times sqrt(width)."""
        norm = torch.linalg.vector_norm(self.padded, dim=-1, keepdim=True, dtype=self.wide)
        return (self.x / norm).mul_(gain).to(self.x.dtype)

    def rotate(self, turn: Tensor) -> None:
        """Rotate q and k in place: a rotation of the plane is a complex product."""
        pairs = torch.view_as_complex(self.qk.to(self.wide)).mul_(turn)
        if self.qk.dtype != self.wide:  # `to` has made a copy
            self.qk.copy_(torch.view_as_real(pairs))
