"""The model's formulas in loops, and the switches that change them."""

import math
from typing import Any

import torch

from lmkit.model import TransformerLM


def retold(model: TransformerLM, ids: list[int]) -> torch.Tensor:
    """Compute logits (seq, vocab_size) of one sequence from the weights by name, in loops, without shared code."""
    config = model.config
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    size = config.d_model // heads

    def normed_heads(heads: torch.Tensor, name: str) -> torch.Tensor:
        return torch.stack([norm(head, name) for head in heads]) if config.qk_norm else heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        rms = math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + config.norm_eps)
        return x / rms * weights[name + ".weight"]

    def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
        turned = vector.clone()
        for i in range(0, size, 2):
            angle = position / config.rope_theta ** (i / size)
            turned[i] = vector[i] * math.cos(angle) - vector[i + 1] * math.sin(angle)
            turned[i + 1] = vector[i] * math.sin(angle) + vector[i + 1] * math.cos(angle)
        return turned

    stream = [weights["token_embeddings.weight"][token] for token in ids]
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        normed = [norm(x, at + "ln1") for x in stream]
        q, k, v = (
            [
                (
                    weights[f"{at}attn.{name}_proj.weight"] @ x + weights.get(f"{at}attn.{name}_proj.bias", 0)
                ).unflatten(0, (-1, size))
                for x in normed
            ]
            for name in "qkv"
        )
        q, k = (
            [normed_heads(x, f"{at}attn.{name}_norm") for x in given] for name, given in (("q", q), ("k", k))
        )
        window = config.attention_window if layer == 0 else None
        for i in range(len(ids)):
            outputs = []
            start = 0 if window is None else max(0, i + 1 - window)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                query = turn(q[i][head], i)
                scores = [float(query @ turn(k[j][shared], j)) / math.sqrt(size) for j in range(start, i + 1)]
                highest = max(scores)
                shares = [math.exp(score - highest) for score in scores]
                outputs.append(sum(s / sum(shares) * v[start + j][shared] for j, s in enumerate(shares)))
            stream[i] = stream[i] + weights[at + "attn.output_proj.weight"] @ torch.cat(outputs)
        for i, x in enumerate(stream):
            normed_x = norm(x, at + "ln2")
            gate = weights[at + "ffn.w1.weight"] @ normed_x
            inner = gate / (1 + torch.exp(-gate)) * (weights[at + "ffn.w3.weight"] @ normed_x)
            stream[i] = x + weights[at + "ffn.w2.weight"] @ inner
    return torch.stack([weights["lm_head.weight"] @ norm(x, "ln_final") for x in stream])


SWITCHES: list[dict[str, Any]] = [
    {"qk_norm": True, "num_kv_heads": 2},
    {"attention_window": 4, "attention": "sdpa"},
]
ALL_SWITCHES: dict[str, Any] = {key: value for fields in SWITCHES for key, value in fields.items()}
