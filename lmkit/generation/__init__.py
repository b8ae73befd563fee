"""Generate text from a trained model: prompts in a queue, steps of several texts, streaming."""

from typing import TYPE_CHECKING

from lmkit.lazy import exports

if TYPE_CHECKING:  # a type checker would take the file of the same name
    from lmkit.generation.generate import generate as generate

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "generate": (
            *("generate", "generate_tokens", "Generation", "GenerateConfig"),
            *("TextStream", "Drawn", "Interrupted", "write_samples"),
        ),
        "decoder": ("Decoder", "KVCache", "Sampling"),
    },
)
