"""The step of a `Decoder` by the model itself, for models whose switches no faster step implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.generation.torch_step import advance

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder


class ModelStep:
    """Call it with the number of tokens of the longest row to make a step."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def begin(self, rows: Tensor, tokens: Tensor) -> None:
        """Prepare nothing: a step reads its tokens from the rows' texts."""

    def __call__(self, longest: int) -> None:
        advance(self.decoder, self.reread() if self.decoder.rereads else self.logits(longest))

    def logits(self, longest: int) -> Tensor:
        """Read the newest token of every row; return the logits of the next, (rows, vocab_size)."""
        state = self.decoder.state
        ids = state.text.gather(1, state.place[:, None])  # (rows, 1)
        return self.decoder.model(ids, _NewestOfRows(self.decoder, longest))[:, 0]

    def reread(self) -> Tensor:
        """Return logits (rows, vocab_size) by reading whole texts without a cache, if attention hides keys."""
        state, model = self.decoder.state, self.decoder.model
        texts = [text[: place + 1] for text, place in zip(state.text, state.place.tolist(), strict=True)]
        return torch.cat([model(text[None])[:, -1] for text in texts])


@dataclass(frozen=True)
class _NewestOfRows:
    """The interface of a KV cache that the model calls, for the newest token of every row."""

    decoder: Decoder
    longest: int

    def positions(self, seq: int) -> Tensor:
        """Return the place of each row's newest token, (rows, 1)."""
        return self.decoder.state.place[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (rows, kv_heads, 1, head_dim); return the attention of q (rows, heads, 1, head_dim)."""
        decoder, place = self.decoder, self.decoder.state.place
        keys, values = decoder.keys[layer], decoder.values[layer]  # (rows, kv_heads, capacity, head_dim)
        rows = torch.arange(decoder.rows, device=place.device)
        keys[rows, :, place] = k[:, :, 0].to(keys.dtype)
        values[rows, :, place] = v[:, :, 0].to(values.dtype)
        back = place[:, None] - torch.arange(self.longest, device=place.device)  # (rows, longest)
        window = decoder.model.config.window(layer)
        visible = (back >= 0) & (back < (decoder.capacity if window is None else window))
        return F.scaled_dot_product_attention(
            q.to(keys.dtype),
            keys[:, :, : self.longest],
            values[:, :, : self.longest],
            attn_mask=visible[:, None, None],
            enable_gqa=q.shape[1] != k.shape[1],
        )
