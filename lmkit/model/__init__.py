"""The Transformer language model: `lmkit.core.model` is all of it; `transformer` adds kernels and recomputation.

from lmkit.model import ModelConfig, TransformerLM

model = TransformerLM(ModelConfig(vocab_size=1000))
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "TransformerLM": "transformer",
        "TransformerBlock": "transformer",
        "SelfAttention": "transformer",
        "compile_model": "transformer",
        "plain_name": "transformer",
        "parameter_names": "transformer",
        "SwiGLU": "transformer",
        "Embedding": "lmkit.core.model",
        "Linear": "lmkit.core.model",
        "RMSNorm": "lmkit.core.model",
        "Operations": "operations",
        "choose_operations": "operations",
        "RotaryEmbedding": "lmkit.core.model",
        "apply_rope": "lmkit.core.model",
        "cross_entropy": "lmkit.core.loss",
        "linear_cross_entropy": "lmkit.core.loss",
        "ModelConfig": "lmkit.recipe.tables",
        "PRESETS": "lmkit.recipe.tables",
        "preset_config": "accounting",
        "count_parameters": "accounting",
        "flops_per_token": "accounting",
        "forward_flops_per_token": "accounting",
        "training_memory": "memory",
    },
)
