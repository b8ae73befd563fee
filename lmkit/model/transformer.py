"""The language model: attention, block and TransformerLM. Its smaller layers are in `layers`, RoPE in `rope`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lmkit.attention import attention_function, joined_function
from lmkit.core.attention import first_in_document, first_in_window, latest
from lmkit.core.kv_cache import KVCache
from lmkit.core.ranges import range_
from lmkit.core.rope import RotaryEmbedding, scale_frequencies
from lmkit.model.again import again, again_but_products, attend_again
from lmkit.model.layers import (
    AddRMSNorm,
    Device,
    DType,
    Embedding,
    Head,
    JoinedLinear,
    Linear,
    SwiGLU,
)
from lmkit.model.memory import Form, Keep, kept_by_layers
from lmkit.model.operations import PLAIN, Attend, Operations, choose_operations
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import OPERATIONS


class Given(NamedTuple):
    """What blocks read of a batch beside the residual stream.

    Attributes:
        cos_sin: of the positions, see `apply_rope`.
        first: the first token that each token sees, (batch or 1, seq), in a layer without a window and in one with;
            None: all earlier ones.
    """

    cos_sin: Tensor
    first: tuple[Tensor | None, Tensor | None] = (None, None)


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions and, where the configuration says so, fewer key/value heads
    than query heads (grouped-query attention, Ainslie et al. 2023).

    Args:
        layer: counts from 0.
    """

    def __init__(
        self, config: ModelConfig, layer: int = 0, *, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__()
        self.window = config.window(layer)
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.attention = attention_function(config.attention)
        self.joined_attention = joined_function(config.attention)
        d_kv = config.kv_heads * config.head_dim
        self.qkv_proj = JoinedLinear(
            config.d_model, config.d_model + 2 * d_kv, bias=config.qkv_bias, device=device, dtype=dtype
        )
        self.q_proj = self.qkv_proj.part(config.d_model)
        self.k_proj = self.qkv_proj.part(d_kv)
        self.v_proj = self.qkv_proj.part(d_kv)
        self.output_proj = Linear(
            config.d_model, config.d_model, zeros=config.zero_init, device=device, dtype=dtype
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = AddRMSNorm(config.head_dim, eps=config.norm_eps, device=device, dtype=dtype)
            self.k_norm = AddRMSNorm(config.head_dim, eps=config.norm_eps, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, given: Given, operations: Operations = PLAIN, attend: Attend | None = None
    ) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)

        Args:
            attend: replaces causal attention within the sequence; a KV cache's.
        """
        heads = self.rotated(self.qkv_proj(x), given, operations, attend)
        return self.output_proj(self.attend(heads, given, attend))  # (batch, seq, d_model)

    def rotated(
        self, qkv: Tensor, given: Given, operations: Operations, attend: Attend | None = None
    ) -> tuple[Tensor, ...]:
        """Return what `attend` takes: q, k, v, or the projection q|k|v alone."""
        joined = attend is None and self.joined_attention is not None
        if self.q_norm is not None:
            qkv = operations.heads_norm(qkv, self.q_norm, self.k_norm, self.kv_heads)
        return operations.rotated(qkv, given.cos_sin, self.kv_heads, joined=joined)

    def attend(self, heads: tuple[Tensor, ...], given: Given, attend: Attend | None = None) -> Tensor:
        """Return the attention of rotated heads, (batch, seq, heads * head_dim)."""
        first = given.first[int(self.window is not None)]
        hides = {} if first is None else {"first": first}  # kernels without the fact `windows` do not know it
        with range_("attention"):
            if len(heads) == 1:
                assert self.joined_attention is not None
                return self.joined_attention(
                    heads[0], kv_heads=self.kv_heads, head_dim=self.head_dim, **hides
                )
            out = self.attention(*heads, causal=True, **hides) if attend is None else attend(*heads)
        return out.transpose(1, 2).flatten(2)


class TransformerBlock(nn.Module):
    """Pre-norm residual layer (Xiong et al. 2020): x + attn(ln1(x)), then x + ffn(ln2(x)).

    The last sum is left to whoever reads it, because its norm is computed in the same pass over memory.

    Args:
        layer: counts from 0.
    """

    def __init__(
        self, config: ModelConfig, layer: int = 0, *, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__()
        self.ln1 = AddRMSNorm(config.d_model, eps=config.norm_eps, device=device, dtype=dtype)
        self.attn = SelfAttention(config, layer, device=device, dtype=dtype)
        self.ln2 = AddRMSNorm(config.d_model, eps=config.norm_eps, device=device, dtype=dtype)
        self.ffn = SwiGLU(config.d_model, config.d_ff, zeros=config.zero_init, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        given: Given,
        operations: Operations = PLAIN,
        attend: Attend | None = None,
        keep: Keep = "all",
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer to x + delta; return (x, delta), whose sum is the output. All are (batch, seq, d_model).

        Args:
            keep: for the backward pass; the rest is computed again. Values but "all" take neither delta nor attend.
        """
        if keep != "all":
            return self._forward_and_again(x, given, operations, keep)
        x, normed = self.ln1(x, delta, operations)
        delta = self.attn(normed, given, operations, attend)
        x, normed = self.ln2(x, delta, operations)
        return x, self.ffn(normed, operations)

    def _forward_and_again(
        self, x: Tensor, given: Given, operations: Operations, keep: Keep
    ) -> tuple[Tensor, Tensor]:
        """Do as `forward`, in parts. Each part keeps its inputs and is computed again in the backward pass.

        A part is computed again up to the last tensor that it had saved: the matrix product at its end is not.
        """

        def project(x: Tensor) -> Tensor:
            return self.attn.qkv_proj(self.ln1(x, None, operations)[1])

        def expand(x: Tensor) -> Tensor:
            return self.ffn.expand(self.ln2(x, None, operations)[1])

        def contract(expanded: Tensor) -> Tensor:
            return self.ffn.contract(expanded, operations)

        def all_after_attention(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            x, normed = self.ln2(x, self.attn.output_proj(out), operations)
            return x, self.ffn(normed, operations)

        def heads(x: Tensor) -> tuple[Tensor, ...]:
            return self.attn.rotated(project(x), given, operations)

        if keep == "input":
            return again(lambda x: self.forward(x, None, given, operations), x)
        if keep == "attention":
            out = attend_again(heads, lambda heads: self.attn.attend(heads, given), x)
        elif torch.compiler.is_compiling() and operations.name != "fused":
            # Outside, the compiler would keep rotated heads beside the projection.
            out = self.attn.attend(again_but_products(heads, x), given)
        else:
            out = self.attn.attend(self.attn.rotated(again(project, x), given, operations), given)
        if keep != "products":
            return again(all_after_attention, x, out)
        x = x + self.attn.output_proj(out)
        return x, again(contract, again_but_products(expand, x))


class Layers(nn.ModuleList):
    """The stack of blocks. A module of its own, so that `compile_model` can compile it as one graph.

    Attributes:
        operations: of the blocks; None: those of the model.
        sums: whether blocks get x + delta as one tensor, so that the first is compiled as the others are.
    """

    def __init__(self, blocks: Sequence[TransformerBlock]) -> None:
        super().__init__(blocks)
        self.sums = False
        self.operations: Operations | None = None

    def forward(
        self,
        x: Tensor,
        given: Given,
        operations: Operations,
        kv_cache: KVCache | None = None,
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
            if kv_cache is not None:
                # `forward`, because `__call__` may be compiled and would make a graph for every length.
                x, delta = block.forward(x, delta, given, operations, partial(kv_cache.attend, index))
            elif keeps is None or keeps[index] == "all":
                x, delta = block(x, delta, given, operations)
            else:  # keeps the block's input, one tensor
                x = x if delta is None else x + delta
                x, delta = block(x, None, given, operations, keep=keeps[index])
        return x, delta


class TransformerLM(nn.Module):
    """A decoder-only Transformer in the style of LLaMA (Touvron et al. 2023): pre-norm blocks with RMSNorm, rotary
    positions, causal attention and SwiGLU.

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

    Parameters draw their first values from torch's default generator. With `tie_embeddings` the head's matrix is the
    embedding (Press and Wolf 2017), initialised as a head, which is smaller.
    """

    def __init__(self, config: ModelConfig, *, device: Device = None, dtype: DType = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: the tokenizer decides it")
        self.config = config
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, device=device, dtype=dtype)
        self.layers = Layers(
            [
                TransformerBlock(config, layer, device=device, dtype=dtype)
                for layer in range(config.num_layers)
            ]
        )
        self.ln_final = AddRMSNorm(config.d_model, eps=config.norm_eps, device=device, dtype=dtype)
        self.lm_head = Head(config.d_model, config.vocab_size, device=device, dtype=dtype)
        if config.tie_embeddings:
            self.token_embeddings.weight = self.lm_head.weight
        self.rope = RotaryEmbedding(
            head_dim=config.head_dim,
            context_length=config.context_length,
            theta=config.rope_theta,
            scale=partial(scale_frequencies, config),
            device=device,
        )
        self.operations = choose_operations(config.operations, self.lm_head.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TransformerLM:
        # nn.Module calls this in .to(), .half() and .to_empty().
        super()._apply(fn, recurse)
        self.operations = choose_operations(self.config.operations, self.lm_head.weight)
        return self

    def hidden_states(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        """Return the normalised input of the head: (batch, seq) ids -> (batch, seq, d_model).

        With `separate_documents`, a document begins at an id that is given as its complement, ~id.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        operations = self.operations
        ids, first = self._first(ids)
        x = self.token_embeddings(ids, operations)  # (batch, seq, d_model)
        if kv_cache is None:
            given = Given(self.rope(ids.shape[1]), first)
            x, delta = self.layers(x, given, operations, keeps=self._keeps(x))  # (batch, seq, d_model)
        else:
            cos_sin = self.rope.at(kv_cache.positions(ids.shape[1]))  # (batch, seq, head_dim / 2, 2)
            # `forward`: not compiled, see `Layers`
            x, delta = self.layers.forward(x, Given(cos_sin), operations, kv_cache)
        _, normed = self.ln_final(x, delta, operations)
        return normed

    def _first(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Return the ids without the marks of documents, and the first token that each of them sees, as `Given` holds
        it: (batch, seq).

        RoPE needs nothing: attention depends on the distance of two positions only, and those of a document are as
        far apart as if it stood alone.
        """
        documents = None
        if self.config.separate_documents:
            begins = ids < 0
            documents = first_in_document(begins)
            ids = torch.where(begins, ~ids, ids)
        window = first_in_window(self.config.attention_window, ids.shape[1], ids.device)
        return ids, (documents, latest(documents, window))

    def _keeps(self, x: Tensor) -> list[Keep] | None:
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
            compiled=self.config.compile != "none" and operations.name != "fused",
        )
        return kept_by_layers(self.config, form, tokens=x.shape[0] * x.shape[1])

    def forward(self, ids: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        """Return the logits of the token after each position: (batch, seq) -> (batch, seq, vocab_size).

        Args:
            kv_cache: holds the tokens before `ids`; takes `ids` in.
        """
        return self.lm_head(self.hidden_states(ids, kv_cache))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the targets in nats per token, a float32 scalar.

        Args:
            ids: (batch, seq)
            targets: (batch, seq), the token that follows each of `ids`.
        """
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
    if model.config.operations == "auto":
        model.layers.operations = PLAIN  # the compiler fuses them itself
    if how == "block":
        model.layers.sums = True
        for block in model.layers:
            block.compile(backend=backend)
    else:
        model.layers.compile(backend=backend)
    model.lm_head.slice_loss.compile(backend=backend)
