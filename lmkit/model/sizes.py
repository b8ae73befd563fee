"""Models by name."""

from __future__ import annotations

from typing import Any

from lmkit.errors import UsageError
from lmkit.recipe.model import PRESETS, ModelConfig

__all__ = ["PRESETS", "preset_config"]


def preset_config(name: str, *, vocab_size: int, context_length: int, **changes: Any) -> ModelConfig:
    """The configuration of a named size, with further fields of `ModelConfig` as keywords.

    Raises:
        UsageError: no size of that name.
    """
    if name not in PRESETS:
        raise UsageError(f"no model size is called {name!r}", hint="there are: " + ", ".join(PRESETS))
    fields: dict[str, Any] = {
        **PRESETS[name],
        "vocab_size": vocab_size,
        "context_length": context_length,
        **changes,
    }
    return ModelConfig(**fields)
