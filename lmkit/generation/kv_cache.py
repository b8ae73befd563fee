"""Keys and values of the tokens so far, so that each new token costs one position and not the whole text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.recipe.model import ModelConfig


class KVCache:
    """Room for `context_length` tokens of `batch` texts of different lengths, allocated once.

    A text's tokens lie from position 0 on. Two kinds of forward pass use the cache: `start` reads whole texts,
    `extend` reads one more token of each.

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
        shape = (
            config.num_layers,
            batch,
            config.kv_heads,
            config.context_length,
            config.head_dim,
        )
        # Zeros, since what lies beyond a row's length is masked by a probability of 0, and 0 x nan is nan.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * batch
        self.context_length = config.context_length
        self._attention = attention_function(config.attention)

    def start(self, rows: Sequence[int], lengths: Sequence[int]) -> StartPass:
        """Forget what these rows hold; the next pass reads texts of these lengths, padded on the right."""
        assert all(0 < length <= self.context_length for length in lengths)
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        index = torch.tensor(rows, device=self.keys.device)
        return StartPass(
            [
                StartLayer(keys, values, index, self._attention)
                for keys, values in zip(self.keys, self.values, strict=True)
            ],
            self.keys.device,
        )

    def extend(self, rows: Sequence[int]) -> ExtendPass:
        """The next pass reads one token of every row; only `rows` grow by it, the others' is forgotten."""
        assert all(self.lengths[row] < self.context_length for row in rows)
        # A full row that does not grow still takes part: its token goes over the last place, unseen by anyone.
        places = [min(length, self.context_length - 1) for length in self.lengths]
        place = torch.tensor(places, device=self.keys.device)  # (batch)
        longest = max(places) + 1
        hidden = torch.arange(longest, device=self.keys.device) > place[:, None]  # (batch, longest)
        for row in rows:
            self.lengths[row] += 1
        return ExtendPass(
            [
                ExtendLayer(keys, values, place, hidden)
                for keys, values in zip(self.keys, self.values, strict=True)
            ],
            place,
        )


@dataclass
class StartLayer:
    """One layer's part of the cache, for a pass that reads whole texts.

    Attributes:
        keys, values: (batch, kv_heads, context_length, head_dim), views of the cache.
        rows: (rows,), which of the batch are read.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    attention: Callable[..., Tensor]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store; causal attention of whole texts. Padding comes last, so that no token of a text can see it."""
        seq = k.shape[2]
        self.keys[self.rows, :, :seq] = k.to(self.keys.dtype)
        self.values[self.rows, :, :seq] = v.to(self.values.dtype)
        return self.attention(q, k, v, causal=True)


@dataclass
class StartPass:
    """What the model reads whole texts with: `attend` of each layer takes q (rows, heads, seq, head_dim), k and v
    (rows, kv_heads, seq, head_dim).
    """

    layers: Sequence[StartLayer]
    device: torch.device

    def positions(self, seq: int) -> Tensor:
        """(1, seq): the same for all rows."""
        return torch.arange(seq, device=self.device).unsqueeze(0)


@dataclass
class ExtendLayer:
    """One layer's part of the cache, for a pass that reads one token of every text.

    Attributes:
        keys, values: (batch, kv_heads, context_length, head_dim), views of the cache.
        place: (batch,), where each row's token goes.
        hidden: (batch, longest), True at the places that a row must not see.
    """

    keys: Tensor
    values: Tensor
    place: Tensor
    hidden: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store one token per row, each at its own place; it sees everything up to there."""
        batch, heads, _, head_dim = q.shape
        kv_heads = k.shape[1]
        rows = torch.arange(batch, device=q.device)
        self.keys[rows, :, self.place] = k[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.place] = v[:, :, 0].to(self.values.dtype)

        longest = self.hidden.shape[1]
        keys = self.keys[:, :, :longest]  # (batch, kv_heads, longest, head_dim)
        values = self.values[:, :, :longest]
        # The query heads of a group become rows of one product with the keys they share.
        queries = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).to(keys.dtype)
        scores = queries @ keys.transpose(-2, -1) * head_dim**-0.5  # (batch, kv_heads, group, longest)
        scores = scores.masked_fill(self.hidden[:, None, None], -math.inf)
        shares = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return (shares.to(values.dtype) @ values).reshape(batch, heads, 1, head_dim).to(q.dtype)


@dataclass
class ExtendPass:
    """What the model reads one token of every text with: `attend` of each layer takes q (batch, heads, 1, head_dim),
    k and v (batch, kv_heads, 1, head_dim).

    Attributes:
        place: (batch,), the position of each row's token.
    """

    layers: Sequence[ExtendLayer]
    place: Tensor

    def positions(self, seq: int) -> Tensor:
        """(batch, 1): each row goes on where it stands."""
        assert seq == 1
        return self.place.unsqueeze(1)
