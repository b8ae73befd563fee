"""From hidden states to the vocabulary: logits, or straight to the loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lmkit.model.linear import Linear
from lmkit.model.loss import SliceLoss, cross_entropy_slice, linear_cross_entropy


class Head(Linear):
    """The last matrix, (vocab_size, d_model).

    The loss is a call of this layer too, so that whatever waits in front of a layer for its weights (hooks of
    `lmkit.parallel`) finds the head where it is needed, and not before.
    """

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, slice_loss: SliceLoss = cross_entropy_slice
    ) -> Tensor:
        """Logits (..., vocab_size) of hidden states (..., d_model); with `targets` (...) their mean cross-entropy in
        nats instead, without ever holding all logits (see `linear_cross_entropy`)."""
        if targets is None:
            return F.linear(hidden, self.weight)
        return linear_cross_entropy(hidden, self.weight, targets, slice_loss=slice_loss)
