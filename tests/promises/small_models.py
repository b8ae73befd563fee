"""Sizes and switches of the models of this folder."""

SIZES = {"vocab_size": 31, "context_length": 16, "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 4}
SWITCHES = {
    "attention_window": 4,
    "separate_documents": True,
    "qk_norm": True,
    "qkv_bias": True,
    "num_kv_heads": 2,
}
