"""Put texts into the rows of a `Decoder`: their state, and the keys and values of all their tokens but the last.

A text is read in one pass through the best attention kernel of the device (`attention(kernel="auto")`). The host
takes longer to launch a short pass than a GPU to run it. So, with the kernels' step, texts are padded to one of a few
lengths, several short texts are read at once, and the second pass of a length records a CUDA graph. Padding comes
last, where no token sees it. A text's padding and the number of texts at once do not depend on the rest of the batch,
so the text's bits do not either.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.attention.dispatch import best_kernel
from lmkit.core.attention import first_in_window
from lmkit.core.kv_cache import KVCache

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder

SHORTEST = 64
"""The shortest padded length, in tokens."""
TOKENS_AT_ONCE = 2048
"""Most tokens of a pass. A longer text is read alone."""


class AllStored(Exception):
    """Raised when the last layer's keys and values are stored, to skip the rest of the model."""


class PromptCache(KVCache):
    """Some rows of a cache, for texts that are read from their beginning: the device's best attention kernel needs no
    mask for them.

    Args:
        prefill: has the cache, the attention function, and the kernel that copies into rows, if there is one.
        rows: (texts) int64, the row of each text.
    """

    def __init__(self, prefill: Prefill, rows: Tensor) -> None:
        cache = prefill.decoder.cache
        self.keys, self.values, self.windows = cache.keys, cache.values, cache.windows
        self.rows, self.attention, self.store = rows, prefill.attention, prefill.store

    def positions(self, seq: int) -> Tensor:
        """Return 0 ... seq - 1, (1, seq)."""
        return torch.arange(seq, device=self.keys.device).unsqueeze(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v (texts, kv_heads, seq, head_dim); return causal attention of q (texts, heads, seq, head_dim)."""
        seq = k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if self.store is not None:
            self.store(k, v, self.rows, keys, values)
        else:
            keys[self.rows, :, :seq] = k.to(keys.dtype)
            values[self.rows, :, :seq] = v.to(values.dtype)
        if layer == len(self.keys) - 1:
            raise AllStored
        first = first_in_window(self.windows[layer], seq, q.device)
        options = {} if first is None else {"first": first}
        return self.attention(q, k, v, causal=True, **options)


HEADER = 5
"""Count of the numbers before the ids of a packed text: row, tokens, seed, number, done (see `Rows`)."""


class Prefill:
    """Read texts of 1 to `capacity` ids into rows of the cache, each into another row: `padded`, grouped and recorded
    as the top of this file says, or each alone, without padding.

    Attributes:
        attention: the attention function; takes `first=` if the model has windows.
        store: a kernel that copies into rows; None: PyTorch's operations.
    """

    def __init__(self, decoder: Decoder, *, padded: bool) -> None:
        self.decoder, self.padded = decoder, padded
        config, weight = decoder.model.config, decoder.model.lm_head.weight
        like_q = weight.new_empty(1, config.num_heads, 1, config.head_dim)
        self.attention = attention_function(best_kernel(like_q, windows=config.attention_window is not None))
        self.together = max(1, decoder.rows // 16) if padded else 1
        self.store: Callable[..., None] | None = None
        self.read = self._read
        if padded and decoder.device.type == "cuda":
            from lmkit.kernels.decode.attention import store

            self.store, self.read = store, self._read_in_graph
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool: Any = None  # memory pool of the graphs

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        by_length: dict[tuple[int, int], list[tuple[int, Sequence[int], int]]] = defaultdict(list)
        for row, ids, seed in zip(rows, texts, seeds, strict=True):
            by_length[self.packing(len(ids))].append((row, ids, seed))
        for (length, most), alike in by_length.items():
            for first in range(0, len(alike), most):
                some = alike[first : first + most]
                # Fill the free places with the first text again, which writes the same values to the same memory.
                some += some[:1] * (most - len(some))
                packed = array("q")
                for row, ids, seed in some:
                    packed.extend((row, len(ids), seed, 0, 0))
                    packed.extend(ids)
                    packed.extend([ids[-1]] * (length - len(ids)))
                self.read(self.to_device(packed).view(most, -1))

    def slide(self, rows: Sequence[int], kept: int) -> None:
        """Continue rows whose texts fill the cache from their last `kept` tokens. The host does not wait for them."""
        state, (length, most) = self.decoder.state, self.packing(kept)
        for first in range(0, len(rows), most):
            some = [*rows[first : first + most]]
            row = self.to_device(array("q", some + some[:1] * (most - len(some))))
            columns = (row, torch.full_like(row, kept), state.seeds[row], state.number[row], state.done[row])
            ids = state.text[row, -kept:]
            padding = ids[:, -1:].expand(-1, length - kept)
            self.read(torch.cat([torch.stack(columns, dim=1), ids, padding], dim=1))

    def packing(self, tokens: int) -> tuple[int, int]:
        """Return the packed length of a text (its ids but the last, padded, and the last), and how many texts of this
        length a pass reads."""
        read, length = tokens - 1, tokens
        if self.padded and read:
            step = max(SHORTEST, (1 << (read - 1).bit_length()) // 4)
            length = min(self.decoder.capacity, -(-read // step) * step) + 1
        return length, min(self.together, max(1, TOKENS_AT_ONCE // length))

    def to_device(self, numbers: array) -> Tensor:
        on_host = torch.frombuffer(numbers, dtype=torch.int64)  # ten times as fast as from a list
        if self.decoder.device.type != "cuda":
            return on_host
        return on_host.pin_memory().to(self.decoder.device, non_blocking=True)

    def _read_in_graph(self, packed: Tensor) -> None:
        """Do what `_read` does; from the second time on that these sizes come, by a CUDA graph."""
        key = tuple(packed.shape)
        if key not in self._graphs:
            self._graphs[key] = None  # seen once
            self._read(packed)
            return
        recorded = self._graphs[key]
        if recorded is None:
            from lmkit.kernels.launch import recording

            graph, static = torch.cuda.CUDAGraph(), packed.clone()
            torch.cuda.synchronize()
            # All graphs share one pool, because nothing in it outlives a replay.
            with recording(graph, pool=self._pool):
                self._read(static)
            self._pool = graph.pool()
            recorded = self._graphs[key] = graph, static
        graph, static = recorded
        static.copy_(packed)
        graph.replay()

    def _read(self, packed: Tensor) -> None:
        """Put packed texts (texts, HEADER + length) into their rows."""
        decoder, state = self.decoder, self.decoder.state
        (row, tokens, seed, number, done), ids = packed[:, :HEADER].unbind(1), packed[:, HEADER:]
        last = tokens - 1
        state.place[row] = last
        state.seeds[row], state.number[row], state.done[row] = seed, number, done
        state.text[row, : ids.shape[1]] = ids
        if ids.shape[1] > 1 and not decoder.rereads:
            with suppress(AllStored):
                decoder.model.hidden_states(ids[:, :-1], PromptCache(self, row))
        if decoder.begin is not None:
            decoder.begin(row, ids.gather(1, last[:, None])[:, 0])
