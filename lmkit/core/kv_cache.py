"""Generate text with a KV cache: each pass of the model reads only the tokens that it has not read before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.core.sampling import Sampling, draw, penalize


class KVCache:
    """The keys and values of every layer, of some texts; `model(ids, cache)` reads the next ids of each text.

    A pass writes keys and values at the positions `lengths`, `lengths` + 1, ... of each text. The caller then raises
    `lengths`; what it does not count, the next pass overwrites.

    Args:
        model: a `TransformerLM`; the cache has its context, device and dtype.
        rows: number of texts.

    Attributes:
        keys, values: (num_layers, rows, kv_heads, context_length, head_dim)
        lengths: (rows) int64, tokens that the cache holds of each text.
        windows: for each layer, how many tokens a token sees, itself among them; None: all earlier ones.

    Raises:
        ValueError: the attention layers are not numbered in order, as after blocks were swapped.
    """

    def __init__(self, model: Any, rows: int) -> None:
        config, weight = model.config, model.lm_head.weight
        places = [module.layer for module in model.layers.modules() if hasattr(module, "kv_heads")]
        if places != list(range(config.num_layers)):
            raise ValueError(
                f"the layers {places} of {config.num_layers} were moved, shared or removed: their attention needs "
                "`layer`, its place, and the model a `config` with their number"
            )
        model.rope.reserve(config.context_length)
        shape = (config.num_layers, rows, config.kv_heads, config.context_length, config.head_dim)
        # Zeros, not empty: keys beyond a row's length get the probability 0, and 0 * nan is nan.
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.windows = list(map(config.window, range(config.num_layers)))

    def positions(self, seq: int) -> Tensor:
        """Return the positions of the next `seq` tokens of each text, (rows, seq); the model asks once per pass."""
        self._at = self.lengths[:, None] + torch.arange(seq, device=self.lengths.device)  # (rows, seq)
        self._end = int(self.lengths.max()) + seq  # no key is at this position or a later one
        places = torch.arange(self._end, device=self.lengths.device)
        self._back = self._at[:, :, None] - places  # from each query back to each key, (rows, seq, end)
        return self._at

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (rows, kv_heads, seq, head_dim); return causal attention of q (rows, heads, seq, head_dim) to
        all stored keys, shaped as q."""
        keys, values = self.keys[layer], self.values[layer]
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        keys[rows, :, self._at] = k.transpose(1, 2).to(keys.dtype)
        values[rows, :, self._at] = v.transpose(1, 2).to(values.dtype)
        visible, window = self._back >= 0, self.windows[layer]
        if window is not None:
            visible &= self._back < window
        return F.scaled_dot_product_attention(
            q.to(keys.dtype),
            keys[:, :, : self._end],
            values[:, :, : self._end],
            attn_mask=visible[:, None],
            enable_gqa=q.shape[1] != k.shape[1],
        )


@torch.inference_mode()
def generate(
    model: Any,
    ids: Tensor,
    new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  immutable
    seed: int = 0,
) -> Tensor:
    """Continue prompts of equal length: (batch, seq) ids -> (batch, new_tokens) ids.

    A text that outgrows the context continues from its last context_length // 2 tokens, as if nothing came before.
    Text i draws from the random stream of `seed + i`.

    Args:
        model: a `TransformerLM`.
        ids: at least one token, and at most `context_length`.

    Raises:
        ValueError: the model predicts NaN or infinity; `ids` are longer than the context.
    """
    context = model.config.context_length
    if ids.shape[1] > context:
        raise ValueError(f"{ids.shape[1]} tokens are longer than the context of {context}")
    text, unread = ids, ids
    cache = KVCache(model, len(ids))
    seeds = seed + torch.arange(len(ids), device=ids.device)
    seen = torch.zeros(len(ids), model.config.vocab_size, dtype=torch.bool, device=ids.device)
    seen.scatter_(1, ids, True)
    for number in range(new_tokens):
        logits = model(unread, cache)[:, -1]  # first the prompt, then one token at a time
        cache.lengths += unread.shape[1]
        logits = penalize(logits, seen, sampling.repetition_penalty)
        drawn = draw(logits, seeds, torch.full_like(seeds, number), sampling)
        if (drawn < 0).any():
            raise ValueError("the model's logits are not finite")
        unread = drawn[:, None]  # (batch, 1)
        text = torch.cat([text, unread], dim=1)
        seen.scatter_(1, unread, True)
        if cache.lengths[0] == context:
            cache.lengths.zero_()
            unread = text[:, -max(1, context // 2) :]
    return text[:, ids.shape[1] :]
