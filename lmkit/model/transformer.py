"""The model of `lmkit.core.model` as it trains: the attention kernel of the recipe, joined matrix products, fused
operations, and blocks that are computed again in the backward pass.

With PyTorch's operations and nothing computed again, the core's forward pass runs; also in blocks with a switch that
is not in `SWITCHES`, or with a layer that somebody replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lmkit.attention import attention_function, joined_function
from lmkit.core import model as core
from lmkit.core.autograd import is_transformed
from lmkit.core.kv_cache import KVCache
from lmkit.core.model import ALL_EARLIER, Firsts, Linear, rotate_joint
from lmkit.core.ranges import range_
from lmkit.model.again import again, again_but_products, attend_again
from lmkit.model.memory import SWITCHES, Form, Keep, kept_by_layers
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

    def heads(self, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj, self.k_proj, self.v_proj
        if not are_plain(q, k, v):
            return super().heads(x, cos_sin)
        qkv = joined_product(x, q, k, v)
        if self.q_norm is not None:
            qkv = PLAIN.heads_norm(qkv, self.q_norm, self.k_norm, self.kv_heads)
        return rotate_joint(qkv, cos_sin, self.kv_heads)

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
        first = firsts.without_window if self.window is None else firsts.with_window
        hidden = {} if first is None else {"first": first}  # some kernels do not take it
        with range_("attention"):
            return self.joined_attention(heads[0], kv_heads=self.kv_heads, head_dim=self.head_dim, **hidden)


class SwiGLU(core.SwiGLU):
    """The feed-forward network with gate and up from one matrix product."""

    casts = False  # whether the products around the activation are in fp8

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

    def __init__(self, config: ModelConfig, layer: int = 0, **factory_kwargs: Any) -> None:
        super().__init__(config, layer, **factory_kwargs)
        self.is_known = config.switches <= SWITCHES

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        firsts: Firsts = ALL_EARLIER,
        cache: KVCache | None = None,
        *,
        delta: Tensor | None = None,
        operations: Operations | None = None,
        keep: Keep = "all",
    ) -> Any:
        """Return the output, (batch, seq, d_model), as the core's block does; with `operations`, apply the layer to
        x + delta and return (x, delta), whose sum is the output. What the backward pass does not `keep` is computed
        again."""
        forward = partial(
            TransformerBlock.forward, self
        )  # `self.forward` may be somebody's, which calls this
        if operations is None:
            x, delta = forward(x, cos_sin, firsts, cache, operations=PLAIN, keep=keep)
            return x if delta is None else x + delta
        is_core = type(operations) is Operations and keep == "all"
        if is_core or not (self.is_known and are_plain(self.ln1, self.attn, self.ln2, self.ffn)):
            x = x if delta is None else x + delta
            if keep == "all":
                return super().forward(x, cos_sin, firsts, cache), None
            # A layer that somebody brought, such as an adapter with dropout, may draw random numbers.
            core_pass = partial(super().forward, cos_sin=cos_sin, firsts=firsts, cache=cache)
            return again(core_pass, x, draws=True), None
        if delta is not None and keep != "all":
            x, delta = x + delta, None
        if keep == "input":
            return again(partial(forward, cos_sin=cos_sin, firsts=firsts, operations=operations), x)
        attn, ffn = self.attn, self.ffn

        def product(
            norm: core.RMSNorm, part: SelfAttention | SwiGLU, x: Tensor, delta: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            """Return x + delta, and q|k|v or gate|up of its norm."""
            x, normed = operations.add_rms_norm(x, delta, norm.weight, norm.eps)
            return x, joined_product(normed, *part.joined_layers())

        def after_attention(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            x, expanded = product(self.ln2, ffn, x, attn.output_proj(out))
            return x, ffn.contract(expanded, operations)

        if keep == "all":
            x, qkv = product(self.ln1, attn, x, delta)
            heads = attn.rotated(qkv, cos_sin, operations, joined=cache is None)
            return after_attention(x, attn.attend_heads(heads, firsts, cache))

        # Each part keeps its inputs and is computed again in the backward pass, up to the last tensor that it had
        # saved: the matrix product at its end is not.
        def heads_of(x: Tensor) -> tuple[Tensor, ...]:
            return attn.rotated(product(self.ln1, attn, x)[1], cos_sin, operations)

        if keep == "attention":
            out = attend_again(heads_of, lambda heads: attn.attend_heads(heads, firsts), x)
        elif torch.compiler.is_compiling():
            # Outside, the compiler would keep rotated heads beside the projection.
            out = attn.attend_heads(again_but_products(heads_of, x), firsts)
        else:
            qkv = again(lambda x: product(self.ln1, attn, x)[1], x)
            out = attn.attend_heads(attn.rotated(qkv, cos_sin, operations), firsts)
        if keep != "products":
            return again(after_attention, x, out)
        x = x + attn.output_proj(out)
        expanded = again_but_products(lambda x: product(self.ln2, ffn, x)[1], x)
        return x, again(lambda expanded: ffn.contract(expanded, operations), expanded)


class Layers(core.Layers):
    """The stack of blocks."""

    sums = False  # whether blocks get x + delta as one tensor, so that all are compiled alike
    operations: Operations | None = None  # None: those of the model

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        firsts: Firsts,
        cache: KVCache | None = None,
        *,
        operations: Operations | None = None,
        keeps: Sequence[Keep] | None = None,
    ) -> Any:
        """Return the output of the last block, (batch, seq, d_model), as the core does; with `operations` return
        (x, delta), whose sum is the output. Each block keeps what `keeps` says for the backward pass, or everything.

        A block that somebody hooked into or replaced is called as the core calls it: one tensor in, one out.
        """
        given, operations = operations, self.operations or operations or PLAIN
        delta = None
        for index, block in enumerate(self):
            change = changed_by_others(block)
            if delta is not None and (self.sums or change):
                x, delta = x + delta, None
            keep: dict[str, Any] = {} if keeps is None or change == "replaced" else {"keep": keeps[index]}
            run = block if cache is None else as_written(block)
            if not change:
                x, delta = run(x, cos_sin, firsts, cache, delta=delta, operations=operations, **keep)
            else:
                x = run(x, cos_sin, firsts, cache, **keep)
        if given is not None:
            return x, delta
        return x if delta is None else x + delta


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
        if (
            type(operations) is Operations
        ):  # they would write into delta, which a hook of the last block may keep
            return super().forward(x if delta is None else x + delta)
        return operations.add_rms_norm(x, delta, self.weight, self.eps)[1]


class Head(core.Head):
    """The last matrix, and the loss by the given operations."""

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, operations: Operations = PLAIN
    ) -> Tensor:
        if targets is None:
            return super().forward(hidden)
        return operations.linear_cross_entropy(hidden, self.weight, targets, slice_loss=self.slice_loss)


class TransformerLM(core.TransformerLM):
    """A decoder-only Transformer in the style of LLaMA, see `lmkit.core.model.TransformerLM`.

    >>> from lmkit.model import ModelConfig, TransformerLM
    >>> model = TransformerLM(ModelConfig(vocab_size=1000, context_length=64, d_model=96, num_heads=4))
    >>> ids = torch.randint(1000, (2, 64))
    >>> model(ids).shape
    torch.Size([2, 64, 1000])
    >>> loss = model.loss(ids[:, :-1], ids[:, 1:])

    Layers may be replaced. Hooks see what the core's layers take and return: one tensor in and out of a block.
    PEFT needs `target_modules` and no `task_type`.

    Args:
        config: the recipe's table `[model]` with `vocab_size` filled in.

    Attributes:
        operations: what runs around the matrix products on this device, in this dtype.

    Raises:
        ValueError: the configuration has no vocabulary size.
        UsageError: no attention kernel has this name, or the named operations do not run here.
    """

    Table, Stack, Block, Norm, LastLayer = Embedding, Layers, TransformerBlock, LastNorm, Head
    layers: Layers

    def __init__(self, config: ModelConfig, *, device: Device = None, dtype: DType = None) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self._arrange()

    def _arrange(self, moved: set[nn.Parameter] | None = None) -> None:
        place_side_by_side(self, moved)
        self.operations = choose_operations(self.config.operations, self.lm_head.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TransformerLM:
        # nn.Module calls this in .to(), .half() and .to_empty().
        places = {parameter: parameter.data_ptr() for parameter in self.parameters()}
        was_tied = self.is_tied
        super()._apply(fn, recurse)
        if was_tied and not self.is_tied:  # from the device "meta"
            self.tie_weights()
        # Parameters that stayed may lie in memory of an optimizer, as those of a `ShardedOptimizer` do.
        self._arrange({p for p in self.parameters() if places.get(p) != p.data_ptr()})
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, whose parameters were copied one by one
        place_side_by_side(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        was_tied = self.is_tied
        found = super().load_state_dict(state_dict, strict, assign)
        # New tensors, perhaps the first that are not on "meta"; also by a dict that was assigned to a model before.
        if assign or was_tied != self.is_tied:
            self.tie_weights()
            self.rope.to_empty(device=self.lm_head.weight.device)  # computes its table
            self._arrange()
        return found

    def hidden_states(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        operations = PLAIN if is_transformed() else self.operations
        ids, firsts = self.visible(ids)
        table = self.token_embeddings
        # (batch, seq, d_model); somebody may have replaced the table
        x = table(ids) if changed_by_others(table) == "replaced" else table(ids, operations)
        if cache is None:
            keeps = None
            checkpoints = self.config.activation_checkpointing != "none" and torch.is_grad_enabled()
            if checkpoints and not (is_transformed() or torch.compiler.is_exporting()):  # they allow no hooks
                keeps = self._keeps(x)
            cos_sin = self.rope(ids.shape[1])  # (seq, head_dim / 2, 2)
            run = partial(self.layers, x, cos_sin, firsts, keeps=keeps)
        else:
            cos_sin = self.rope.at(cache.positions(ids.shape[1]))  # (batch, seq, head_dim / 2, 2)
            run = partial(as_written(self.layers), x, cos_sin, firsts, cache)
        x, delta = (run(), None) if changed_by_others(self.layers) else run(operations=operations)
        if changed_by_others(self.ln_final):
            return self.ln_final(x if delta is None else x + delta)
        return self.ln_final(x, delta, operations)

    def _keeps(self, x: Tensor) -> Sequence[Keep]:
        """Return what each block keeps of x (batch, seq, d_model) for the backward pass."""
        device, operations = x.device.type, self.layers.operations or self.operations
        stream, compiled = x.element_size(), self.config.compile != "none"
        under_autocast = device != "meta" and torch.is_autocast_enabled(device)
        product = torch.get_autocast_dtype(device).itemsize if under_autocast else stream
        reuses_memory = OPERATIONS.facts(operations.name).reuses_memory
        form = Form(reuses_memory, device, stream=stream, product=product, compiled=compiled)
        return kept_by_layers(self.config, form, tokens=x.shape[0] * x.shape[1])

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        if changed_by_others(self.lm_head) == "replaced":
            return super().loss(ids, targets)
        hidden = self.hidden_states(ids)  # (batch, seq, d_model)
        with range_("loss"):
            return self.lm_head(hidden, targets, PLAIN if is_transformed() else self.operations)


def compile_model(
    model: TransformerLM, how: Literal["none", "block", "whole"], *, backend: str = "inductor"
) -> None:
    """Compile the model's layers and its loss in place, in the first call of each shape. State dicts keep names.

    Args:
        how: "block" compiles one block and uses it for all of them. "whole" compiles the stack of blocks as one
            graph, which fuses more; its first step takes longer with every layer.
    """
    if how == "none":
        return
    if model.config.operations in ("auto", "fused"):
        model.layers.operations = PLAIN  # the compiler fuses them itself
    if how == "block":
        model.layers.sums = True
        for block in model.layers:
            if are_plain(block):  # the compiler does not see that another block has other hooks
                block.compile(backend=backend)
    else:
        model.layers.compile(backend=backend)
    model.lm_head.slice_loss.compile(backend=backend)


# ---- Several linear layers of one input as one matrix product: q, k and v; gate and up
#
# Where the weights lie side by side in memory, the joined matrix is a view; elsewhere it is a copy. A layer that
# somebody replaced or hooked into is called by itself.


STRATEGIES = ("lmkit.", "torch.distributed.")
"""Packages whose hooks change no value, nor does a class that PyTorch's FSDP derives."""


def are_plain(*modules: nn.Module) -> bool:
    """Whether nobody replaced these modules or a part of them, or hooked into their calls."""
    if _has_any_global_hook():
        return False
    for module in modules:
        if (
            module._forward_pre_hooks
            or module._forward_hooks
            or module._backward_pre_hooks
            or module._backward_hooks
            or changed_by_others(module)
        ):
            return False
        for part in module._modules.values():
            if part is not None and not are_plain(part):
                return False
    return True


def changed_by_others(module: nn.Module) -> Literal["", "hooked", "replaced"]:
    """Return whether somebody hooked into the calls of this module, or it is of another class or has a `forward` of
    its own; its parts do not count. Hooks and classes of `STRATEGIES` do not count either."""
    if "forward" in module.__dict__ or not type(module).__module__.startswith(STRATEGIES):
        return "replaced"
    forward, backward = module._forward_hooks, module._backward_hooks
    if not (forward or backward or module._forward_pre_hooks or module._backward_pre_hooks):
        return ""
    hooks = [*forward.values(), *backward.values(), *module._forward_pre_hooks.values()]
    hooks += module._backward_pre_hooks.values()
    owners = (getattr(hook, "func", hook).__module__ or "" for hook in hooks)
    return "" if all(owner.startswith(STRATEGIES) for owner in owners) else "hooked"


def is_original(model: Any) -> bool:
    """Whether the weights of a `TransformerLM` tell all that it computes: nobody replaced a layer, added a bias, or
    hooked into a call, but for strategies."""
    around = model.token_embeddings, model.layers, model.ln_final, model.lm_head, *model.layers
    if any(map(changed_by_others, (model, *around))):
        return False
    for block in model.layers:
        if not are_plain(*block.children()):
            return False
        biased = block.attn.joined_layers() if model.config.qkv_bias else ()
        for layer in block.modules():
            if (getattr(layer, "bias", None) is not None) != (layer in biased):
                return False
    return True


def joined_product(x: Tensor, *layers: Linear) -> Tensor:
    """Return the outputs of linear layers one after the other: (..., in) -> (..., sum of out)."""
    weights, biases = [], []
    for layer in layers:
        weights.append(layer.weight)
        if layer.bias is not None:
            biases.append(layer.bias)
    weight = join(weights)
    if biases and len(biases) < len(layers):  # somebody replaced a layer by one with a bias
        biases = [weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in layers]
    return layers[0].product(x, weight, join(biases).to(weight.dtype) if biases else None)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return torch.cat(parts), without a copy if they lie side by side in memory. Differentiable."""
    if torch.compiler.is_compiling() or is_transformed() or not lie_side_by_side(parts):
        return torch.cat(list(parts))
    return SideBySide.apply(*parts)


def lie_side_by_side(parts: Sequence[Tensor]) -> bool:
    """Whether each contiguous tensor begins where the one before it ends, in the same memory."""
    first = parts[0]
    end = begin = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.dtype != first.dtype or not part.is_contiguous():
            return False
        end += part.nbytes
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    return begin != 0 and end - begin <= room


class SideBySide(torch.autograd.Function):
    """`apply(*parts)`: the joined tensor as a view; the gradient is cut into views."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = list(map(len, parts))
        first = parts[0].detach()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split_with_sizes(ctx.rows)


def joined_sets(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that are best placed side by side, in order."""
    for module in model.modules():
        layers: Any = module.joined_layers() if isinstance(module, SelfAttention | SwiGLU) else ()
        if {*map(type, layers)} == {Linear}:
            yield [layer.weight for layer in layers]
            if all(layer.bias is not None for layer in layers):
                yield [layer.bias for layer in layers]


@torch.no_grad()
def place_side_by_side(model: nn.Module, moved: set[nn.Parameter] | None = None) -> None:
    """Move parameters so that `join` needs no copy; only sets with a `moved` parameter, or all. Parameters without
    memory of their own stay."""
    for parameters in joined_sets(model):
        first = parameters[0]
        if moved is not None and moved.isdisjoint(parameters):
            continue
        kinds = {(x.dtype, x.device, x.is_contiguous()) for x in parameters}
        if first.is_meta or kinds != {(first.dtype, first.device, True)} or lie_side_by_side(parameters):
            continue
        together = torch.cat(list(parameters)).split(list(map(len, parameters)))
        for parameter, part in zip(parameters, together, strict=True):
            parameter.data = part


def in_order_of_memory(parameters: Sequence[nn.Parameter], model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order in which a flat tensor should hold them: sets of `joined_sets` together."""
    set_of = {parameter: members for members in joined_sets(model) for parameter in members}
    given, placed = set(parameters), dict[nn.Parameter, None]()
    for parameter in parameters:
        placed.update((x, None) for x in set_of.get(parameter, [parameter]) if x in given)
    return list(placed)


# ---- The names of parameters in checkpoints


def plain_name(name: str) -> str:
    """Return a parameter's name in checkpoints, without the prefixes of torch.compile and DDP.

    >>> plain_name("module._orig_mod.layers.0.ln1.weight")
    'layers.0.ln1.weight'
    """
    return re.sub(r"\b(_orig_mod|module)\.", "", name)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the plain name of every parameter, of a tied one the first."""
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}
