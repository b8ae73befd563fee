"""Layers without positions: Linear (and several joined), Embedding, RMSNorm, SwiGLU, the head; softmax and silu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.core.loss import SliceLoss
from lmkit.model.operations import PLAIN, Operations, rms_norm

Device = torch.device | str | None
DType = torch.dtype | None
Product = Callable[..., Tensor]

PIECE = 1 << 25
"""Elements of a weight whose first values are drawn at a time."""


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`. The maximum is subtracted first, so that exp cannot overflow.

    >>> softmax(torch.tensor([1000.0, 1000.0]))
    tensor([0.5000, 0.5000])
    """
    exp = (x - x.amax(dim=dim, keepdim=True)).exp()
    return exp / exp.sum(dim=dim, keepdim=True)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), element by element (Elfwing et al. 2018).

    >>> silu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7311])
    """
    return x * torch.sigmoid(x)


class Linear(nn.Module):
    """y = x W^T, without bias; W is `weight` (out_features, in_features).

    Weights start from a normal distribution of variance 2 / (in + out) (Glorot and Bengio 2010, eq. 12), which keeps
    the scale of signals forwards and of gradients backwards, cut at three standard deviations; or from zeros.

    Attributes:
        product: computes (x, weight) -> x W^T, see `lmkit.model.fp8`.
    """

    product: Product = staticmethod(F.linear)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        zeros: bool = False,
        device: Device = None,
        dtype: DType = None,
    ) -> None:
        super().__init__()
        self.zeros = zeros
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights from torch's default generator."""
        for rows in pieces(self.weight):
            self.draw_rows(rows)

    def draw_rows(self, rows: Tensor) -> None:
        """Draw the first values of the next rows of the weight, (number, in_features), in place."""
        if self.zeros:
            nn.init.zeros_(rows)
        else:
            _draw_rows(rows, self.in_features + self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        return self.product(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


def pieces(weight: Tensor) -> tuple[Tensor, ...]:
    """Return a weight's rows in order, as views of at most `PIECE` elements, or of one row.

    First values are drawn piece by piece, so that a sharded weight gets the same values without ever being whole.
    """
    return weight.detach().split(max(1, PIECE // weight.shape[1]))


def _draw_rows(rows: Tensor, features: int) -> None:
    """Draw the first values of rows of a linear map, in place. `features`: in and out together."""
    std = (2 / features) ** 0.5
    nn.init.trunc_normal_(rows, std=std, a=-3 * std, b=3 * std)


class JoinedLinear(nn.Module):
    """Several linear layers of one input as one: their weights lie one above the other in `weight`, one parameter.

    One matrix product, `product` as of `Linear`, instead of several. `part` makes the layers' names: they, not this
    module, are in state dicts and draw the first values. With `bias`, each layer adds one, which starts from zeros.

    >>> class Gates(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.joined = JoinedLinear(4, 2 + 3)
    ...         self.a, self.b = self.joined.part(2), self.joined.part(3)
    >>> {name: tuple(weight.shape) for name, weight in Gates().state_dict().items()}
    {'a.weight': (2, 4), 'b.weight': (3, 4)}
    """

    product: Product = staticmethod(F.linear)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        device: Device = None,
        dtype: DType = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self._named_rows = 0

    def part(self, rows: int) -> Part:
        """Return a name for the next `rows` rows; draw their first values. Call it for all rows."""
        start, self._named_rows = self._named_rows, self._named_rows + rows
        return Part(self, slice(start, self._named_rows))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        if self.bias is None:
            return self.product(x, self.weight)
        # bf16 matrices have float32 biases.
        return self.product(x, self.weight, self.bias.to(self.weight.dtype))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"

    def _save_to_state_dict(self, *args: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


class Part(nn.Module):
    """A name for some rows of a `JoinedLinear`, which makes them look like a `Linear`. It has no parameters."""

    def __init__(self, joined: JoinedLinear, rows: slice) -> None:
        super().__init__()
        self._owner = (joined,)  # not as a child, which would list its parameter twice
        self.rows = rows
        self.reset_parameters()

    @property
    def joined(self) -> JoinedLinear:
        return self._owner[0]

    @property
    def weight(self) -> Tensor:
        """(rows, in_features), a view."""
        return self.joined.weight[self.rows]

    def named_views(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return "weight", and "bias" if there is one -> the joined parameter and this layer's view of it."""
        views = {"weight": (self.joined.weight, self.weight)}
        if self.joined.bias is not None:
            views["bias"] = (self.joined.bias, self.joined.bias[self.rows])
        return views

    def reset_parameters(self) -> None:
        """Draw new weights from torch's default generator; set biases to zero."""
        for rows in pieces(self.weight):
            _draw_rows(rows, sum(self.weight.shape))
        if self.joined.bias is not None:
            self.joined.bias.detach()[self.rows].zero_()

    def extra_repr(self) -> str:
        return f"rows {self.rows.start} to {self.rows.stop - 1}"

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for name, (_, view) in self.named_views().items():
            destination[prefix + name] = view if keep_vars else view.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for key, (_, view) in self.named_views().items():
            name, own = prefix + key, view.detach()
            if name not in state_dict:
                missing_keys.append(name)
            elif state_dict[name].shape != own.shape:
                error_msgs.append(f"{name}: {tuple(state_dict[name].shape)} does not fit {tuple(own.shape)}")
            else:
                with torch.no_grad():
                    own.copy_(state_dict[name])


def linear_maps(blocks: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """Return, for the matrix of every `Linear` and `JoinedLinear`, the rows of the linear maps that lie in it."""
    maps: dict[Tensor, tuple[int, ...]] = {}
    for module in blocks.modules():
        if isinstance(module, Linear):
            maps[module.weight] = (module.out_features,)
        elif isinstance(module, Part):
            weight = module.joined.weight
            maps[weight] = (*maps.get(weight, ()), module.rows.stop - module.rows.start)
    return maps


class Embedding(nn.Module):
    """Row `id` of `weight` (vocab_size, d_model) for each id.

    Weights start from a standard normal distribution cut at three standard deviations, so that the residual stream
    starts at the unit scale to which every RMSNorm returns it: embeddings that are small against the output of the
    blocks make training unstable (Takase et al. 2023, "Spike No More").
    """

    def __init__(self, vocab_size: int, d_model: int, *, device: Device = None, dtype: DType = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors from torch's default generator."""
        for rows in pieces(self.weight):
            self.draw_rows(rows)

    def draw_rows(self, rows: Tensor) -> None:
        """Draw the next vectors, (number, d_model), in place."""
        nn.init.trunc_normal_(rows, std=1.0, a=-3.0, b=3.0)

    def forward(self, ids: Tensor, operations: Operations = PLAIN) -> Tensor:
        """(batch, seq) -> (batch, seq, d_model)"""
        return operations.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class SwiGLU(nn.Module):
    """The feed-forward network W2 (silu(W1 x) * W3 x) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6,
    without biases). `zeros`: W2 starts from zeros.

    Attributes:
        casts: whether the products around the activation are in fp8.
    """

    casts = False

    def __init__(
        self, d_model: int, d_ff: int, *, zeros: bool = False, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__()
        self.gate_up = JoinedLinear(d_model, 2 * d_ff, device=device, dtype=dtype)
        self.w1 = self.gate_up.part(d_ff)
        self.w2 = Linear(d_ff, d_model, zeros=zeros, device=device, dtype=dtype)
        self.w3 = self.gate_up.part(d_ff)

    def forward(self, x: Tensor, operations: Operations = PLAIN) -> Tensor:
        """(..., d_model) -> (..., d_model)"""
        return self.contract(self.expand(x), operations)

    def expand(self, x: Tensor) -> Tensor:
        """Return W1 x and W3 x, (..., 2 d_ff)."""
        return self.gate_up(x)

    def contract(self, expanded: Tensor, operations: Operations) -> Tensor:
        """Return the output of what `expand` returned, which may be overwritten."""
        return self.w2(operations.swiglu(expanded, casts=self.casts))  # (..., d_model)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Statistics are computed in float32 (float64 for float64 inputs) whatever the dtype of x; the result has x's dtype.
    """

    def __init__(
        self, d_model: int, *, eps: float = 1e-5, device: Device = None, dtype: DType = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)"""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class AddRMSNorm(RMSNorm):
    """Add a layer's output to the residual stream and normalise the sum (see `RMSNorm`)."""

    def forward(  # type: ignore[override]
        self, x: Tensor, delta: Tensor | None, operations: Operations = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """Return (x + delta, its norm), both shaped as x, (..., d_model).

        Args:
            delta: may be overwritten; None adds nothing.
        """
        return operations.add_rms_norm(x, delta, self.weight, self.eps)


class Head(Linear):
    """The last matrix, (vocab_size, d_model), and the loss.

    The loss is computed inside this layer's call because `lmkit.parallel` gathers a layer's weights in a pre-forward
    hook: a loss that read `lm_head.weight` from outside would need it before the first layer runs.
    """

    def __init__(self, d_model: int, vocab_size: int, *, device: Device = None, dtype: DType = None) -> None:
        super().__init__(d_model, vocab_size, device=device, dtype=dtype)
        self.slice_loss = SliceLoss()

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, operations: Operations = PLAIN
    ) -> Tensor:
        """Return the logits (..., vocab_size) of hidden states (..., d_model), or with `targets` (...) their mean
        cross-entropy in nats, for which the logits are never held all at once (see `linear_cross_entropy`)."""
        if targets is None:
            return F.linear(hidden, self.weight)
        return operations.linear_cross_entropy(hidden, self.weight, targets, self.slice_loss)
