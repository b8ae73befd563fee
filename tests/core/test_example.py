"""The training loop in the docstring of `lmkit.core` runs as it stands, with fewer steps."""

import textwrap

import numpy as np
import torch

from lmkit import core
from lmkit.core.adamw import AdamW, decay_groups
from lmkit.core.batches import TokenBatches
from lmkit.core.model import TransformerLM
from lmkit.core.schedule import cosine_lr
from lmkit.core.step import Step, Sync
from lmkit.recipe.tables import ModelConfig

SIZES = {"vocab_size": 7, "context_length": 256, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def test_the_loop_trains():
    _, _, rest = core.__doc__.partition("\n\n    batches = ")
    loop = textwrap.dedent("    batches = " + rest.partition("\n\n")[0])
    torch.manual_seed(0)
    losses = {}
    names = {"tokens": np.arange(3000) % 7, "config": ModelConfig(**SIZES), "losses": losses}
    for used in (AdamW, Step, Sync, TokenBatches, TransformerLM, cosine_lr, decay_groups):
        names[used.__name__] = used
    assert "range(1000)" in loop
    assert "warmup_steps=100" in loop
    loop = loop.replace("range(1000)", "range(8)").replace("warmup_steps=100", "warmup_steps=1")
    exec(loop.replace("    loss = step", "    loss = losses[i] = step"), names)
    assert len(losses) == 8
    assert losses[7] < losses[0]
