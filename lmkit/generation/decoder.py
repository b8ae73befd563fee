"""Write several texts at once: their state and KV cache on the device, and the step that adds a token to each.

A step exists in five forms with the same state. A form is used only if it implements all switches of the model
(`ModelConfig.switches`):

* the model itself (`model_step`), which has all switches;
* PyTorch's operations (`torch_step`), which implement fewer;
* a single row on a CPU: NumPy's operations (`single_row_step`), which implement the same;
* up to 16 rows on a GPU: a list of kernel launches (`kernel_step`), recorded as a CUDA graph;
* more rows on a GPU: a library's matrix products between fused kernels, recorded as well.

One graph serves all lengths of a bucket. Programs beyond the end of a row exit at once, but many of them take time,
so there are several buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmkit.errors import UsageError
from lmkit.generation.memory import check_memory
from lmkit.generation.model_step import ModelStep
from lmkit.generation.prefill import Prefill, Text
from lmkit.generation.single_row_step import SingleRowStep
from lmkit.generation.torch_step import TorchStep
from lmkit.kernels.decode.reference import MOST_ROWS, Rows, Rules, Sampling
from lmkit.model.transformer import TransformerLM
from lmkit.registry import ATTENTION

if TYPE_CHECKING:
    from lmkit.generation.kernel_step import KernelStep
    from lmkit.recipe.schema import Recipe
    from lmkit.recipe.tables import ModelConfig


class LayerWeights(NamedTuple):
    """The weights of a block that a step reads: gains (d_model) and matrices (out, in); the bias of q|k|v, and the
    gains of queries and keys (heads + kv_heads, head_dim), if the model has them."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor
    qk_gain: Tensor | None


def layer_weights(block: Any) -> LayerWeights:
    attn, ffn = block.attn, block.ffn
    qk_gain = None
    if attn.q_norm is not None:
        heads = attn.output_proj.in_features // attn.head_dim
        gains = (attn.q_norm.weight.expand(heads, -1), attn.k_norm.weight.expand(attn.kv_heads, -1))
        qk_gain = torch.cat(gains)
    return LayerWeights(
        *(block.ln1.weight, attn.qkv_proj.weight, attn.qkv_proj.bias, attn.output_proj.weight),
        *(block.ln2.weight, ffn.gate_up.weight, ffn.w2.weight, qk_gain),
    )


class Decoder:
    """State of `rows` texts. `start` puts a prompt into a row; `step` draws one more token of every row.

    Every row draws from its own random stream. With `kernels`, the other rows do not change the bits of a row's text.
    Neither does the number of rows from 2 to 16; a single row, and every larger number, sums in another order.

    Args:
        model: must not change while the decoder is used.
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
        keys, values: (num_layers, rows, kv_heads, context_length, head_dim)

    Raises:
        LmkitError: the rows do not fit into the device's free memory; nothing was allocated.
        UsageError: `weights` is not for this device or model, or so many rows.
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
        self.model, self.rows, self.sampling, self.logprobs = model, rows, sampling, logprobs
        self.most, self.stops = most, frozenset(stops)
        self.device, self.capacity = weight.device, config.context_length
        self.rereads = not ATTENTION.facts(config.attention).sees_all
        runs_kernels = can_run_kernels(model) if kernels is None else kernels
        self.fp8 = weights == "fp8"
        if self.fp8:
            check_fp8(config, self.device, rows, runs_kernels=runs_kernels)
        check_memory(model, rows, sampling, kernels=runs_kernels, fp8=self.fp8)
        model.rope.reserve(self.capacity)  # steps hold the table
        shape = (config.num_layers, rows, config.kv_heads, self.capacity, config.head_dim)
        # Zeros, not empty: keys beyond a row's length get the probability 0, and 0 * nan is nan.
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)

        def numbers(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=self.device)

        self.state = Rows(
            place=numbers(rows),
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
        drawable = [stop for stop in self.stops if 0 <= stop < weight.shape[0]]
        stop, ending = (*drawable, -1)[0], None
        if len(drawable) > 1:
            stop, ending = -1, torch.zeros_like(banned)
            ending[torch.tensor(drawable, dtype=torch.int64, device=self.device)] = 1
        penalizes = sampling.repetition_penalty != 1
        seen = torch.zeros(rows if penalizes else 0, len(banned), dtype=torch.int8, device=self.device)
        self.rules = Rules(banned, seen, sampling.settings(self.device), penalizes, stop, ending)
        if runs_kernels:
            from lmkit.generation.kernel_step import KernelStep

            self._step: KernelStep | TorchStep | SingleRowStep | ModelStep = KernelStep(self)
            self._prefill = Prefill(self, padded=True)
            return
        if self.rereads or config.switches - TorchStep.switches:
            self._step = ModelStep(self)
        elif rows == 1 and self.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64):
            self._step = SingleRowStep(self)
        else:
            self._step = TorchStep(self)
        self._prefill = Prefill(self, padded=False)

    @cached_property
    def layers(self) -> list[LayerWeights]:
        return [layer_weights(layer) for layer in self.model.layers]

    @property
    def refill(self) -> int:
        """The number of rows that are best started together."""
        return self._prefill.together

    @torch.inference_mode()
    def start(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Put prompts of 1 to `capacity` ids into rows; the next step reads their last ids and draws."""
        self._prefill([Text(*text) for text in zip(rows, prompts, seeds, strict=True)])
        if self.rules.penalizes:
            for row, ids in zip(rows, prompts, strict=True):
                self.rules.seen[row] = 0
                self.rules.seen[row, torch.tensor(ids, device=self.device)] = 1

    @torch.inference_mode()
    def slide(self, rows: Sequence[int]) -> int:
        """Continue rows whose texts fill the cache from the last half of their text, as if nothing came before.

        Returns:
            The number of tokens that each of these rows keeps.
        """
        kept = max(1, self.capacity // 2)
        self._prefill.slide(rows, kept)
        return kept

    @torch.inference_mode()
    def step(self, longest: int) -> None:
        """Draw one more token of every row that is not done.

        Args:
            longest: an upper bound on the tokens of a row, at most `capacity`.
        """
        self._step(longest)

    def newest(self) -> Newest:
        """Start copying the newest tokens to the host, without waiting."""
        columns = [self.state.drawn, *([self.state.logprobs] if self.logprobs else [])]
        if self.device.type != "cuda":
            return Newest([column.clone() for column in columns], None)
        on_host = [torch.empty_like(column, device="cpu", pin_memory=True) for column in columns]
        for copy, column in zip(on_host, columns, strict=True):
            copy.copy_(column, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning while it waits
        event.record()
        return Newest(on_host, event)


@dataclass(frozen=True)
class Newest:
    """The tokens of a step on their way to the host."""

    columns: list[Tensor]
    event: torch.cuda.Event | None

    def has_come(self) -> bool:
        return self.event is None or self.event.query()

    def read(self) -> tuple[list[int], list[float] | None]:
        """Wait for the copy; return the token of every row, and its log-probability if that is kept."""
        if self.event is not None:
            self.event.synchronize()
        tokens, *logprobs = (column.tolist() for column in self.columns)
        return tokens, logprobs[0] if logprobs else None


def can_run_kernels(model: TransformerLM) -> bool:
    """Whether the kernels of `lmkit.kernels.decode` support this model on its device."""
    weight = model.lm_head.weight
    is_known = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_known and kernels_suit(model.config, weight.device)


def kernels_suit(config: ModelConfig, device: torch.device) -> bool:
    """Whether the kernels support a model of this table on this device."""
    return (
        device.type == "cuda"
        and ATTENTION.facts(config.attention).sees_all
        # Four slices of columns, 16 bytes at a time; sums of squares over 16 features.
        and config.d_model % 64 == 0
        and config.d_ff % 32 == 0
        and config.head_dim <= 256
        and not config.switches
    )


def check_fp8(config: ModelConfig, device: torch.device, rows: int, *, runs_kernels: bool) -> None:
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


def check_fp8_of(recipe: Recipe, device: torch.device) -> None:
    """Raise as `check_fp8` for the tables [model] and [generate] of a recipe, before anything is trained."""
    assert recipe.model is not None
    suits = kernels_suit(recipe.model, device)
    check_fp8(recipe.model, device, recipe.generate.batch_size, runs_kernels=suits)
