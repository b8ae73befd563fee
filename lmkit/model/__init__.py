"""The Transformer language model: `lmkit.core.model` is all of it; `transformer` adds kernels and recomputation.

from lmkit.model import ModelConfig, TransformerLM

model = TransformerLM(ModelConfig(vocab_size=1000))
"""

from lmkit.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "transformer": (
            *("TransformerLM", "TransformerBlock", "SelfAttention", "compile_model"),
            *("plain_name", "parameter_names", "SwiGLU"),
        ),
        "lmkit.core.model": ("Embedding", "Linear", "RMSNorm", "RotaryEmbedding", "apply_rope"),
        "operations": ("Operations", "choose_operations"),
        "lmkit.core.loss": ("cross_entropy", "linear_cross_entropy"),
        "lmkit.recipe.tables": ("ModelConfig", "PRESETS"),
        "accounting": ("preset_config", "count_parameters", "flops_per_token", "forward_flops_per_token"),
        "memory": ("training_memory",),
    },
)
