"""The step of a `Decoder` with one row on a CPU, by NumPy: in a small model calls take longer than arithmetic, and
NumPy's calls take less time than PyTorch's. Matrix products stay PyTorch's, which share them among threads.

`torch_step` and `plain_draw` are the form to read. State and cache are the same memory in both.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.kernels.decode.reference import Rows, Sampling, philox, plain_rules

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder

Array = Any  # of NumPy


class Layer(NamedTuple):
    """The arrays of a block that a step reads: matrices (out, in), gains times sqrt(d_model), gains of queries and
    keys (heads + kv_heads, head_dim) if the model has them, and the cache (kv_heads, capacity, head_dim)."""

    gain1: Array
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    gain2: Array
    gate_up: Tensor
    down: Tensor
    qk_gain: Array
    keys: Array
    values: Array


class SingleRowStep:
    """Call it with the number of tokens of the row to make a step, in float32 or float64."""

    def __init__(self, decoder: Decoder) -> None:
        model, config = decoder.model, decoder.model.config
        self.decoder, self.head = decoder, model.lm_head.weight.detach()
        width, head_dim, heads, kv_heads = config.d_model, config.head_dim, config.num_heads, config.kv_heads
        new = self.head.new_zeros
        arrays: Any = (x.numpy() for x in decoder.state)
        self.state: Any = Rows(*arrays)
        # Each NumPy array shares the memory of the tensor before it.
        self.x = new(width)
        self.x_array = self.x.numpy()
        self.normed = new(width)
        self.normed_array = self.normed.numpy()
        self.qkv = new((heads + 2 * kv_heads) * head_dim)
        parts = self.qkv.numpy().reshape(-1, head_dim)  # (heads + 2 kv_heads, head_dim)
        self.pairs = parts[:-kv_heads].view(
            np.result_type(parts, np.complex64)
        )  # of q and k, a pair as complex
        self.q = parts[:heads].reshape(kv_heads, -1, head_dim)  # (kv_heads, group, head_dim)
        self.k, self.v = parts[heads:-kv_heads], parts[-kv_heads:]
        self.attended = new(width)
        self.attended_array = self.attended.numpy().reshape(self.q.shape)
        self.joint = new(2 * config.d_ff)
        self.gate, self.up = self.joint.chunk(2)
        self.qk, self.qk_eps = parts[:-kv_heads], config.norm_eps
        self.logits_row = new(1, len(self.head))
        self.table = model.token_embeddings.weight.detach().numpy()
        # (capacity, head_dim / 2) complex
        self.turns = torch.view_as_complex(model.rope.cos_sin.to(self.head.dtype)).numpy()
        self.eps, self.root, self.scale = config.norm_eps * width, math.sqrt(width), head_dim**-0.5
        self.layers = [
            Layer(
                *(
                    self.gain(layer.norm1),
                    layer.qkv.detach(),
                    _detached(layer.qkv_bias),
                    layer.output.detach(),
                ),
                *(self.gain(layer.norm2), layer.gate_up.detach(), layer.down.detach()),
                None if layer.qk_gain is None else layer.qk_gain.detach().numpy(),
                *(keys[0].numpy(), values[0].numpy()),
            )
            for layer, keys, values in zip(decoder.layers, decoder.keys, decoder.values, strict=True)
        ]
        self.last_gain = self.gain(model.ln_final.weight)
        self.banned = np.flatnonzero(decoder.rules.banned.numpy())

    def gain(self, weight: Tensor) -> Array:
        return (weight.detach() * self.root).numpy()

    def begin(self, rows: Tensor, tokens: Tensor) -> None:
        """Prepare nothing: a step reads its token from the row's text."""

    def __call__(self, longest: int) -> None:
        state, decoder = self.state, self.decoder
        if state.done[0]:
            return
        with np.errstate(all="ignore"):  # a model may have diverged
            logits = self.logits(longest)
            if decoder.rules.penalizes:
                plain_rules(logits, decoder.rules)
            row = logits.numpy()[0]
            row[self.banned] = -math.inf
            token = draw(row, int(state.seeds[0]), int(state.number[0]), decoder.sampling)
            if decoder.logprobs:
                wide = row.astype(np.float64)
                highest = wide.max()
                state.logprobs[0] = wide[token] - highest - math.log(np.exp(wide - highest).sum())
        state.drawn[0] = token
        known = max(token, 0)
        state.text[0, state.place[0] + 1] = known
        if decoder.rules.penalizes:
            decoder.rules.seen[0, known] = 1
        state.number[0] += 1
        if token == -1 or token in decoder.stops or state.number[0] >= decoder.most:
            state.done[0] = 1
        else:
            state.place[0] += 1

    def logits(self, longest: int) -> Tensor:
        """Read the newest token; return the logits of the next, (1, vocab_size)."""
        place = int(self.state.place[0])
        x, x_array, normed = self.x, self.x_array, self.normed
        q, gate = self.q, self.gate
        x_array[:] = self.table[self.state.text[0, place]]
        turn, seen = self.turns[place], place + 1
        for gain1, qkv, bias, output, gain2, gate_up, down, qk_gain, keys, values in self.layers:
            self.norm(gain1)
            torch.mv(qkv, normed, out=self.qkv)
            if bias is not None:
                self.qkv += bias
            if qk_gain is not None:
                mean_square = np.square(self.qk).mean(axis=1, keepdims=True)
                np.multiply(self.qk, qk_gain / np.sqrt(mean_square + self.qk_eps), out=self.qk)
            np.multiply(self.pairs, turn, out=self.pairs)  # a rotation of the plane is a complex product
            np.multiply(q, self.scale, out=q)
            keys[:, place] = self.k
            values[:, place] = self.v
            scores = np.matmul(q, keys[:, :seen].transpose(0, 2, 1))  # (kv_heads, group, seen)
            np.subtract(scores, np.maximum.reduce(scores, axis=2, keepdims=True), out=scores)
            np.exp(scores, out=scores)
            np.matmul(scores, values[:, :seen], out=self.attended_array)
            np.divide(
                self.attended_array, np.add.reduce(scores, axis=2, keepdims=True), out=self.attended_array
            )
            torch.addmv(x, output, self.attended, out=x)
            self.norm(gain2)
            torch.mv(gate_up, normed, out=self.joint)
            F.silu(gate, inplace=True).mul_(self.up)
            torch.addmv(x, down, gate, out=x)
        self.norm(self.last_gain)
        torch.mv(self.head, normed, out=self.logits_row[0])
        return self.logits_row

    def norm(self, gain: Array) -> None:
        """Write the RMSNorm of x (d_model); `gain` is the norm's gain times sqrt(d_model)."""
        x = self.x_array
        np.multiply(x, gain, out=self.normed_array)
        np.multiply(self.normed_array, 1 / math.sqrt(np.dot(x, x) + self.eps), out=self.normed_array)


def draw(logits: Array, seed: int, number: int, sampling: Sampling) -> int:
    """Draw a token of a single row, logits (vocab_size), as `plain_draw` does."""
    likeliest = int(logits.argmax())  # the first NaN if there is any
    highest = float(logits[likeliest])
    if not math.isfinite(highest):
        return -1
    if sampling.temperature == 0:
        return likeliest
    scale = math.log2(math.e) / max(sampling.temperature, 1e-30)
    weights = (np.exp2((logits - highest) * scale) * 2.0**40).astype(np.int64)
    left = weights  # of the tokens that the next draw is from
    for attempt in itertools.count():
        cumulative = left.cumsum()
        total = int(cumulative[-1])
        token = int(cumulative.searchsorted(philox(seed, number, attempt) * total >> 64, side="right"))
        if sampling.kind == "all":
            return token
        if attempt == 0:
            limit = total
            if sampling.kind == "nested":
                k = min(sampling.top_k, len(weights))
                limit = int(np.partition(weights, -k)[-k:].sum())
            limit = int(float(limit) * sampling.top_p) if sampling.top_p < 1 else limit + 1
        own = weights[token]
        likelier = weights > own
        likelier[:token] |= weights[:token] == own
        left = np.where(likelier, weights, 0)
        ahead = int(left.sum())  # the weight of likelier tokens
        count = np.count_nonzero(likelier) if sampling.top_k else -1
        if (ahead < limit and count < sampling.top_k and own >= int(sampling.min_p * 2**40)) or ahead == 0:
            return token
    raise AssertionError("unreachable")


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
