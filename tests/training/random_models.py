"""Hugging Face folders as other people's may be: random shapes, keys, dtypes, shards and end tokens."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from their_models import byte_tokenizer, make_theirs

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


def random_folder(path: Path, seed: int) -> Path:
    """Write a folder of a Llama, Mistral, Qwen2 or Qwen3 model with a tokenizer."""
    random = Random(seed)
    kind = ("Llama", "Mistral", "Qwen2", "Qwen3")[seed % 4]
    model = make_theirs(kind, _configuration(random, kind), seed)
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.bias"):
            parameter.data.zero_()
    model.to(random.choice(DTYPES)).save_pretrained(path)
    _rewrite_config(path / "config.json", random)
    _lay_out(path, random, model)
    _tokenizer(path, random)
    return path


def _configuration(random: Random, kind: str) -> dict[str, Any]:
    heads, head_dim = random.choice((1, 2, 4, 6)), random.choice((4, 8, 16))
    layers, context = random.randint(1, 4), random.choice((64, 200, 256))
    changes: dict[str, Any] = {
        "vocab_size": random.randint(270, 400),
        "hidden_size": heads * head_dim,
        "intermediate_size": random.randint(3, 80),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "max_position_embeddings": context,
        "rms_norm_eps": random.choice((1e-6, 1e-5, 0.01)),
        "tie_word_embeddings": random.random() < 0.4,
        "rope_parameters": _rope(random, context),
    }
    if kind == "Llama":
        changes["attention_bias"] = random.random() < 0.3
    if kind == "Mistral":
        changes["sliding_window"] = random.choice((None, context, 4096))
    if kind == "Qwen3":
        changes["head_dim"] = head_dim
    if kind in ("Qwen2", "Qwen3") and random.random() < 0.4:  # a window that no layer has, or that sees all
        changes |= {"use_sliding_window": True, **random.choice(
            ({"sliding_window": 9, "max_window_layers": layers}, {"sliding_window": context, "max_window_layers": 0})
        )}  # fmt: skip
    return changes


def _rope(random: Random, context: int) -> dict[str, Any]:
    theta = {"rope_theta": random.choice((10_000.0, 500.0, 1_000_000.0))}
    scaled = {"factor": random.choice((2.0, 8, 1.5)), **theta}
    llama3 = {
        "rope_type": "llama3",
        "low_freq_factor": random.choice((1, 1.0, 0.5)),
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context // random.choice((1, 2, 4)),
    }
    return random.choice(
        ({"rope_type": "default", **theta}, {"rope_type": "linear", **scaled}, {**llama3, **scaled})
    )


def _rewrite_config(path: Path, random: Random) -> None:
    """Write older keys, and leave out keys with their defaults."""
    content = json.loads(path.read_text())
    rope = content["rope_parameters"]
    if random.random() < 0.5:
        del content["rope_parameters"]
        content["rope_theta"] = rope.pop("rope_theta")
        content["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if rope["rope_type"] == "linear" and random.random() < 0.5:
            rope["type"] = rope.pop("rope_type")
        if content["rope_theta"] == 10_000.0 and random.random() < 0.5:
            del content["rope_theta"]
    elif random.random() < 0.3:
        content["rope_scaling"] = rope
    defaults: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
                                "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}  # fmt: skip
    if content["model_type"] == "mistral":
        defaults["sliding_window"] = 4096
    else:
        defaults["layer_types"] = content.get("layer_types")
    if content["model_type"] == "llama":
        defaults["num_key_value_heads"] = content["num_attention_heads"]
    if content["model_type"] != "qwen3":
        defaults["head_dim"] = content.get("head_dim")
    for key, value in defaults.items():
        if content.get(key) == value and random.random() < 0.5:
            content.pop(key, None)
    if random.random() < 0.3:
        del content["architectures"]
    path.write_text(json.dumps(content))


def _lay_out(path: Path, random: Random, model: Any) -> None:
    """Put the tensors into shards, some with a tensor that the index does not list or that lies in two of them."""
    tensors = load_file(path / ONE_FILE)
    embedding = tensors["model.embed_tokens.weight"]
    if model.config.tie_word_embeddings and random.random() < 0.6:
        tensors["lm_head.weight"] = random.choice((embedding.clone(), embedding * 2))
    if random.random() < 0.3:
        frequencies = model.model.rotary_emb.inv_freq.to(torch.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    names = [*tensors]
    random.shuffle(names)
    parts = random.randint(1, 4)
    (path / ONE_FILE).unlink()
    if parts == 1 and random.random() < 0.5:
        save_file(tensors, path / ONE_FILE, metadata={"format": "pt"})
        return
    files = [
        random.choice((f"model-{i:05d}-of-{parts:05d}.safetensors", f"part_{i}.safetensors"))
        for i in range(parts)
    ]
    weight_map = {name: files[i % parts] for i, name in enumerate(names)}
    held = {file: {name: tensors[name] for name in names if weight_map[name] == file} for file in files}
    if random.random() < 0.3:
        held[files[0]]["model.layers.0.unlisted"] = torch.ones(3)
    if random.random() < 0.3:
        held[files[-1]][names[0]] = tensors[names[0]]  # twice
    for file, some in held.items():
        save_file(some, path / file, metadata={"format": "pt"})
    content = {"weight_map": weight_map, "metadata": random.choice(({}, {"total_size": 1}))}
    (path / INDEX).write_text(json.dumps(content))


def _tokenizer(path: Path, random: Random) -> None:
    (path / "generation_config.json").write_text("{}")  # it names token 2 as the end of a text
    byte_tokenizer().save(path / "tokenizer.json")
    ends = random.choice((None, 259, [260, 259, 65], [65]))
    place = random.choice(("generation_config.json", "config.json"))
    for name in ("generation_config.json", "config.json"):
        content = json.loads((path / name).read_text())
        content.pop("eos_token_id", None)
        if name == place and ends is not None:
            content["eos_token_id"] = ends
        (path / name).write_text(json.dumps(content))
