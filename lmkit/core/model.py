"""The language model: a decoder-only Transformer in the style of LLaMA (Touvron et al. 2023).

    x = embedding[ids]
    in each block:  x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    logits = norm(x) head^T

Norms are RMSNorm, positions rotate queries and keys (RoPE), attention is causal, the feed-forward network is SwiGLU.

Modules read the configuration by the names of a recipe's table `[model]`: vocab_size, context_length, d_model, d_ff,
num_layers, num_heads, kv_heads, head_dim, norm_eps, tie_embeddings, zero_init, rope_theta and rope_scaling..., and
the switches qkv_bias, qk_norm, attention_window (`window(layer)`) and separate_documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.core.attention import first_in_document, first_in_window, reference
from lmkit.core.autograd import differentiable_once, is_transformed
from lmkit.core.kv_cache import KVCache
from lmkit.core.loss import SliceLoss, cross_entropy, linear_cross_entropy
from lmkit.core.ranges import range_

INITIAL_POSITIONS = 1 << 17
"""Positions of a table before it grows: 64 MiB with 128 channels."""
PIECE = 1 << 25
"""Elements of a weight whose initial values are drawn at a time."""


class Firsts(NamedTuple):
    """The first token that each token sees, (batch or 1, seq) int32, in layers without and with a window.

    None: each token sees all earlier ones.
    """

    without_window: Tensor | None = None
    with_window: Tensor | None = None


ALL_EARLIER = Firsts()


class Linear(nn.Linear):
    """y = x W^T + b; W is `weight` (out_features, in_features), b is `bias` (out_features) if there is one.

    Weights start from a normal distribution of variance 2 / (in + out) (Glorot and Bengio 2010, eq. 12), which keeps
    the scale of signals forwards and of gradients backwards, cut at three standard deviations; or from zeros. Biases
    start from zeros.

    Attributes:
        product: computes (x, weight, bias) -> y; training in fp8 sets another.
    """

    product: Callable[..., Tensor] = staticmethod(F.linear)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        zeros: bool = False,
        **factory_kwargs: Any,
    ) -> None:
        self.zeros = zeros  # before the weights, which are drawn where PyTorch's class makes them
        super().__init__(in_features, out_features, bias=bias, **factory_kwargs)

    def reset_parameters(self) -> None:
        """Draw new weights from torch's default generator; set the bias to zero."""
        for rows in () if self.weight.is_meta else pieces(self.weight):
            self.draw_rows(rows)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def draw_rows(self, rows: Tensor) -> None:
        """Draw the first values of the next rows of the weight, (number, in_features), in place."""
        std = 0.0 if self.zeros else (2 / sum(self.weight.shape)) ** 0.5
        if std:
            nn.init.trunc_normal_(rows, std=std, a=-3 * std, b=3 * std)
        else:
            nn.init.zeros_(rows)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        # A model of bf16 matrices keeps biases in float32.
        return self.product(x, self.weight, None if self.bias is None else self.bias.to(self.weight.dtype))


def pieces(weight: Tensor) -> tuple[Tensor, ...]:
    """Return a weight's rows in order, as views of at most `PIECE` elements, or of one row.

    First values are drawn piece by piece, so that a sharded weight gets the same values without ever being whole.
    """
    return weight.detach().split(max(1, PIECE // weight.shape[1]))


class Embedding(nn.Module):
    """Row `id` of `weight` (vocab_size, d_model) for each id.

    Weights start from a standard normal distribution cut at three standard deviations, so that the residual stream
    starts at the unit scale to which every RMSNorm returns it: embeddings that are small against the output of the
    blocks make training unstable (Takase et al. 2023, "Spike No More").
    """

    def __init__(self, vocab_size: int, d_model: int, **factory_kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, **factory_kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors from torch's default generator."""
        for rows in () if self.weight.is_meta else pieces(self.weight):
            self.draw_rows(rows)

    def draw_rows(self, rows: Tensor) -> None:
        """Draw the next vectors, (number, d_model), in place."""
        nn.init.trunc_normal_(rows, std=1.0, a=-3.0, b=3.0)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, seq) -> (batch, seq, d_model)"""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last dimension (Zhang and Sennrich 2019, eq. 4), in the dtype
    of x: (..., d_model) -> (..., d_model).

    Statistics are computed in float32 (float64 for float64 inputs) whatever the dtype of x.
    """
    if x.device.type in ("cpu", "meta") and not torch.compiler.is_compiling() and not is_transformed():
        # PyTorch fuses this on CUDA, and its compiler fuses it everywhere. Eager on a CPU, it runs a chain of
        # about twenty operations, which is slower than the eight of `RMSNormOnCPU`.
        return RMSNormOnCPU.apply(x, gain, eps)[0]
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), eps)


class RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm with its gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # (..., 1)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # (..., 1)
        unit = x * inverse_rms  # (..., d_model)
        # `differentiable_once` needs an output among the saved tensors; the result may be written to in place.
        empty = x.new_empty(0)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of `empty`
        ctx.save_for_backward(unit, inverse_rms, gain, empty)
        return (unit * gain).to(x.dtype), empty

    @staticmethod
    @differentiable_once("RMSNorm on a CPU", instead="torch.nn.functional.rms_norm has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        # y = w u with u = x r and r = (mean(x^2) + eps)^-1/2, hence du/dx = r (1 - u u^T / d).
        unit, inverse_rms, gain = saved[:3]
        product = grad * unit  # (..., d_model)
        grad_gain = product.reshape(-1, product.shape[-1]).sum(dim=0)  # (d_model)
        along_unit = (product @ gain.to(product.dtype)).unsqueeze(-1) / unit.shape[-1]  # (..., 1)
        grad_x = torch.addcmul(grad * gain, unit, along_unit, value=-1).mul_(inverse_rms)  # (..., d_model)
        return grad_x.to(grad.dtype), grad_gain.to(gain.dtype), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, see `rms_norm`."""

    def __init__(self, d_model: int, *, eps: float = 1e-5, **factory_kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, **factory_kwargs))

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)"""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def scale_frequencies(config: Any, frequencies: Tensor) -> Tensor:
    """Reduce frequencies as `rope_scaling` says; radians per position in and out, any shape.

    "linear" divides all of them by `rope_factor` (Chen et al. 2023, "Extending Context Window of Large Language
    Models via Position Interpolation"). "llama3" leaves a share of each as it is, which grows from 0 to 1 with the
    number of turns in the original context (Llama 3.1; `apply_scaling` of its reference code).

    Args:
        config: has the keys `rope_scaling`, `rope_factor`, `rope_low_freq_factor`, `rope_high_freq_factor` and
            `rope_original_context` of a recipe's table [model].

    Raises:
        ValueError: `rope_scaling` has another name.
    """
    if config.rope_scaling == "none":
        return frequencies
    kept = torch.zeros_like(frequencies)
    if config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = config.rope_original_context * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    elif config.rope_scaling != "linear":
        raise ValueError(f"rope_scaling must be none, linear or llama3, got {config.rope_scaling}")
    return frequencies * ((1 - kept) / config.rope_factor + kept)


class RotaryEmbedding(nn.Module):
    """A table of cosines and sines of every position and pair of channels (Su et al. 2021, eq. 15).

    `cos_sin[p, i] = (cos(a), sin(a))` with the angle `a = p theta^(-2i / head_dim)`, shape
    (positions, head_dim / 2, 2), float32. `scale` changes the angles per position. The table begins with
    min(context_length, `INITIAL_POSITIONS`) positions; `reserve` adds more.

    One table serves all layers. Checkpoints do not contain it, and it stays in float32 when the model is cast to a
    narrower type: bfloat16 cannot tell positions beyond 256 from their neighbours.

    >>> rope = RotaryEmbedding(head_dim=64, context_length=256)
    >>> q = torch.randn(2, 10, 4, 64)  # (batch, seq, heads, head_dim)
    >>> apply_rope(q, rope(10)).shape
    torch.Size([2, 10, 4, 64])
    """

    cos_sin: Tensor

    def __init__(
        self,
        *,
        head_dim: int,
        context_length: int,
        theta: float = 10_000.0,
        scale: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} is odd: RoPE rotates pairs of channels")
        self.head_dim = head_dim
        self.context_length = context_length
        self.theta = theta
        self.scale = scale
        positions = min(context_length, INITIAL_POSITIONS)
        if device is not None and torch.device(device).type == "meta":
            table = torch.empty(positions, head_dim // 2, 2, device="meta")
        else:
            # A default device of "meta" defers the weights. Loading them does not load this table.
            default = torch.get_default_device()
            table = self._compute(0, positions).to(device or ("cpu" if default.type == "meta" else default))
        self.register_buffer("cos_sin", table, persistent=False)

    def _compute(self, begin: int, end: int) -> Tensor:
        # In float64: a float32 angle of 100,000 radians is off by 0.004.
        positions = torch.arange(begin, end, dtype=torch.float64, device="cpu")
        channels = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        # Radians per position of each pair, (head_dim / 2)
        frequencies = self.theta ** (-channels / self.head_dim)
        if self.scale is not None:
            frequencies = self.scale(frequencies)
        angles = torch.outer(positions, frequencies)  # (positions, head_dim / 2)
        return torch.stack((angles.cos(), angles.sin()), dim=-1).float()  # (positions, head_dim / 2, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # nn.Module calls this in .to(), .half() and .to_empty(): follow the device, ignore the dtype.
        super()._apply(fn, recurse)
        self.cos_sin = self._compute(0, len(self.cos_sin)).to(self.cos_sin.device)
        return self

    def reserve(self, seq: int) -> None:
        """Extend the table to `seq` positions. A longer table has new memory: call this with the longest sequence
        before a CUDA graph reads the table.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        if seq > self.context_length:
            raise ValueError(
                f"a sequence of {seq} tokens is longer than the context of {self.context_length}"
            )
        if seq <= len(self.cos_sin):
            return
        size = min(max(seq, 2 * len(self.cos_sin)), self.context_length)
        starts = range(len(self.cos_sin), size, INITIAL_POSITIONS)
        with torch.inference_mode(False):  # training may read the table later
            parts = [self._compute(start, min(start + INITIAL_POSITIONS, size)) for start in starts]
            self.cos_sin = torch.cat([self.cos_sin, *(part.to(self.cos_sin.device) for part in parts)])

    def forward(self, seq: int) -> Tensor:
        """Return cosines and sines of the positions 0 ... seq - 1, (seq, head_dim / 2, 2).

        Raises:
            ValueError: the sequence is longer than the context.
        """
        if seq > len(self.cos_sin):
            self.reserve(seq)
        return self.cos_sin[:seq]

    def at(self, positions: Tensor) -> Tensor:
        """Return cosines and sines of positions that are reserved: (...) -> (..., head_dim / 2, 2)."""
        return self.cos_sin[positions]


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels (2i, 2i + 1) of x by the angle of its position.

    Args:
        x: (batch, seq, heads, head_dim), any strides.
        cos_sin: of each position and pair, (seq, head_dim / 2, 2) or (batch, seq, head_dim / 2, 2).

    Returns:
        A tensor of x's shape and dtype, computed in float32 or wider.
    """
    cos_sin = cos_sin.unsqueeze(-3)  # (..., seq, 1, head_dim / 2, 2)
    # (batch, seq, heads, head_dim / 2, 2)
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    *strides, last = pairs.stride()
    # `view_as_complex` needs an even offset and even strides. The compiler fuses real arithmetic, and no complex one.
    if torch.compiler.is_compiling() or last != 1 or math.gcd(pairs.storage_offset(), *strides) % 2:
        even, odd = pairs.unbind(-1)  # (batch, seq, heads, head_dim / 2)
        cos, sin = cos_sin.unbind(-1)  # (..., seq, 1, head_dim / 2)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        # A rotation of the plane is a complex product, which passes over memory once instead of seven times.
        product = torch.view_as_complex(pairs) * torch.view_as_complex(cos_sin.to(pairs.dtype))
        rotated = torch.view_as_real(product)  # (batch, seq, heads, head_dim / 2, 2)
    return rotated.flatten(-2).to(x.dtype)  # (batch, seq, heads, head_dim)


def rotate_joint(qkv: Tensor, cos_sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys of a projection q|k|v in one pass.

    Args:
        qkv: (batch, seq, (heads + 2 kv_heads) * head_dim).
        cos_sin: of the positions, see `apply_rope`.

    Returns:
        q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim).
    """
    heads = qkv.unflatten(-1, (-1, 2 * cos_sin.shape[-2]))  # (batch, seq, heads + 2 kv_heads, head_dim)
    qk, v = heads.split((heads.shape[2] - kv_heads, kv_heads), dim=2)
    q, k = apply_rope(qk, cos_sin).split((qk.shape[2] - kv_heads, kv_heads), dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions and, where the configuration says so, fewer key/value heads
    than query heads (grouped-query attention, Ainslie et al. 2023).

    Args:
        layer: counts from 0.

    Attributes:
        attention: computes (q, k, v, causal=, first=) -> out, see `lmkit.core.attention`.
        window: how many tokens a token sees, itself among them; None: all earlier ones.
    """

    attention = staticmethod(reference)

    def __init__(self, config: Any, layer: int = 0, **factory_kwargs: Any) -> None:
        super().__init__()
        d_model, d_kv = config.d_model, config.kv_heads * config.head_dim
        d_q = config.num_heads * config.head_dim
        self.layer, self.window = layer, config.window(layer)
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.q_proj = Linear(d_model, d_q, bias=config.qkv_bias, **factory_kwargs)
        self.k_proj = Linear(d_model, d_kv, bias=config.qkv_bias, **factory_kwargs)
        self.v_proj = Linear(d_model, d_kv, bias=config.qkv_bias, **factory_kwargs)
        self.output_proj = Linear(d_q, d_model, zeros=config.zero_init, **factory_kwargs)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps, **factory_kwargs)
            self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps, **factory_kwargs)

    def forward(
        self, x: Tensor, cos_sin: Tensor, firsts: Firsts = ALL_EARLIER, cache: KVCache | None = None
    ) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)

        Args:
            cos_sin: of the positions, see `apply_rope`.
            firsts: the first token that each token sees.
            cache: holds the keys and values of earlier tokens.
        """
        q, k, v = self.heads(x, cos_sin)
        return self.output_proj(self.attend(q, k, v, firsts, cache))

    def heads(self, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q (batch, heads, seq, head_dim) and k, and v (batch, kv_heads, seq, head_dim)."""
        shape = -1, self.head_dim  # (batch, seq, heads, head_dim)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = q.unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, firsts: Firsts, cache: KVCache | None = None) -> Tensor:
        """Return (batch, seq, heads * head_dim): the attention of q (batch, heads, seq, head_dim), k and v."""
        first = firsts.without_window if self.window is None else firsts.with_window
        with range_("attention"):
            if cache is not None:
                out = cache.attend(self.layer, q, k, v)
            elif first is None:
                out = self.attention(q, k, v, causal=True)
            else:  # some kernels have no argument `first`
                out = self.attention(q, k, v, causal=True, first=first)
        return out.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """The feed-forward network W2 (silu(W1 x) * W3 x) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6,
    without biases). `zeros`: W2 starts from zeros."""

    def __init__(self, d_model: int, d_ff: int, *, zeros: bool = False, **factory_kwargs: Any) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, **factory_kwargs)
        self.w2 = Linear(d_ff, d_model, zeros=zeros, **factory_kwargs)
        self.w3 = Linear(d_model, d_ff, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)"""
        gate, up = self.project(x)  # (..., d_ff)
        return self.w2(F.silu(gate) * up)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return W1 x and W3 x, (..., d_ff)."""
        return self.w1(x), self.w3(x)


class TransformerBlock(nn.Module):
    """Pre-norm residual layer (Xiong et al. 2020): x + attn(ln1(x)), then x + ffn(ln2(x))."""

    Attention: type[SelfAttention] = SelfAttention
    FeedForward: type[SwiGLU] = SwiGLU

    def __init__(self, config: Any, layer: int = 0, **factory_kwargs: Any) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, eps=config.norm_eps, **factory_kwargs)
        self.attn = self.Attention(config, layer, **factory_kwargs)
        self.ln2 = RMSNorm(config.d_model, eps=config.norm_eps, **factory_kwargs)
        self.ffn = self.FeedForward(config.d_model, config.d_ff, zeros=config.zero_init, **factory_kwargs)

    def forward(
        self, x: Tensor, cos_sin: Tensor, firsts: Firsts = ALL_EARLIER, cache: KVCache | None = None
    ) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model). The arguments are those of `SelfAttention`."""
        x = x + self.attn(self.ln1(x), cos_sin, firsts, cache)
        return x + self.ffn(self.ln2(x))


class Layers(nn.ModuleList):
    """The stack of blocks."""

    def forward(self, x: Tensor, cos_sin: Tensor, firsts: Firsts, cache: KVCache | None = None) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model). The arguments are those of `SelfAttention`."""
        for block in self:
            x = block(x, cos_sin, firsts, cache)
        return x


class Head(Linear):
    """The last matrix, (vocab_size, d_model), and the loss.

    The loss is computed in this layer's call, so that hooks of the layer run before its weight is read.
    """

    def __init__(self, d_model: int, vocab_size: int, **factory_kwargs: Any) -> None:
        super().__init__(d_model, vocab_size, **factory_kwargs)
        self.slice_loss = SliceLoss()

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits (..., vocab_size) of hidden states (..., d_model), or with `targets` (...) their mean
        cross-entropy in nats, for which the logits are never held all at once (see `linear_cross_entropy`)."""
        if targets is None:
            return F.linear(hidden, self.weight)
        return linear_cross_entropy(hidden, self.weight, targets, slice_loss=self.slice_loss)


class TransformerLM(nn.Module):
    """The whole model.

    Parameters draw their first values from torch's default generator. With `tie_embeddings` the head's matrix is the
    embedding (Press and Wolf 2017), initialised as a head, which is smaller.

    Args:
        factory_kwargs: `device` and `dtype` of the parameters.

    Raises:
        ValueError: the configuration has no vocabulary size.
    """

    # Classes that `lmkit.model` replaces by its own
    Table: type[Embedding] = Embedding
    Stack: type[Layers] = Layers
    Block: type[TransformerBlock] = TransformerBlock
    Norm: type[RMSNorm] = RMSNorm
    LastLayer: type[Head] = Head

    def __init__(self, config: Any, **factory_kwargs: Any) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: the tokenizer decides it")
        self.config = config
        self.token_embeddings = self.Table(config.vocab_size, config.d_model, **factory_kwargs)
        self.layers = self.Stack(
            [self.Block(config, layer, **factory_kwargs) for layer in range(config.num_layers)]
        )
        self.ln_final = self.Norm(config.d_model, eps=config.norm_eps, **factory_kwargs)
        self.lm_head = self.LastLayer(config.d_model, config.vocab_size, **factory_kwargs)
        self.tie_weights()
        self.rope = RotaryEmbedding(
            head_dim=config.head_dim,
            context_length=config.context_length,
            theta=config.rope_theta,
            scale=partial(scale_frequencies, config),
            device=factory_kwargs.get("device"),
        )

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return self.lm_head.weight is self.token_embeddings.weight

    def tie_weights(self) -> None:
        """Make the head's matrix the embedding, too, if the configuration says so."""
        if self.config.tie_embeddings:
            self.token_embeddings.weight = self.lm_head.weight  # type: ignore[assignment]

    def hidden_states(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the normalised input of the head: (batch, seq) ids -> (batch, seq, d_model).

        With `separate_documents`, a negative id ~t is the token t, usually end-of-text, after which a document
        begins. The attention of t and of that document's tokens starts at t. With a cache, documents are not
        separated.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        ids, firsts = self.visible(ids)
        x = self.token_embeddings(ids)  # (batch, seq, d_model)
        seq = ids.shape[1]
        # (seq, head_dim / 2, 2), or with a cache (batch, seq, head_dim / 2, 2)
        cos_sin = self.rope(seq) if cache is None else self.rope.at(cache.positions(seq))
        return self.ln_final(self.layers(x, cos_sin, firsts, cache))

    def visible(self, ids: Tensor) -> tuple[Tensor, Firsts]:
        """Return the ids without the marks of documents, and the first token that each of them sees.

        RoPE needs nothing: attention depends on the distance of two positions only, and those of a document are as
        far apart as if it stood alone.
        """
        first = in_window = None
        if self.config.separate_documents:
            begins = ids < 0
            first = in_window = first_in_document(begins)
            ids = torch.where(begins, ~ids, ids)
        if self.config.attention_window is not None:
            in_window = first_in_window(self.config.attention_window, ids.shape[1], ids.device)
            if first is not None and in_window is not None:
                in_window = torch.maximum(first, in_window)
        return ids, Firsts(first, in_window)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the logits of the token after each position: (batch, seq) -> (batch, seq, vocab_size).

        Args:
            cache: holds the tokens before `ids`; takes `ids` in.
        """
        return self.lm_head(self.hidden_states(ids, cache))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the targets in nats per token, a float32 scalar.

        The call of the head returns it: hooks of the head see this loss, not logits.

        Args:
            ids: (batch, seq)
            targets: (batch, seq), the token that follows each of `ids`.
        """
        hidden = self.hidden_states(ids)  # (batch, seq, d_model)
        with range_("loss"):
            if isinstance(self.lm_head, Head):
                return self.lm_head(hidden, targets)
            logits = self.lm_head(hidden)  # (batch, seq, vocab_size), of a layer that replaced it
            return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
