"""The step of a `Decoder` on a GPU: kernel launches prepared once, recorded as a CUDA graph per bucket of lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from lmkit.kernels.decode.attention import attend_space, prepare_attend
from lmkit.kernels.decode.products import NOTHING, SLOTS, Stream, parts_of, prepare_product, tile_of, to_fp8
from lmkit.kernels.decode.rows import MOST_ROWS
from lmkit.kernels.decode.sampling import prepare_advance, prepare_rules
from lmkit.kernels.launch import capability, recording, selected
from lmkit.kernels.norm import add_rms_norm, prepare_heads_norm, rms_norm
from lmkit.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from lmkit.generation.decoder import Decoder
    from lmkit.kernels.decode.products import Matrix

SMALLEST_BUCKET = 256


class KernelStep:
    """Call it with the number of tokens of the longest row to make a step."""

    def __init__(self, decoder: Decoder) -> None:
        model, config, rows = decoder.model, decoder.model.config, decoder.rows
        weight = model.lm_head.weight
        self.decoder, self.few, self.eps = decoder, rows <= MOST_ROWS, config.norm_eps
        # Programmatic dependent launch needs Hopper.
        self.pdl = weight.is_cuda and capability(weight.device) >= (9, 0)
        vocab_size, width = weight.shape
        self.stream = Stream(
            weight.new_zeros(rows, width),
            weight.new_zeros(rows, width),
            weight.new_zeros(rows * width, dtype=torch.float32),
        )
        self.qkv = weight.new_zeros(rows, (config.num_heads + 2 * config.kv_heads) * config.head_dim)
        self.attended = weight.new_zeros(rows, config.width_of_heads)
        self.hidden = weight.new_zeros(rows, config.d_ff)
        self.logits = weight.new_zeros(rows, vocab_size, dtype=torch.float32)
        self.best = torch.full((rows, SLOTS.value), NOTHING.value, device=weight.device)
        heads = config.num_heads, config.kv_heads, config.head_dim
        self.space = attend_space(rows, *heads, decoder.capacity, weight)
        self.tile = partial(tile_of, dtype=weight.dtype, fp8=decoder.fp8)
        # Number of partial sums of squares that the last product of a layer writes for each row.
        self.parts = parts_of(width, self.tile("down", min(rows, MOST_ROWS), config.d_ff))
        matrix: Callable[[Tensor], Matrix] = to_fp8 if decoder.fp8 else lambda weight: weight
        self.head = matrix(weight)
        self.matrices = [
            tuple(map(matrix, (layer.qkv, layer.output, layer.gate_up, layer.down)))
            for layer in decoder.layers
        ]
        self.gains = [gain for layer in decoder.layers for gain in (layer.norm1, layer.norm2)]
        self.gains.append(model.ln_final.weight)  # of all norms, in order
        self._runs: dict[int, Callable[[], None]] = {}

    def begin(self, rows: Tensor, tokens: Tensor) -> None:
        """Make the next step read these tokens in these rows, both (texts) int64."""
        x = self.decoder.model.token_embeddings.weight[tokens]  # (texts, d_model)
        self.stream.total[rows] = x
        self.stream.normed[rows] = (x.float() * self.gains[0].float()).to(x.dtype)
        parts = self.stream.parts[: self.decoder.rows * self.parts].view(-1, self.parts)
        sums = F.pad(x.float().square().sum(dim=1, keepdim=True), (0, self.parts - 1))
        parts[rows] = sums  # the first part holds the whole sum, the others zero

    def __call__(self, longest: int) -> None:
        bucket = min(self.decoder.capacity, max(SMALLEST_BUCKET, triton.next_power_of_2(longest)))
        with selected(self.decoder.device):
            if bucket not in self._runs:
                self._runs[bucket] = self._record(self._few(bucket) if self.few else self._many(bucket))
            self._runs[bucket]()

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a step as a CUDA graph; return what replays it."""
        if self.decoder.device.type != "cuda":
            return run
        done = self.decoder.state.done
        changed = (*self.stream, done)
        kept = [x.clone() for x in changed]
        done.fill_(1)  # draw no token; the run writes to the cache what the next step writes again
        run()  # before the capture, so that libraries initialise
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            run()
        for x, before in zip(changed, kept, strict=True):
            x.copy_(before)
        return graph.replay

    def _attend(self, layer: int, bucket: int) -> list[Callable[[], None]]:
        """Prepare what comes between the projection q|k|v and the next product: bias and norms of heads, if the model
        has them, and attention."""
        decoder, weights = self.decoder, self.decoder.layers[layer]
        config, launches = decoder.model.config, []
        if weights.qk_gains is not None or weights.qkv_bias is not None:
            sizes = {"head_dim": config.head_dim, "kv_heads": config.kv_heads, "eps": self.eps}
            launches.append(prepare_heads_norm(self.qkv, weights.qk_gains, weights.qkv_bias, **sizes))
        read = self.qkv, decoder.cache.keys[layer], decoder.cache.values[layer], decoder.state.place
        prepare = partial(prepare_attend, longest=bucket, window=decoder.cache.windows[layer])
        pdl = self.pdl and self.few and not launches
        return [*launches, prepare(*read, decoder.model.rope.cos_sin, self.attended, self.space, pdl=pdl)]

    def _advance(self) -> Callable[[], None]:
        decoder = self.decoder
        drawn_from = self.logits, self.best, decoder.state, decoder.rules
        next_input = decoder.model.token_embeddings.weight, self.gains[0], self.stream, self.parts
        prepare = partial(prepare_advance, most=decoder.most, logprobs=decoder.logprobs)
        return prepare(*drawn_from, *next_input, sampling=decoder.sampling, pdl=self.pdl and self.few)

    def _few(self, bucket: int) -> Callable[[], None]:
        """Prepare the launches of a step of up to 16 rows."""
        stream, (rows, width) = self.stream, self.attended.shape
        parts = parts_of(stream.total.shape[1], self.tile("output", rows, width))  # of the product "output"
        product = partial(prepare_product, stream=stream, eps=self.eps, pdl=self.pdl)
        launches: list[Callable[[], None]] = []
        for layer, (qkv, output, gate_up, down) in enumerate(self.matrices):
            norm2, next_norm = self.gains[2 * layer + 1 : 2 * layer + 3]
            launches += [
                product("qkv", stream.normed, qkv, self.qkv, num_parts=self.parts),
                *self._attend(layer, bucket),
                product("output", self.attended, output, stream.total, then="residual", gain=norm2),
                product("gate_up", stream.normed, gate_up, self.hidden, then="swiglu", num_parts=parts),
                product("down", self.hidden, down, stream.total, then="residual", gain=next_norm),
            ]
        then: dict[str, Any] = {"then": "logits", "rules": self.decoder.rules, "best": self.best}
        head = product("head", stream.normed, self.head, self.logits, num_parts=self.parts, **then)
        launches += [head, self._advance()]

        def run() -> None:
            for launch in launches:
                launch()

        return run

    def _many(self, bucket: int) -> Callable[[], None]:
        """Prepare a step of more rows: from 64 rows on, a library's products reach the memory's bandwidth."""
        decoder, gains = self.decoder, self.gains
        attends = [self._attend(layer, bucket) for layer in range(len(decoder.layers))]
        apply_rules = prepare_rules(self.logits, self.best, decoder.rules)
        advance = self._advance()
        head = decoder.model.lm_head.weight
        # Logits in float32, as the kernels of few rows leave them.
        wide: dict[str, Any] = {} if head.dtype == torch.float32 else {"out_dtype": torch.float32}

        def run() -> None:
            x = self.stream.total
            normed = rms_norm(x, gains[0], eps=self.eps)
            for layer, weights in enumerate(decoder.layers):
                torch.mm(normed, weights.qkv.T, out=self.qkv)
                for launch in attends[layer]:
                    launch()
                delta = F.linear(self.attended, weights.output)
                x, normed = add_rms_norm(x, delta, weights.norm2, eps=self.eps)
                delta = F.linear(swiglu(F.linear(normed, weights.gate_up)), weights.down)
                x, normed = add_rms_norm(x, delta, gains[2 * layer + 2], eps=self.eps)
            torch.mm(normed, head.T, out=self.logits, **wide)
            apply_rules()
            advance()

        return run
