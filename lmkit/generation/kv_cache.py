"""Keep keys and values of the tokens so far, so that a new token costs one position and not the whole text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.recipe.tables import ModelConfig


class KVCache:
    """Memory for `context_length` tokens of `batch` texts of different lengths, allocated once.

    The tokens of a text start at position 0. Two kinds of forward pass use the cache: `prefill` reads whole texts,
    `decode` reads one more token of each.

    Attributes:
        lengths: tokens stored per row.
        keys, values: (num_layers, batch, kv_heads, context_length, head_dim)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (config.num_layers, batch, config.kv_heads, config.context_length, config.head_dim)
        # Zeros: what lies beyond a row's length is multiplied by a probability of 0, and 0 * nan is nan.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * batch
        self.context_length = config.context_length
        self.attention = attention_function(config.attention)

    def prefill(self, rows: Sequence[int], lengths: Sequence[int]) -> Prefill:
        """Start a pass that reads texts of these lengths, padded on the right; forget what these rows held."""
        assert all(0 < length <= self.context_length for length in lengths)
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        return Prefill(self, torch.tensor(rows, device=self.keys.device))

    def decode(self, rows: Sequence[int]) -> Decode:
        """Start a pass that reads one token of every row; `rows` keep it, the other rows forget it."""
        assert all(self.lengths[row] < self.context_length for row in rows)
        # A full row that does not grow takes part, too: its token overwrites the last place, which no row reads.
        places = [min(length, self.context_length - 1) for length in self.lengths]
        place = torch.tensor(places, device=self.keys.device)  # (batch)
        longest = max(places) + 1
        hidden = torch.arange(longest, device=self.keys.device) > place[:, None]  # (batch, longest)
        for row in rows:
            self.lengths[row] += 1
        return Decode(self, place, hidden)


@dataclass(frozen=True)
class Prefill:
    """The cache in a pass that reads whole texts.

    Attributes:
        rows: (rows), which of the batch are read.
    """

    cache: KVCache
    rows: Tensor

    def positions(self, seq: int) -> Tensor:
        """Return 0 ... seq - 1 for all rows, (1, seq)."""
        return torch.arange(seq, device=self.rows.device).unsqueeze(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (rows, kv_heads, seq, head_dim); return causal attention of q (rows, heads, seq, head_dim).

        Padding comes last, where no token of a text can see it.
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        seq = k.shape[2]
        keys[self.rows, :, :seq] = k.to(keys.dtype)
        values[self.rows, :, :seq] = v.to(values.dtype)
        return self.cache.attention(q, k, v, causal=True)


@dataclass(frozen=True)
class Decode:
    """The cache in a pass that reads one token of every text.

    Attributes:
        place: (batch), the position of each row's token.
        hidden: (batch, longest), True at the positions that a row must not see.
    """

    cache: KVCache
    place: Tensor
    hidden: Tensor

    def positions(self, seq: int) -> Tensor:
        """Return the position of each row's token, (batch, 1)."""
        assert seq == 1
        return self.place.unsqueeze(1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (batch, kv_heads, 1, head_dim), each row at its own place; return the attention of q
        (batch, heads, 1, head_dim) to everything up to there."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        batch, heads, _, head_dim = q.shape
        kv_heads = k.shape[1]
        rows = torch.arange(batch, device=q.device)
        keys[rows, :, self.place] = k[:, :, 0].to(keys.dtype)
        values[rows, :, self.place] = v[:, :, 0].to(values.dtype)

        longest = self.hidden.shape[1]
        keys, values = keys[:, :, :longest], values[:, :, :longest]  # (batch, kv_heads, longest, head_dim)
        # The query heads of a group become rows of one product with the keys that they share.
        queries = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).to(keys.dtype)
        scores = queries @ keys.transpose(-2, -1) * head_dim**-0.5  # (batch, kv_heads, group, longest)
        scores = scores.masked_fill(self.hidden[:, None, None], -math.inf)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        out = weights.to(values.dtype) @ values  # (batch, kv_heads, group, head_dim)
        return out.reshape(batch, heads, 1, head_dim).to(q.dtype)
