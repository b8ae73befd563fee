"""The switches that change the model's formulas."""

from typing import Any

SWITCHES: list[dict[str, Any]] = [
    {"qk_norm": True, "num_kv_heads": 2},
    {"attention_window": 4, "attention": "sdpa"},
]
ALL_SWITCHES: dict[str, Any] = {key: value for fields in SWITCHES for key, value in fields.items()}
