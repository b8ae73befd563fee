"""Optimizers, learning-rate schedules and gradient clipping.

from lmkit.optim import AdamW, clip_gradients, cosine_lr
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "AdamW": "adamw",
        "decay_groups": "adamw",
        "HostAdamW": "host",
        "Muon": "muon",
        "orthogonalize": "muon",
        "clip_gradients": "clipping",
        "clip_for": "clipping",
        "gradient_norm": "clipping",
        "cosine_lr": "learning_rate",
        "linear_lr": "learning_rate",
        "constant_lr": "learning_rate",
        "wsd_lr": "learning_rate",
    },
)
