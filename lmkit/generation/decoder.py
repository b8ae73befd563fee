"""Write several texts at once: their state and KV cache on the device, and the step that adds a token to each.

A step exists in three forms with the same state. A fast form reads the weights itself. So it is used only if it
implements all switches of the model (`ModelConfig.switches`), and nobody replaced a layer, as LoRA adapters do:

* to read, and for all other models: the model itself with a `KVCache` (`Decoder.next_logits`);
* fast on a CPU: as few calls as possible (`CPUStep`);
* fast on a GPU: kernels recorded as a CUDA graph (`kernel_step`), from 17 rows on around a library's matrix products.

One graph serves all lengths of a bucket. Programs beyond the end of a row exit at once, but many of them take time,
so there are several buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.core.kv_cache import KVCache
from lmkit.core.sampling import Sampling, draw
from lmkit.core.step import has_slices
from lmkit.errors import LmkitError, UsageError
from lmkit.generation.prefill import TOKENS_AT_ONCE, Prefill
from lmkit.kernels.decode.rows import (
    MOST_ROWS,
    Rows,
    Rules,
    log_probabilities,
    plain_advance,
    plain_rules,
    settings_of,
)
from lmkit.measure.memory import available_memory
from lmkit.model.accounting import count_parameters
from lmkit.model.memory import SWITCHES
from lmkit.model.transformer import TransformerLM, is_original, join
from lmkit.registry import ATTENTION

Newest = tuple[list[Tensor], torch.cuda.Event | None]
"""The tokens of a step on their way to the host, see `Decoder.newest`."""


class LayerWeights(NamedTuple):
    """The weights of a block that a step reads: gains (d_model) and matrices (out, in); the bias of q|k|v, and the
    gains of queries and of keys (head_dim), if the model has them."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor
    qk_gains: tuple[Tensor, Tensor] | None


def layer_weights(block: Any) -> LayerWeights:
    attn, ffn = block.attn, block.ffn
    q, k, v = attn.q_proj, attn.k_proj, attn.v_proj
    return LayerWeights(
        block.ln1.weight,
        join([q.weight, k.weight, v.weight]),
        None if q.bias is None else join([q.bias, k.bias, v.bias]),
        *(attn.output_proj.weight, block.ln2.weight),
        join([ffn.w1.weight, ffn.w3.weight]),
        ffn.w2.weight,
        None if attn.q_norm is None else (attn.q_norm.weight, attn.k_norm.weight),
    )


class Decoder:
    """State of `rows` texts. `start` puts a prompt into a row; `step` draws one more token of every row.

    Every row draws from its own random stream. With `kernels`, the other rows do not change the bits of a row's text.
    Neither does the number of rows from 2 to 16; a single row, and every larger number, sums in another order.

    Args:
        model: must not change, nor get hooks, while the decoder is used.
        rows: texts at once.
        most: drawn tokens that end a row on the device; later steps do not change an ended row.
        stops: ids that end a row as well.
        vocab_size: draw only ids below it.
        never: ids that are not drawn.
        logprobs: keep the log-probability of each token in `state.logprobs`.
        kernels: True runs the kernels' step, False PyTorch's operations; None: the kernels if `can_run_kernels`. On a
            CPU, Triton's interpreter runs the kernels.
        weights: "fp8": a step multiplies by matrices in fp8, made here; prompts are still read with the model's.

    Attributes:
        state: of the rows; `state.drawn` holds their newest tokens.
        cache: keys and values of all tokens of the rows but the newest.
        refill: number of rows that are best started together.
        layers: weights of the blocks, if a step reads them itself.
        begin: prepares the next step for new texts; None: nothing has to be.

    Raises:
        LmkitError: the rows do not fit into the device's free memory; nothing was allocated.
        UsageError: `weights` is not for this device or model, or so many rows; `model` is FSDP's.
    """

    def __init__(
        self,
        model: TransformerLM,
        rows: int,
        *,
        sampling: Sampling,
        most: int,
        stops: Collection[int] = (),
        vocab_size: int | None = None,
        never: Sequence[int] = (),
        logprobs: bool = False,
        kernels: bool | None = None,
        weights: Literal["same", "fp8"] = "same",
    ) -> None:
        config, weight = model.config, model.lm_head.weight
        if has_slices(model.parameters()):
            message = "the model is FSDP's, of whose weights this rank has a part"
            raise UsageError(
                "generate.sharded", message, hint="load gather_full_parameters() into another model"
            )
        self.model, self.rows, self.sampling, self.logprobs = model, rows, sampling, logprobs
        self.most, self.stops = most, frozenset(stops)
        self.device, self.capacity = weight.device, config.context_length
        self.rereads = not ATTENTION.facts(config.attention).sees_all
        runs_kernels = can_run_kernels(model) if kernels is None else kernels
        self.fp8 = weights == "fp8"
        if self.fp8:
            check_fp8(self.device, rows, runs_kernels=runs_kernels)
        check_memory(model, rows, sampling, kernels=runs_kernels, fp8=self.fp8)
        self.cache = KVCache(model, rows)

        numbers = partial(torch.zeros, dtype=torch.int64, device=self.device)
        self.state = Rows(
            place=self.cache.lengths,
            text=numbers(rows, self.capacity + 1),
            number=numbers(rows),
            done=numbers(rows) + 1,
            seeds=numbers(rows),
            drawn=numbers(rows),
            logprobs=torch.zeros(rows, device=self.device),
        )
        banned = torch.zeros(weight.shape[0], dtype=torch.int8, device=self.device)
        if vocab_size is not None:
            banned[vocab_size:] = 1
        banned[torch.tensor(never, dtype=torch.int64, device=self.device)] = 1
        drawable = sorted(self.stops.intersection(range(weight.shape[0])))
        stop, ending = (*drawable, -1)[0], None
        if len(drawable) > 1:
            stop, ending = -1, torch.zeros_like(banned)
            ending[torch.tensor(drawable, dtype=torch.int64, device=self.device)] = 1
        penalizes = sampling.repetition_penalty != 1
        seen = torch.zeros(rows if penalizes else 0, len(banned), dtype=torch.int8, device=self.device)
        self.rules = Rules(banned, seen, settings_of(sampling, self.device), penalizes, stop, ending)
        # NumPy's calls take less time than PyTorch's.
        self._view: Callable[[Tensor], Any] = Tensor.numpy if self.device.type == "cpu" else lambda x: x
        viewed: Any = {"seen": self._view(seen), "stops": None if ending is None else self._view(ending)}
        columns: Any = map(self._view, self.state)
        self._views = Rows(*columns), self.rules._replace(**viewed)
        reads_weights = runs_kernels or (
            self.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.float64)
            and not self.rereads
            and config.switches <= SWITCHES
            and is_original(model)
        )
        self.layers = list(map(layer_weights, model.layers)) if reads_weights else []
        self.begin: Callable[[Tensor, Tensor], None] | None = None
        if runs_kernels:
            from lmkit.generation.kernel_step import KernelStep

            self._step: Callable[[int], Tensor | None] = (step := KernelStep(self))
            self.begin = step.begin
        else:
            self._step = CPUStep(self) if reads_weights else self.next_logits
        self._prefill = Prefill(self, padded=runs_kernels)
        self.refill = self._prefill.together

    @torch.inference_mode()
    def start(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Put prompts of 1 to `capacity` ids into rows; the next step reads their last ids and draws."""
        self._prefill(rows, prompts, seeds)
        if self.rules.penalizes:
            for row, ids in zip(rows, prompts, strict=True):
                self.rules.seen[row] = 0
                self.rules.seen[row, torch.tensor(ids, device=self.device)] = 1

    @torch.inference_mode()
    def slide(self, rows: Sequence[int]) -> int:
        """Continue rows whose texts fill the cache from the last half of their text, as if nothing came before;
        return how many tokens each of them keeps."""
        kept = max(1, self.capacity // 2)
        self._prefill.slide(rows, kept)
        return kept

    @torch.inference_mode()
    def step(self, longest: int) -> None:
        """Draw one more token of every row that is not done. No row has more than `longest` tokens."""
        logits = self._step(longest)
        if logits is None:  # the kernels have drawn
            return
        logits = plain_rules(logits, self.rules)
        tokens = draw(logits, self.state.seeds, self.state.number, self.sampling)
        chosen = self._view(log_probabilities(logits, tokens).to(torch.float32)) if self.logprobs else None
        plain_advance(self._view(tokens), *self._views, self.most, chosen)

    def next_logits(self, longest: int) -> Tensor:
        """Return the logits of every row's next token, (rows, vocab_size): the model reads the newest of each row."""
        place, text = self.state.place, self.state.text
        if not self.rereads:
            return self.model(text.gather(1, place[:, None]), self.cache)[:, 0]
        # The cache does not know which keys the attention kernel hides: read whole texts.
        texts = [ids[: last + 1] for ids, last in zip(text, place.tolist(), strict=True)]
        return torch.cat([self.model(ids[None])[:, -1] for ids in texts])

    def newest(self) -> Newest:
        """Start copying the newest tokens to the host, without waiting; return the copies, with the log-probabilities
        if these are kept, and the event after which they are complete (None: at once)."""
        columns = [self.state.drawn, *([self.state.logprobs] if self.logprobs else [])]
        if self.device.type != "cuda":
            return list(map(torch.clone, columns)), None
        on_host = [torch.empty_like(column, device="cpu", pin_memory=True) for column in columns]
        for copy, column in zip(on_host, columns, strict=True):
            copy.copy_(column, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning while it waits
        event.record()
        return on_host, event


Array = Any  # of NumPy


class CPUStep:
    """The fast form of `Decoder.next_logits` on a CPU, in float32 or float64.

    In a small model, calls take longer than arithmetic. So memory is allocated once, views of it are made once, and
    small operations are NumPy's, whose calls take less time than PyTorch's. PyTorch computes matrix products and
    attention, which it shares among threads. Each NumPy array shares the memory of a tensor.
    """

    def __init__(self, decoder: Decoder) -> None:
        model, config, rows = decoder.model, decoder.model.config, decoder.rows
        width, head_dim, kv_heads = config.d_model, config.head_dim, config.kv_heads
        self.decoder, self.head = decoder, model.lm_head.weight.detach().T
        self.x, self.normed = self.head.new_zeros(2, rows, width)
        self.x_array, self.normed_array = self.x.numpy(), self.normed.numpy()
        self.qkv = self.head.new_zeros(rows, config.width_of_heads + 2 * kv_heads * head_dim)
        heads = self.qkv.unflatten(-1, (-1, head_dim))  # (rows, heads + 2 kv_heads, head_dim)
        self.q = heads[:, : config.num_heads, None]  # (rows, heads, 1, head_dim)
        self.qk, self.v = np.split(heads.numpy(), [-kv_heads], axis=1)
        self.k = self.qk[:, -kv_heads:]
        # Two neighbouring channels as complex
        self.pairs = self.qk.view(np.result_type(self.qk, np.complex64))
        self.joint = self.head.new_zeros(rows, 2 * config.d_ff)
        self.gate, self.up = self.joint.chunk(2, dim=1)
        self.table = model.token_embeddings.weight.detach().numpy()
        # (capacity, head_dim / 2) complex
        self.turns = torch.view_as_complex(model.rope.cos_sin.to(self.head.dtype)).numpy()
        self.eps, self.root = config.norm_eps, math.sqrt(width)
        self.squares = np.zeros((rows, 1, 1), self.x_array.dtype)
        self.eps_sum = self.squares.dtype.type(config.norm_eps * width)
        self.layers = []
        for layer, keys, values in zip(decoder.layers, decoder.cache.keys, decoder.cache.values, strict=True):
            qk_gain = None
            if layer.qk_gains is not None:  # the gain of every head of q|k, (heads + kv_heads, head_dim)
                q_gain, k_gain = layer.qk_gains
                parts = q_gain.expand(config.num_heads, -1), k_gain.expand(kv_heads, -1)
                qk_gain = torch.cat(parts).detach().numpy()
            weights = (
                *(self.gain(layer.norm1), layer.qkv.detach().T, layer.qkv_bias, layer.output.detach().T),
                *(self.gain(layer.norm2), layer.gate_up.detach().T, layer.down.detach().T),
            )
            self.layers.append((*weights, qk_gain, keys.numpy(), values.numpy()))
        self.last_gain = self.gain(model.ln_final.weight)
        self.each, self.place = np.arange(rows), decoder.state.place.numpy()
        self.text, self.positions = decoder.state.text.numpy(), torch.arange(decoder.capacity)
        self.grouped = config.num_heads != kv_heads

    def gain(self, weight: Tensor) -> Array:
        return (weight.detach() * self.root).numpy()

    def __call__(self, longest: int) -> Tensor:
        cache, x, normed, each, place = self.decoder.cache, self.x, self.normed, self.each, self.place
        self.x_array[:] = self.table[self.text[each, place]]
        longest = int(place.max()) + 1
        turns = self.turns[place][:, None]  # (rows, 1, head_dim / 2)
        hidden = {window: self.hidden(longest, window) for window in set(cache.windows)}
        seen = cache.keys[:, :, :, :longest].unbind(), cache.values[:, :, :, :longest].unbind()
        for layer, window, old_keys, old_values in zip(self.layers, cache.windows, *seen, strict=True):
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


def can_run_kernels(model: TransformerLM) -> bool:
    """Whether the kernels of `lmkit.kernels.decode` support this model on its device."""
    config, weight = model.config, model.lm_head.weight
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and ATTENTION.facts(config.attention).sees_all
        # Four slices of columns, 16 bytes at a time; sums of squares over 16 features.
        and config.d_model % 64 == config.width_of_heads % 64 == 0
        and config.d_ff % 32 == 0
        and config.head_dim <= 256
        and config.switches <= SWITCHES
        and is_original(model)
    )


def check_fp8(device: torch.device, rows: int, *, runs_kernels: bool) -> None:
    """Raise if a step with fp8 weights would not be faster: without the kernels, or with more than a few rows."""
    same = 'set generate.weights to "same"'
    if not runs_kernels or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)):
        why, hint = "fp8 needs a GPU from sm_89 on, and a model that the kernels implement", same
    elif rows > MOST_ROWS:
        why = f"fp8 is for at most {MOST_ROWS} texts at once, not {rows}"
        hint = f"set generate.batch_size to at most {MOST_ROWS}, or {same}"
    else:
        return
    raise UsageError("generate.weights", f"generate.weights: {why}", hint=hint)


LIBRARIES = 500_000_000
"""Bytes that a GPU's libraries take at their first calls, to load kernels and as workspaces (cuBLAS: 32 MiB on every
stream), and that the allocator's rounding costs."""


def decoder_needs(
    model: TransformerLM, rows: int, sampling: Sampling, *, kernels: bool, fp8: bool = False
) -> tuple[int, int, int]:
    """Count the bytes that a decoder with these arguments allocates: of every row the cache and all others, from the
    first step on, and those once for all rows."""
    config, weight = model.config, model.lm_head.weight
    vocab_size, width = weight.shape
    element, capacity = weight.element_size(), config.context_length
    cache = 2 * config.num_layers * config.kv_heads * capacity * config.head_dim * element
    state = 8 * (capacity + 1) + 5 * 8 + 4  # `Rows`
    seen = vocab_size if sampling.repetition_penalty != 1 else 0
    qkv = (config.num_heads + 2 * config.kv_heads) * config.head_dim
    hidden = 2 * config.d_ff
    at_once = max(capacity, min(TOKENS_AT_ONCE, rows // 16 * capacity)) if kernels else capacity
    reading = at_once * (hidden + config.d_ff + 8 * width) * element
    once = 2 * vocab_size + reading  # ids that are banned, ids that end a text
    if kernels:
        step = sum(kernel_step_needs(model, rows))
        once += reading  # recorded, in a pool of its own
        once += count_parameters(config).multiplying if fp8 else 0
    else:
        # Logits; weights, sums and what is left of the ids, of which `draw` draws.
        draw = vocab_size * (element + (8 if sampling.temperature == 0 else 40))
        step = draw + (qkv + hidden + config.d_ff + 8 * width) * element
    if not ATTENTION.facts(config.attention).sees_all:
        once += capacity * vocab_size * element  # logits of a text that is read again
    once += LIBRARIES if weight.is_cuda else 0
    return cache, state + seen + step, once


def kernel_step_needs(model: TransformerLM, rows: int) -> tuple[int, int]:
    """Return the bytes that a `KernelStep` allocates for each row: when it is made, and when steps are recorded."""
    from lmkit.generation.kernel_step import SMALLEST_BUCKET
    from lmkit.kernels.decode.attention import attend_space
    from lmkit.kernels.decode.products import SLOTS

    config, weight = model.config, model.lm_head.weight
    vocab_size, width = weight.shape
    element, capacity = weight.element_size(), config.context_length
    heads = config.num_heads, config.kv_heads, config.head_dim
    some = min(rows, 2)  # a single row is split in another way
    space = attend_space(some, *heads, capacity, weight.new_empty(0, device="meta"))
    stream = 2 * width * element + 4 * width
    qkv = (config.num_heads + 2 * config.kv_heads) * config.head_dim
    kept = stream + (qkv + config.width_of_heads + config.d_ff) * element + 4 * vocab_size + 8 * SLOTS.value
    kept += sum(x.nbytes for x in space) // some
    copies = stream + 8  # while a step is recorded
    if rows <= MOST_ROWS:
        return kept, copies
    # What is alive in `KernelStep._many`, once before it is recorded and in the graph of every bucket.
    alive = (3 * width + max(3 * config.d_ff, 2 * width)) * element
    buckets = 1 + max(0, (capacity - 1).bit_length() - (SMALLEST_BUCKET - 1).bit_length())
    return kept, copies + (1 + buckets) * alive


def check_memory(model: TransformerLM, rows: int, sampling: Sampling, *, kernels: bool, fp8: bool) -> None:
    """Raise if the device's free memory has no room for these rows."""
    device = model.lm_head.weight.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    elif (available := available_memory()) is not None:
        free = available
    else:
        return
    cache, others, once = decoder_needs(model, rows, sampling, kernels=kernels, fp8=fp8)
    if (needed := once + rows * (cache + others)) > free:
        why = (
            f"{rows} texts need {needed / 1e9:.2f} GB, of it {rows * cache / 1e9:.2f} GB for their KV cache; "
            f"{free / 1e9:.2f} GB are free"
        )
        raise does_not_fit(why, max(0, free - once) // (cache + others))


def does_not_fit(why: str, fits: int) -> LmkitError:
    """Return the error that says which batch fits."""
    hint = "use a smaller model, a shorter context (lmkit import --context-length), or more memory"
    if fits:
        hint = f"set generate.batch_size to at most {fits}"
    return LmkitError("generate.out_of_memory", f"generate.batch_size: {why}", hint=hint)
