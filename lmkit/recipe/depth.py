"""One dial for the size of a training: `model.depth` fills in what the recipe leaves out.

Rules of thumb from public training logs (nanochat, 2026; Hoffmann et al. 2022 for tokens by parameter), for web text
and 12 to 26 layers. They are a place to start from, not a result of this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SIZES = ("d_model", "d_ff", "num_layers", "num_heads")
FOLLOWS = {"model": SIZES, "train": ("batch_size", "steps"), "optimizer": ("lr",)}
"""Table -> the keys that follow from `model.depth`."""
TOKENS_PER_PARAMETER = 20.0
"""Default of `train.tokens_per_parameter`."""
_UNKNOWN_VOCABULARY = 10_000
_LARGEST = 1e12
_AT_12_LAYERS = {"tokens": 2.2e9, "batch_tokens": 1 << 19, "d_model": 768, "lr": 1e-3}


def from_depth(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return table -> the keys of FOLLOWS for the recipe's `model.depth`, {} without a valid one.

    - d_model is 64 depth, rounded up to whole heads, which have 32, 64 (from 256) or 128 channels (from 768);
    - d_ff is 8/3 d_model;
    - a training sees `train.tokens_per_parameter` tokens for each parameter that multiplies;
    - a batch has 2^19 tokens at 12 layers, and grows with the tokens to the power 0.383, in powers of two;
    - the learning rate is 1e-3 at 12 layers, and goes with the square root of batch / d_model.

    Args:
        raw: the tables as the TOML file has them; values that are given decide what follows from them.
    """
    model, train, _, tokenizer = tables = [raw.get(name) or {} for name in (*FOLLOWS, "tokenizer")]
    if not all(isinstance(table, dict) for table in tables):
        return {}  # validation refuses it, and what follows
    depth = model.get("depth")
    if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= 1024:
        return {}
    width = 64 * depth
    head = 128 if width >= 768 else 64 if width >= 256 else 32
    width = max(-(-width // head), 2) * head
    sizes = {
        "d_model": width,
        "d_ff": -(-8 * width // 3 // 64) * 64,
        "num_layers": depth,
        "num_heads": width // head,
    }
    sizes |= {key: value for key in SIZES if (value := _number(model, key))}
    vocabulary = _number(model, "vocab_size") or _number(tokenizer, "vocab_size") or _UNKNOWN_VOCABULARY
    d_model, d_ff, layers, _ = (sizes[key] for key in SIZES)
    parameters = layers * d_model * (4 * d_model + 3 * d_ff) + vocabulary * d_model
    tokens = (_number(train, "tokens_per_parameter") or TOKENS_PER_PARAMETER) * parameters
    context = _number(model, "context_length") or 256
    wanted = _AT_12_LAYERS["batch_tokens"] * (tokens / _AT_12_LAYERS["tokens"]) ** 0.383 / context
    batch = _number(train, "batch_size") or 1 << max(3, round(wanted).bit_length() - 1)
    batch_share = batch * context / _AT_12_LAYERS["batch_tokens"]
    lr = _AT_12_LAYERS["lr"] * (batch_share * _AT_12_LAYERS["d_model"] / d_model) ** 0.5
    return {
        "model": sizes,
        "train": {"batch_size": batch, "steps": max(1, round(tokens / (batch * context)))},
        "optimizer": {"lr": float(f"{lr:.2g}")},
    }


def beside_dial(given: Mapping[str, Any], typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about the values of a file that `model.preset` or `model.depth` of the command line replaces, and
    one about those that do not follow from the depth because the file gives them."""
    dials = [f"model.{dial}" for dial in ("preset", "depth") if dial in typed.get("model", {})]
    values = {
        name: [
            f"{name}.{key} = {table[key]}" for key in keys if key in table and key not in typed.get(name, {})
        ]
        for name, keys in FOLLOWS.items()
        if isinstance(table := given.get(name), dict)
    }
    if dials and (sizes := values.pop("model", [])):
        yield f"{dials[0]} replaces {', '.join(sizes)}"
    if "model.depth" in dials and (kept := [line for lines in values.values() for line in lines]):
        yield f"kept from the recipe instead of derived from model.depth: {', '.join(kept)}"


def _number(table: Mapping[str, Any], key: str) -> Any:
    """Return a positive number, or None: validation refuses everything else, or has a default."""
    value = table.get(key)
    return value if isinstance(value, (int, float)) and 0 < value < _LARGEST else None
