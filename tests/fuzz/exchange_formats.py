"""Formats of Hugging Face folders: config.json, tokenizer.json, the index of shards, headers of safetensors files.

The import itself starts processes (git) and syncs files; here the folder is opened and every weight is read.
"""

import functools
import json
from pathlib import Path
from random import Random

import tokenizers
import torch
from formats import (
    SAMPLE,
    TEXT,
    Files,
    Format,
    Mutation,
    content_of,
    form,
    safetensors_header,
    small_tokenizer,
)
from mutations import damage
from run_formats import plain_tensors

from lmkit.model import ModelConfig, TransformerLM
from lmkit.model.hugging_face import config_json, reordered, weight_names
from lmkit.tokenizer import Tokenizer
from lmkit.training.checkpoint import write_tensors
from lmkit.training.weights import INDEX, open_hugging_face

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIZES = {"vocab_size": 40, "context_length": 16, "d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2}
KINDS = (
    {"num_kv_heads": 1, "rope_scaling": "llama3", "rope_factor": 2.0},
    {"qkv_bias": True, "tie_embeddings": True},
)


@functools.cache
def folders(place: Path) -> tuple[Files, ...]:
    """Undamaged folders, of two shards each."""
    goods = []
    for fields in KINDS:
        config = ModelConfig(**SIZES, **fields)
        state = TransformerLM(config).state_dict()
        names = {theirs: ours for ours, theirs in weight_names(config)}
        pairs = names.items()
        tensors = {theirs: reordered(ours, state[ours], config, pairs=False) for theirs, ours in pairs}
        cut = len(tensors) // 2
        parts = [dict([*tensors.items()][:cut]), dict([*tensors.items()][cut:])]
        for name, part in zip(SHARDS, parts, strict=True):
            write_tensors(place / name, {key: value.contiguous() for key, value in part.items()})
        weight_map = {key: name for name, part in zip(SHARDS, parts, strict=True) for key in part}
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        content = config_json(config, dtype="float32", begin=1, end=2)
        (place / "config.json").write_text(json.dumps(content, indent=1))
        goods.append(content_of(place))
    return tuple(goods)


def read(folder: Path, good: Files, random: Random) -> None:
    """What is opened fits its own configuration, and every weight is what a plain parser finds."""
    opened = open_hugging_face(folder)
    weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
    plain = {name: plain_tensors((folder / name).read_bytes()) for name in set(weight_map.values())}
    state = TransformerLM(opened.config, device="meta").state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    for ours, theirs in weight_names(opened.config):
        weight = opened[ours]
        assert weight.shape == shapes[ours]
        shape, raw = plain[weight_map[theirs]][theirs]
        stored = reordered(ours, weight, opened.config, pairs=False)
        assert list(stored.shape) == shape
        assert stored.view(-1).view(torch.uint8).numpy().tobytes() == raw


def of_folders(name: str, *files: str, damages: tuple[Mutation, ...] = TEXT) -> None:
    """Register the format in which one of these files is damaged."""
    form(name)(lambda folder: Format([*folders(folder)], dict.fromkeys(files, damages), read))


of_folders("hugging face config.json", "config.json")
of_folders("safetensors index", INDEX)
of_folders("safetensors shards", *SHARDS, damages=(safetensors_header, safetensors_header, damage))

TEXTS = (SAMPLE, "I'LL the\r\n\n  the  12345 x\u0301 e\u0301", "thethe\t<|pad|>\u3000\xa0 -- \u0e01\u0e33")


@form("hugging face tokenizer.json")
def tokenizer_file(folder: Path) -> Format:
    """Where Hugging Face's own library reads the file, too, its ids are lmkit's."""

    def read(folder: Path, good: Files, random: Random) -> None:
        data = (folder / "tokenizer.json").read_bytes()
        ours = Tokenizer.load(folder / "tokenizer.json")
        try:
            theirs = tokenizers.Tokenizer.from_buffer(data)
            theirs.no_padding()
            theirs.no_truncation()
            expected = [theirs.encode(text).ids for text in TEXTS]
        except Exception:  # noqa: BLE001  it raises nothing narrower
            expected = None
        found = [ours.encode(text) for text in TEXTS]
        assert expected in (None, found)
        if not ours.missing_bytes:
            assert ours.decode(ours.encode(SAMPLE, add_special_tokens=False)) == SAMPLE

    merges, goods = [*small_tokenizer().merges, (b"\r", b"\n")], []
    vocab = Tokenizer.from_merges(merges).vocab
    for kind in (
        {"pattern": "llama3", "whole_words": True, "prefix": (265,)},
        {"pattern": "qwen2", "nfc": True},
        {"pattern": "digits"},
    ):
        made = Tokenizer(vocab=vocab, merges=merges, special_tokens=("<|endoftext|>", "<|pad|>"), **kind)
        made.save(folder / "tokenizer.json")
        goods.append(content_of(folder))
    return Format(goods, {"tokenizer.json": TEXT}, read)
