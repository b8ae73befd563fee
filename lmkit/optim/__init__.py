"""Optimizers, learning-rate schedules and gradient clipping.

from lmkit.optim import AdamW, clip_gradients, cosine_lr
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "AdamW": "adamw",
        "decay_groups": "lmkit.core.adamw",
        "HostAdamW": "host",
        "Muon": "muon",
        "orthogonalize": "muon",
        "clip_gradients": "lmkit.core.step",
        "clip_for": "lmkit.core.step",
        "gradient_norm": "lmkit.core.step",
        "cosine_lr": "lmkit.core.schedule",
        "linear_lr": "lmkit.core.schedule",
        "constant_lr": "lmkit.core.schedule",
        "wsd_lr": "lmkit.core.schedule",
    },
)
