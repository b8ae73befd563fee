"""The model of `lmkit.core.model` as it trains: the attention kernel of the recipe, joined matrix products, fused
operations, and blocks that are computed again in the backward pass.

With PyTorch's operations and nothing computed again, what runs is the core's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lmkit.attention import attention_function, joined_function
from lmkit.core import model as core
from lmkit.core.kv_cache import KVCache
from lmkit.core.model import ALL_EARLIER, Firsts, Linear
from lmkit.core.ranges import range_
from lmkit.model.again import again, again_but_products, attend_again
from lmkit.model.joined import are_plain, joined_product, place_side_by_side
from lmkit.model.memory import Form, Keep, kept_by_layers
from lmkit.model.operations import PLAIN, Operations, choose_operations
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import OPERATIONS

Device = torch.device | str | None
DType = torch.dtype | None


class SelfAttention(core.SelfAttention):
    """Attention by a registered kernel, with q, k and v from one matrix product."""

    def __init__(self, config: ModelConfig, layer: int = 0, **factory_kwargs: Any) -> None:
        super().__init__(config, layer, **factory_kwargs)
        self.attention = attention_function(config.attention)
        self.joined_attention = joined_function(config.attention)

    def joined_layers(self) -> tuple[Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        layers = self.joined_layers()
        if not are_plain(*layers):
            return super().project(x)
        return joined_product(x, *layers).split([layer.out_features for layer in layers], dim=-1)

    # The parts of a block that computes some of them again, or by fused operations

    def rotated(
        self, qkv: Tensor, cos_sin: Tensor, operations: Operations, *, joined: bool = True
    ) -> tuple[Tensor, ...]:
        """Return what `attend_heads` takes: q, k, v, or if `joined` perhaps the projection q|k|v alone."""
        if self.q_norm is not None:
            qkv = operations.heads_norm(qkv, self.q_norm, self.k_norm, self.kv_heads)
        joined = joined and self.joined_attention is not None
        return operations.rotated(qkv, cos_sin, self.kv_heads, joined=joined)

    def attend_heads(self, heads: tuple[Tensor, ...], firsts: Firsts, cache: KVCache | None = None) -> Tensor:
        """Return the attention of what `rotated` returned, (batch, seq, heads * head_dim)."""
        if len(heads) > 1:
            q, k, v = heads
            return self.attend(q, k, v, firsts, cache)
        assert self.joined_attention is not None
        hidden = self.hidden_keys(firsts)
        with range_("attention"):
            return self.joined_attention(heads[0], kv_heads=self.kv_heads, head_dim=self.head_dim, **hidden)


class SwiGLU(core.SwiGLU):
    """The feed-forward network with gate and up from one matrix product.

    Attributes:
        casts: whether the products around the activation are in fp8.
    """

    casts = False

    def joined_layers(self) -> tuple[Linear, ...]:
        return self.w1, self.w3

    def project(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        if not are_plain(self.w1, self.w3):
            return super().project(x)
        return joined_product(x, self.w1, self.w3).chunk(2, dim=-1)

    def contract(self, expanded: Tensor, operations: Operations) -> Tensor:
        """Return the output for gate|up (..., 2 d_ff), which may be overwritten."""
        return self.w2(operations.swiglu(expanded, casts=self.casts))  # (..., d_model)


class TransformerBlock(core.TransformerBlock):
    """A block that can leave its last sum to the next norm, which computes it in the same pass over memory."""

    Attention, FeedForward = SelfAttention, SwiGLU
    attn: SelfAttention
    ffn: SwiGLU

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos_sin: Tensor,
        firsts: Firsts = ALL_EARLIER,
        cache: KVCache | None = None,
        *,
        delta: Tensor | None = None,
        operations: Operations = PLAIN,
        keep: Keep = "all",
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to x + delta; return (x, delta), whose sum is the output. All are (batch, seq, d_model).

        Args:
            operations: of the block.
            keep: for the backward pass; the rest is computed again.
        """
        plain_forward = super().forward
        is_plain = type(operations) is Operations
        if delta is not None and keep != "all":
            x, delta = x + delta, None
        if is_plain and keep == "all":
            return plain_forward(x if delta is None else x + delta, cos_sin, firsts, cache), None
        if not are_plain(self.ln1, self.attn, self.ln2, self.ffn):
            x = x if delta is None else x + delta
            whole = partial(plain_forward, cos_sin=cos_sin, firsts=firsts, cache=cache)
            return (whole(x) if keep == "all" else again(whole, x)), None
        if keep == "input":
            return again(lambda x: self.forward(x, cos_sin, firsts, operations=operations), x)
        if keep != "all":
            return self._forward_and_again(x, cos_sin, firsts, operations, keep)
        x, normed = self.normed(self.ln1, x, delta, operations)
        qkv = joined_product(normed, *self.attn.joined_layers())
        heads = self.attn.rotated(qkv, cos_sin, operations, joined=cache is None)
        delta = self.attn.output_proj(self.attn.attend_heads(heads, firsts, cache))
        x, normed = self.normed(self.ln2, x, delta, operations)
        return x, self.ffn.contract(joined_product(normed, *self.ffn.joined_layers()), operations)

    def normed(
        self, norm: core.RMSNorm, x: Tensor, delta: Tensor | None, operations: Operations
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and its norm."""
        return operations.add_rms_norm(x, delta, norm.weight, norm.eps)

    def _forward_and_again(
        self, x: Tensor, cos_sin: Tensor, firsts: Firsts, operations: Operations, keep: Keep
    ) -> tuple[Tensor, Tensor]:
        """Do as `forward`, in parts. Each part keeps its inputs and is computed again in the backward pass.

        A part is computed again up to the last tensor that it had saved: the matrix product at its end is not.
        """
        attn, ffn = self.attn, self.ffn

        def project(x: Tensor) -> Tensor:
            return joined_product(self.normed(self.ln1, x, None, operations)[1], *attn.joined_layers())

        def expand(x: Tensor) -> Tensor:
            return joined_product(self.normed(self.ln2, x, None, operations)[1], *ffn.joined_layers())

        def contract(expanded: Tensor) -> Tensor:
            return ffn.contract(expanded, operations)

        def all_after_attention(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            x, normed = self.normed(self.ln2, x, attn.output_proj(out), operations)
            return x, contract(joined_product(normed, *ffn.joined_layers()))

        def heads(x: Tensor) -> tuple[Tensor, ...]:
            return attn.rotated(project(x), cos_sin, operations)

        if keep == "attention":
            out = attend_again(heads, lambda heads: attn.attend_heads(heads, firsts), x)
        elif torch.compiler.is_compiling():
            # Outside, the compiler would keep rotated heads beside the projection.
            out = attn.attend_heads(again_but_products(heads, x), firsts)
        else:
            out = attn.attend_heads(attn.rotated(again(project, x), cos_sin, operations), firsts)
        if keep != "products":
            return again(all_after_attention, x, out)
        x = x + attn.output_proj(out)
        return x, again(contract, again_but_products(expand, x))


class Layers(core.Layers):
    """The stack of blocks.

    Attributes:
        operations: of the blocks; None: those of the model.
        sums: whether blocks get x + delta as one tensor, so that the first is compiled as the others are.
    """

    def __init__(self, blocks: Sequence[TransformerBlock]) -> None:
        super().__init__(blocks)
        self.sums = False
        self.operations: Operations | None = None

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos_sin: Tensor,
        firsts: Firsts,
        cache: KVCache | None = None,
        *,
        operations: Operations,
        keeps: Sequence[Keep] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (x, delta), whose sum is the output of the last block; (batch, seq, d_model).

        Args:
            keeps: what each block keeps for the backward pass; None: everything.
        """
        operations = self.operations or operations
        delta = None
        for index, block in enumerate(self):
            if self.sums and delta is not None:
                x, delta = x + delta, None
            keep = "all" if keeps is None else keeps[index]
            run = block if cache is None else as_written(block)
            x, delta = run(x, cos_sin, firsts, cache, delta=delta, operations=operations, keep=keep)
        return x, delta


def as_written(module: nn.Module) -> Callable[..., Any]:
    """Return what calls a module without its compiled form, which would be made for every length of a cache."""
    return module if module._compiled_call_impl is None else module.forward


class Embedding(core.Embedding):
    """An embedding whose rows are read by the given operations."""

    def forward(self, ids: Tensor, operations: Operations = PLAIN) -> Tensor:
        """(batch, seq) -> (batch, seq, d_model)"""
        return operations.embedding(ids, self.weight)


class LastNorm(core.RMSNorm):
    """The norm of the output of the blocks, by the given operations."""

    def forward(self, x: Tensor, delta: Tensor | None = None, operations: Operations = PLAIN) -> Tensor:
        """Return the norm of x + delta, (..., d_model)."""
        return operations.add_rms_norm(x, delta, self.weight, self.eps)[1]


class Head(core.Head):
    """The last matrix, and the loss by the given operations."""

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, operations: Operations = PLAIN
    ) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        return operations.linear_cross_entropy(hidden, self.weight, targets, self.slice_loss)


class TransformerLM(core.TransformerLM):
    """A decoder-only Transformer in the style of LLaMA, see `lmkit.core.model.TransformerLM`.

    >>> from lmkit.model import ModelConfig, TransformerLM
    >>> model = TransformerLM(ModelConfig(vocab_size=1000, context_length=64, d_model=96, num_heads=4))
    >>> ids = torch.randint(1000, (2, 64))
    >>> model(ids).shape
    torch.Size([2, 64, 1000])
    >>> loss = model.loss(ids[:, :-1], ids[:, 1:])

    Args:
        config: the recipe's table `[model]` with `vocab_size` filled in.
        device, dtype: of the parameters. `lmkit.training.precision` casts or autocasts them for training.

    Attributes:
        operations: what runs around the matrix products. Chosen as the configuration says, again when the model moves
            to another device or dtype.

    Raises:
        ValueError: the configuration has no vocabulary size.
        UsageError: no attention kernel has this name, or the named operations do not run here.
    """

    Table, Stack, Block, Norm, LastLayer = Embedding, Layers, TransformerBlock, LastNorm, Head
    layers: Layers

    def __init__(self, config: ModelConfig, *, device: Device = None, dtype: DType = None) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self._arrange()

    def _arrange(self) -> None:
        place_side_by_side(self)
        self.operations = choose_operations(self.config.operations, self.lm_head.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TransformerLM:
        # nn.Module calls this in .to(), .half() and .to_empty().
        super()._apply(fn, recurse)
        self._arrange()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, whose parameters were copied one by one
        place_side_by_side(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        found = super().load_state_dict(state_dict, strict, assign)
        if assign:  # new tensors, perhaps the first that are not on "meta"
            self.tie_weights()
            self.rope.to_empty(device=self.lm_head.weight.device)  # computes its table
            self._arrange()
        return found

    def hidden_states(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        operations = self.operations
        ids, firsts = self.visible(ids)
        x = self.token_embeddings(ids, operations)  # (batch, seq, d_model)
        if cache is None:
            x, delta = self.layers(
                x, self.rope(ids.shape[1]), firsts, operations=operations, keeps=self._keeps(x)
            )
        else:
            cos_sin = self.rope.at(cache.positions(ids.shape[1]))  # (batch, seq, head_dim / 2, 2)
            x, delta = as_written(self.layers)(x, cos_sin, firsts, cache, operations=operations)
        if isinstance(self.ln_final, LastNorm):
            return self.ln_final(x, delta, operations)
        return self.ln_final(x if delta is None else x + delta)  # somebody replaced it

    def _keeps(self, x: Tensor) -> Sequence[Keep] | None:
        """Return what each block keeps of x (batch, seq, d_model) for the backward pass; None: everything."""
        if self.config.activation_checkpointing == "none" or not torch.is_grad_enabled():
            return None
        device, operations = x.device.type, self.layers.operations or self.operations
        autocast = torch.is_autocast_enabled(device)
        form = Form(
            OPERATIONS.facts(operations.name).reuses_memory,
            device,
            stream=x.element_size(),
            product=torch.get_autocast_dtype(device).itemsize if autocast else x.element_size(),
            compiled=self.config.compile != "none",
        )
        return kept_by_layers(self.config, form, tokens=x.shape[0] * x.shape[1])

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.hidden_states(ids)  # (batch, seq, d_model)
        with range_("loss"):
            return self.lm_head(hidden, targets, self.operations)


def compile_model(
    model: TransformerLM, how: Literal["none", "block", "whole"], *, backend: str = "inductor"
) -> None:
    """Compile the model's layers and its loss in place; names in the state dict stay as they are.

    Args:
        how: "block" compiles one block and uses it for all of them, so that the first step starts soon. "whole"
            compiles the stack of blocks as one graph, which fuses more; its first step takes longer with every layer.
            Compilation itself happens in the first call of each shape.
    """
    if how == "none":
        return
    if model.config.operations in ("auto", "fused"):
        model.layers.operations = PLAIN  # the compiler fuses them itself
    if how == "block":
        model.layers.sums = True
        for block in model.layers:
            block.compile(backend=backend)
    else:
        model.layers.compile(backend=backend)
    model.lm_head.slice_loss.compile(backend=backend)
