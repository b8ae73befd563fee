"""The Transformer language model: `transformer` and `layers` are all of it, with `operations`, `core.rope`
and `core.loss`.

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
        "plain_name": "names",
        "parameter_names": "names",
        "Embedding": "layers",
        "Linear": "layers",
        "JoinedLinear": "layers",
        "RMSNorm": "layers",
        "AddRMSNorm": "layers",
        "SwiGLU": "layers",
        "silu": "layers",
        "softmax": "layers",
        "Operations": "operations",
        "choose_operations": "operations",
        "RotaryEmbedding": "lmkit.core.rope",
        "apply_rope": "lmkit.core.rope",
        "cross_entropy": "lmkit.core.loss",
        "linear_cross_entropy": "lmkit.core.loss",
        "ModelConfig": "accounting",
        "PRESETS": "accounting",
        "preset_config": "accounting",
        "count_parameters": "accounting",
        "flops_per_token": "accounting",
        "forward_flops_per_token": "accounting",
        "training_memory": "memory",
    },
)
