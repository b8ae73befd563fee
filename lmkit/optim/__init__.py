"""Optimizers, learning-rate schedules and gradient clipping.

from lmkit.optim import AdamW, clip_gradients, cosine_lr
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "adamw": ("AdamW",),
        "lmkit.core.adamw": ("decay_groups",),
        "host": ("HostAdamW",),
        "muon": ("Muon", "orthogonalize"),
        "lmkit.core.step": ("clip_gradients", "clip_for", "gradient_norm"),
        "lmkit.core.schedule": ("cosine_lr", "linear_lr", "constant_lr", "wsd_lr"),
    },
)
