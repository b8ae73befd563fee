"""Put texts into the rows of a `Decoder`: their state, and the keys and values of all their tokens but the last.

A text is read in one pass through the best attention kernel of the device (`attention(kernel="auto")`). Beside the
kernels' step, which has no host in it, the host would take longer to launch such a pass than a GPU to make it. So
texts are padded to one of a few lengths, several short ones are read at once, and a pass of a length is recorded as a
CUDA graph when it comes for the second time. Padding comes last, where no token sees it. A text's padding and the
number of texts at once depend on nothing else in the batch, so neither do its bits.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.attention.dispatch import best_kernel
from lmkit.attention.inputs import first_in_window
from lmkit.recipe.tables import ModelConfig

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder

SHORTEST = 64
"""Tokens; shorter texts are padded to it."""
TOKENS_AT_ONCE = 2048
"""A pass reads no more, but for a longer text, which is read alone."""


class AllStored(Exception):
    """The last layer's keys and values are stored: nothing that follows is needed."""


@dataclass(frozen=True)
class RowsOfCache:
    """What the model asks of a KV cache, for texts that are read from their beginning.

    Attributes:
        keys, values: (num_layers, rows, kv_heads, capacity, head_dim)
        rows: (texts) int64, where each text goes.
        attention: takes `first=` if the model has windows.
        store: a kernel that copies into rows; None: PyTorch does.
    """

    config: ModelConfig

    keys: Tensor
    values: Tensor
    rows: Tensor
    attention: Callable[..., Tensor]
    store: Callable[..., None] | None

    def positions(self, seq: int) -> Tensor:
        """Return 0 ... seq - 1, (1, seq)."""
        return torch.arange(seq, device=self.keys.device).unsqueeze(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v (texts, kv_heads, seq, head_dim); return causal attention of q (texts, heads, seq, head_dim).

        Raises:
            AllStored: in the last layer.
        """
        seq = k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if self.store is not None:
            self.store(k, v, self.rows, keys, values)
        else:
            keys[self.rows, :, :seq] = k.to(keys.dtype)
            values[self.rows, :, :seq] = v.to(values.dtype)
        if layer == len(self.keys) - 1:
            raise AllStored
        first = first_in_window(self.config.window(layer), seq, q.device)
        if first is None:
            return self.attention(q, k, v, causal=True)
        return self.attention(q, k, v, causal=True, first=first)


class Text(NamedTuple):
    """What `Prefill` puts into a row. See `Rows` for `seed`, `number` and `done`."""

    row: int
    ids: Sequence[int]
    seed: int
    number: int = 0
    done: int = 0


HEADER = 5
"""Numbers before the ids of a packed text: row, tokens, seed, number, done."""


class Prefill:
    """Call it with texts of 1 to `capacity` ids, each for a row of its own.

    Args:
        padded: as the top of this file says; False: read each text alone, as long as it is.
    """

    def __init__(self, decoder: Decoder, *, padded: bool) -> None:
        self.decoder, self.padded = decoder, padded
        config, weight = decoder.model.config, decoder.model.lm_head.weight
        like_q = weight.new_empty(1, config.num_heads, 1, config.head_dim)
        self.attention = attention_function(best_kernel(like_q, windows=config.attention_window is not None))
        self.together = max(1, decoder.rows // 16) if padded else 1
        self.store: Callable[..., None] | None = None
        if padded and decoder.device.type == "cuda":
            from lmkit.kernels.decode.cache import store

            self.store = store
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool: Any = None  # of the graphs' memory

    def __call__(self, texts: Sequence[Text]) -> None:
        by_length: dict[int, list[Text]] = defaultdict(list)
        for text in texts:
            by_length[self.padded_length(len(text.ids))].append(text)
        for length, alike in by_length.items():
            most = self.at_once(length)
            for first in range(0, len(alike), most):
                some = alike[first : first + most]
                # Places that are left take the first text again: the same values come to the same memory.
                some += some[:1] * (most - len(some))
                packed = array("q")
                for row, ids, seed, number, done in some:
                    packed.extend((row, len(ids), seed, number, done))
                    packed.extend(ids)
                    packed.extend([ids[-1]] * (length - len(ids)))
                self.read(self.to_device(packed).view(most, -1))

    def slide(self, rows: Sequence[int], kept: int) -> None:
        """Continue rows whose text has outgrown the cache from its last `kept` tokens. Asks the host for nothing."""
        state, length = self.decoder.state, self.padded_length(kept)
        most = self.at_once(length)
        for first in range(0, len(rows), most):
            some = [*rows[first : first + most]]
            row = self.to_device(array("q", some + some[:1] * (most - len(some))))
            columns = (row, torch.full_like(row, kept), state.seeds[row], state.number[row], state.done[row])
            ids = state.text[row, -kept:]
            padding = ids[:, -1:].expand(-1, length - kept)
            self.read(torch.cat([torch.stack(columns, dim=1), ids, padding], dim=1))

    def padded_length(self, tokens: int) -> int:
        """Return how many ids a text is packed as: those that are read, padded, and the last."""
        read = tokens - 1
        if not self.padded or read == 0:
            return tokens
        step = max(SHORTEST, (1 << (read - 1).bit_length()) // 4)
        return min(self.decoder.capacity, -(-read // step) * step) + 1

    def at_once(self, length: int) -> int:
        """Return how many texts of a packed length a pass reads."""
        return min(self.together, max(1, TOKENS_AT_ONCE // length))

    def to_device(self, numbers: array) -> Tensor:
        on_host = torch.frombuffer(numbers, dtype=torch.int64)  # ten times as fast as of a list
        if self.decoder.device.type != "cuda":
            return on_host
        return on_host.pin_memory().to(self.decoder.device, non_blocking=True)

    def read(self, packed: Tensor) -> None:
        """Put packed texts (texts, HEADER + length) into their rows."""
        key = tuple(packed.shape)
        if not self.padded or not packed.is_cuda or key not in self._graphs:
            self._graphs[key] = None  # seen once
            self._read(packed)
            return
        recorded = self._graphs[key]
        if recorded is None:
            graph, static = torch.cuda.CUDAGraph(), packed.clone()
            torch.cuda.synchronize()
            # One pool for all: nothing in it outlives a replay.
            with torch.cuda.graph(graph, pool=self._pool):
                self._read(static)
            self._pool = graph.pool()
            recorded = self._graphs[key] = graph, static
        graph, static = recorded
        static.copy_(packed)
        graph.replay()

    def _read(self, packed: Tensor) -> None:
        decoder, state = self.decoder, self.decoder.state
        (row, tokens, seed, number, done), ids = packed[:, :HEADER].unbind(1), packed[:, HEADER:]
        last = tokens - 1
        state.place[row] = last
        state.seeds[row], state.number[row], state.done[row] = seed, number, done
        state.text[row, : ids.shape[1]] = ids
        if ids.shape[1] > 1 and not decoder.rereads:
            cache = RowsOfCache(
                decoder.model.config, decoder.keys, decoder.values, row, self.attention, self.store
            )
            with suppress(AllStored):
                decoder.model.hidden_states(ids[:, :-1], cache)
        decoder._step.begin(row, ids.gather(1, last[:, None])[:, 0])
