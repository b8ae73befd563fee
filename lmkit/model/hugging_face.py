"""Models of the Llama family as Hugging Face folders have them: `config.json`, and names and order of weights.

Both sides compute the same function. They differ in RoPE: lmkit turns neighbouring channels (2i, 2i + 1) of a head,
Llama's code in transformers turns (i, i + head_dim / 2), so the rows of q and k are stored in another order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from lmkit.core.model import TransformerBlock
from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import ATTENTION
from lmkit.storage.inputs import read_object

ARCHITECTURES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in ("llama", "mistral", "qwen2", "qwen3")}
_THEIRS = {
    "token_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "ln_final": "model.norm",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn": "self_attn",
    "output_proj": "o_proj",
    "ffn": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
"""Parts of names that differ."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SWITCHES = frozenset({"qkv_bias", "qk_norm"})
"""Those of [model] that these architectures have: the first Qwen2 and Llama, the second Qwen3."""
_MOST_BYTES = 1 << 22
_ADAPTER = "adapter_config.json"
_LONGEST_CONTEXT = 1 << 24
_AGAIN = "copy or download the file again"


# Weights


def weight_names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of every weight in lmkit and in a Hugging Face folder."""
    of_block = [name for name, _ in TransformerBlock(config, device="meta").named_parameters()]
    in_blocks = (f"layers.{layer}.{name}" for layer in range(config.num_layers) for name in of_block)
    head = [] if config.tie_embeddings else ["lm_head.weight"]
    for name in chain(["token_embeddings.weight"], in_blocks, ["ln_final.weight"], head):
        yield name, ".".join(_THEIRS.get(part, part) for part in name.split("."))


def output_biases(config: ModelConfig) -> list[str]:
    """Return the names of the biases of attention's output, which Llama has beside those of q, k and v."""
    return [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_layers)]


def reordered(name: str, weight: Tensor, config: ModelConfig, *, pairs: bool) -> Tensor:
    """Return a weight, `name` in lmkit, with the channels of q and k in lmkit's order (`pairs`) or the folder's."""
    if re.search(r"\.attn\.[qk]_(proj|norm)\.", name) is None:
        return weight
    half = config.head_dim // 2
    parts = weight.unflatten(0, (-1, 2, half) if pairs else (-1, half, 2))  # (heads, ...)
    return parts.transpose(1, 2).flatten(0, 2).contiguous()


# config.json


class _Rope(BaseModel):
    """`rope_parameters`, or the older `rope_scaling`. Other keys are kept, and refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""rope_type -> its keys; [model] has them with "rope_" in front."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "mistral": {"vocab_size": 32_000, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
                "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768,
              "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768,
              "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}  # fmt: skip
"""Values of keys that a `config.json` lacks, where the architectures differ; those of transformers 4 and 5."""


class _Config(BaseModel):
    """What decides the function that a model of the family computes. Defaults are those of transformers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    architectures: list[str] | None = None
    vocab_size: int
    hidden_size: int = 4096
    intermediate_size: int
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool | None = False
    hidden_act: str = "silu"
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    is_causal: bool | None = True
    sliding_window: int | None = None
    use_sliding_window: bool | None = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    original_max_position_embeddings: int | None = None
    quantization_config: Any = None

    @property
    def d_head(self) -> int | None:
        """Channels of a head; None: hidden_size / num_attention_heads."""
        found = 128 if self.model_type == "qwen3" and self.head_dim is None else self.head_dim
        return None if found is None or found * self.num_attention_heads == self.hidden_size else found

    @property
    def window(self) -> int | None:
        """Tokens that a layer with a window sees; None: there is no such layer."""
        slides = self.use_sliding_window and (
            self.num_hidden_layers > self.max_window_layers
            if self.layer_types is None
            else "sliding_attention" in self.layer_types
        )
        return self.sliding_window if self.model_type == "mistral" or slides else None


def read_config(path: Path, *, context_length: int | None = None) -> ModelConfig:
    """Read a `config.json`; `context_length` replaces `max_position_embeddings`, and is at most that.

    Raises:
        UsageError: no such file, or a model that lmkit cannot express; the message names each key.
        LmkitError: the file is damaged.
    """
    config = _parse(path)
    longest = config.max_position_embeddings
    length = longest if context_length is None else context_length
    if not 0 < length <= min(longest, _LONGEST_CONTEXT):
        message = f"{path}: a context of {length} tokens; max_position_embeddings is {longest}"
        hint = f"give --context-length, at most {min(longest, _LONGEST_CONTEXT)}"
        raise UsageError("import.context_length", message, hint=hint)
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    refused = list(_inexpressible(config, rope, length))
    if path.with_name(_ADAPTER).is_file():  # transformers applies it
        refused.append(f"{_ADAPTER}: merge the adapter into the weights first")
    if refused:
        raise UsageError(
            "import.unsupported",
            f"{path}: lmkit cannot express {'; '.join(refused)}",
            hint="lmkit imports Llama, Mistral without windows, Qwen2, Qwen3; rope_type default, linear or llama3",
        )
    kind = _rope_type(rope)
    scaling: dict[str, Any] = {f"rope_{key}": getattr(rope, key) for key in _ROPE_KEYS[kind]}
    scaling["rope_scaling"] = kind
    if kind == "llama3":
        scaling["rope_original_context"] = rope.original_max_position_embeddings or longest
    try:
        return ModelConfig(
            vocab_size=config.vocab_size,
            context_length=length,
            d_model=config.hidden_size,
            d_ff=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            d_head=config.d_head,
            num_kv_heads=config.num_key_value_heads,
            rope_theta=config.rope_theta if rope.rope_theta is None else rope.rope_theta,
            norm_eps=config.rms_norm_eps,
            tie_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=config.model_type == "qwen2"
            or (config.model_type == "llama" and bool(config.attention_bias)),
            qk_norm=config.model_type == "qwen3",
            **scaling,
        )
    except ValidationError as error:
        raise _damaged(path, error) from None


def _parse(path: Path) -> _Config:
    try:
        content = read_object(path, most_bytes=_MOST_BYTES)
    except OSError as error:
        where = "name the folder of a model: config.json, *.safetensors, tokenizer.json"
        raise UsageError("import.no_config", f"{path}: {reason(error)}", hint=where) from error
    except ValueError as error:
        raise LmkitError("import.damaged_config", f"{path}: {error}", hint=_AGAIN) from None
    if content.get("model_type") not in tuple(ARCHITECTURES):  # perhaps not hashable
        message = f"{path}: model_type {json.dumps(content.get('model_type'))[:60]} is not supported"
        raise UsageError("import.unsupported", message, hint=f"lmkit imports {', '.join(ARCHITECTURES)}")
    try:
        return _Config.model_validate({**_DEFAULTS[content["model_type"]], **content})
    except ValidationError as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: ValidationError) -> LmkitError:
    found = error.errors(include_url=False)
    wrong = [f"{'.'.join(map(str, detail['loc'])) or 'the model'}: {detail['msg']}" for detail in found]
    return LmkitError("import.damaged_config", f"{path}: {'; '.join(wrong)}", hint=_AGAIN)


def _rope_type(rope: _Rope) -> str:
    name = rope.rope_type or rope.type or "default"
    return "none" if name == "default" else name


def _inexpressible(config: _Config, rope: _Rope, length: int) -> Iterator[str]:
    """Yield the keys, with their values, that make another function than lmkit's."""
    named = config.architectures
    if named and named != [ARCHITECTURES[config.model_type]]:
        yield f"architectures {json.dumps(named)[:80]}"
    if config.hidden_act not in ("silu", "swish"):
        yield f"hidden_act {config.hidden_act}"
    if config.attention_bias and config.model_type == "qwen3":
        yield "attention_bias true with norms of q and k"
    if config.mlp_bias and config.model_type == "llama":
        yield "mlp_bias true"
    if config.is_causal is False:
        yield "is_causal false"
    if config.quantization_config is not None:
        yield "quantization_config"
    window = config.window
    if window is not None and window < length:
        yield f"sliding_window {window} with a context of {length} (--context-length {window} does without)"
    if window is None and any(kind != "full_attention" for kind in config.layer_types or ()):
        yield "layer_types other than full_attention"
    if config.rope_scaling and config.rope_parameters and config.rope_scaling != config.rope_parameters:
        yield "rope_scaling beside other rope_parameters"
    kind = _rope_type(rope)
    trained = config.original_max_position_embeddings  # transformers prefers it for llama3
    if kind == "llama3" and trained not in (None, rope.original_max_position_embeddings):
        yield "original_max_position_embeddings beside another one of rope_type llama3"
    if kind not in _ROPE_KEYS:
        yield f"rope_type {kind}"
    elif missing := [key for key in _ROPE_KEYS[kind] if getattr(rope, key) is None]:
        yield f"rope_type {kind} without {' and '.join(missing)}"
    if {rope.partial_rotary_factor, config.partial_rotary_factor} - {None, 1.0}:
        yield "partial_rotary_factor"
    for key, value in (rope.model_extra or {}).items():
        if value is not None:
            yield f"{key} of rope_type {kind}"


def config_json(
    config: ModelConfig, *, dtype: str, begin: int | None, end: int | None, biased_llama: bool = False
) -> dict[str, Any]:
    """Return the content of a `config.json`, in the form that transformers 4 and 5, vLLM and llama.cpp read.

    Args:
        dtype: of the weights, as PyTorch calls it.
        begin, end: ids of tokens.
        biased_llama: describe a model with `qkv_bias` as a Llama, which has `output_biases` as well.

    Raises:
        UsageError: the architecture cannot express the model ("export.unsupported").
    """
    if not ATTENTION.facts(config.attention).sees_all:
        message = f'model.attention: "{config.attention}" does not see all keys, and Llama\'s attention does'
        raise UsageError("export.unsupported", message, hint="train with another attention kernel")
    if foreign := ", ".join(f"model.{key}" for key in sorted(config.switches - SWITCHES)):
        message = f"{foreign}: Llama's and Qwen's architectures have no such switch"
        raise UsageError("export.unsupported", message, hint="train without, or generate with lmkit")
    if config.qkv_bias and config.qk_norm:
        message = "model.qkv_bias with model.qk_norm: Qwen2's architecture has the first, Qwen3's the second"
        raise UsageError("export.unsupported", message, hint="train with one of them, or generate with lmkit")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not biased_llama else "llama"
    scaling = {key: getattr(config, f"rope_{key}") for key in _ROPE_KEYS[config.rope_scaling]}
    if config.rope_scaling == "llama3":
        scaling["original_max_position_embeddings"] = config.rope_original_context
    own = {
        "llama": {"attention_bias": config.qkv_bias, "mlp_bias": False},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
    }[kind]
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": config.rope_scaling, **scaling} if scaling else None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        **own,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": dtype,
    }
