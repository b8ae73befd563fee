"""The fast step of a `Decoder` on a CPU, by as few and as cheap calls as possible.

In a small model, calls take longer than arithmetic. So memory is allocated once, views of it are made once, and small
operations are NumPy's, whose calls take less time than PyTorch's. PyTorch computes matrix products and attention,
which it shares among threads. Each NumPy array shares the memory of a tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder
    from lmkit.recipe.tables import ModelConfig

Array = Any  # of NumPy


class CPUStep:
    """Call it with the number of tokens of the longest row to make a step, in float32 or float64."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        model, config, rows = decoder.model, decoder.model.config, decoder.rows
        width, head_dim, kv_heads = config.d_model, config.head_dim, config.kv_heads
        self.head = model.lm_head.weight.detach().T
        self.x, self.normed = (self.head.new_zeros(rows, width) for _ in range(2))
        self.x_array, self.normed_array = self.x.numpy(), self.normed.numpy()
        self.qkv = self.head.new_zeros(rows, width + 2 * kv_heads * head_dim)
        heads = self.qkv.unflatten(-1, (-1, head_dim))  # (rows, heads + 2 kv_heads, head_dim)
        self.q = heads[:, : config.num_heads, None]  # (rows, heads, 1, head_dim)
        self.qk, self.v = np.split(heads.numpy(), [-kv_heads], axis=1)
        self.k = self.qk[:, -kv_heads:]
        self.pairs = self.qk.view(
            np.result_type(self.qk, np.complex64)
        )  # two neighbouring channels as complex
        self.joint = self.head.new_zeros(rows, 2 * config.d_ff)
        self.gate, self.up = self.joint.chunk(2, dim=1)
        self.table = model.token_embeddings.weight.detach().numpy()
        # (capacity, head_dim / 2) complex
        self.turns = torch.view_as_complex(model.rope.cos_sin.to(self.head.dtype)).numpy()
        self.eps, self.root = config.norm_eps, math.sqrt(width)
        self.squares = np.zeros((rows, 1, 1), self.x_array.dtype)
        self.eps_sum = self.squares.dtype.type(config.norm_eps * width)
        self.layers = [
            (
                *(self.gain(layer.norm1), layer.qkv.detach().T, layer.qkv_bias, layer.output.detach().T),
                *(self.gain(layer.norm2), layer.gate_up.detach().T, layer.down.detach().T),
                self.gain_of_heads(layer.qk_gains, config),
                *(keys.numpy(), values.numpy()),
            )
            for layer, keys, values in zip(
                decoder.layers, decoder.cache.keys, decoder.cache.values, strict=True
            )
        ]
        self.last_gain = self.gain(model.ln_final.weight)
        self.each, self.place = np.arange(rows), decoder.state.place.numpy()
        self.text, self.positions = decoder.state.text.numpy(), torch.arange(decoder.capacity)
        self.grouped = config.num_heads != kv_heads

    def gain(self, weight: Tensor) -> Array:
        return (weight.detach() * self.root).numpy()

    @staticmethod
    def gain_of_heads(gains: tuple[Tensor, Tensor] | None, config: ModelConfig) -> Array | None:
        """Return the gain of every head of q|k, (heads + kv_heads, head_dim)."""
        if gains is None:
            return None
        counts = config.num_heads, config.kv_heads
        return torch.cat([gain.expand(n, -1) for gain, n in zip(gains, counts, strict=True)]).detach().numpy()

    def begin(self, rows: Tensor, tokens: Tensor) -> None:
        """Prepare nothing: a step reads its tokens from the rows' texts."""

    def __call__(self, longest: int) -> None:
        self.decoder.advance(self.logits(longest))

    def logits(self, _: int) -> Tensor:
        """Read the newest token of every row; return the logits of the next, (rows, vocab_size)."""
        cache, x, normed, each, place = self.decoder.cache, self.x, self.normed, self.each, self.place
        self.x_array[:] = self.table[self.text[each, place]]
        longest = int(place.max()) + 1
        turns = self.turns[place][:, None]  # (rows, 1, head_dim / 2)
        hidden = {window: self.hidden(longest, window) for window in set(cache.windows)}
        all_keys = cache.keys[:, :, :, :longest].unbind()
        all_values = cache.values[:, :, :, :longest].unbind()
        for layer, window, old_keys, old_values in zip(
            self.layers, cache.windows, all_keys, all_values, strict=True
        ):
            gain1, qkv, bias, output, gain2, gate_up, down, qk_gain, keys, values = layer
            self.norm(gain1)
            torch.mm(normed, qkv, out=self.qkv)
            if bias is not None:
                self.qkv += bias
            if qk_gain is not None:
                mean_square = np.square(self.qk).mean(axis=-1, keepdims=True)
                np.multiply(self.qk, qk_gain / np.sqrt(mean_square + self.eps), out=self.qk)
            np.multiply(self.pairs, turns, out=self.pairs)  # a rotation of the plane is a complex product
            keys[each, :, place] = self.k
            values[each, :, place] = self.v
            attended = F.scaled_dot_product_attention(
                self.q, old_keys, old_values, attn_mask=hidden[window], enable_gqa=self.grouped
            )
            attended = attended.flatten(1).to(x.dtype)  # under autocast it is narrow
            torch.addmm(x, attended, output, out=x)
            self.norm(gain2)
            torch.mm(normed, gate_up, out=self.joint)
            F.silu(self.gate, inplace=True).mul_(self.up)
            torch.addmm(x, self.gate, down, out=x)
        self.norm(self.last_gain)
        return torch.mm(normed, self.head)

    def hidden(self, longest: int, window: int | None) -> Tensor | None:
        """Return -inf at the keys that a row must not see, (rows, 1, 1, longest); None: it sees all."""
        if len(self.each) == 1 and (window is None or window >= longest):
            return None
        place, positions = self.decoder.state.place[:, None], self.positions[:longest]
        unseen = positions > place
        if window is not None:
            unseen |= positions <= place - window
        return self.x.new_zeros(unseen.shape).masked_fill_(unseen, -math.inf)[:, None, None]

    def norm(self, gain: Array) -> None:
        """Write the RMSNorm of x (rows, d_model); `gain` is the norm's gain times sqrt(d_model)."""
        np.matmul(self.x_array[:, None], self.x_array[:, :, None], out=self.squares)
        np.multiply(self.x_array, gain, out=self.normed_array)
        np.divide(self.normed_array, np.sqrt(self.squares[:, 0] + self.eps_sum), out=self.normed_array)
