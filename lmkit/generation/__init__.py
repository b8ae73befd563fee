"""Generate text from a trained model: prompts in a queue, steps of several texts, streaming."""

from typing import TYPE_CHECKING

from lmkit.lazy import exports

if TYPE_CHECKING:  # a type checker would take the file of the same name
    from lmkit.generation.generate import generate as generate

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "generate": "generate",
        "generate_tokens": "generate",
        "Generation": "generate",
        "GenerateConfig": "generate",
        "TextStream": "generate",
        "Drawn": "generate",
        "Interrupted": "generate",
        "write_samples": "generate",
        "Decoder": "decoder",
        "KVCache": "decoder",
        "Sampling": "decoder",
    },
)
