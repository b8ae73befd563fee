"""Tell where transformers' `AutoTokenizer` reads a tokenizer otherwise than lmkit, which follows `tokenizer.json`.

Some classes of transformers take vocabulary, merges and post-processor from `tokenizer.json` and build the rest anew.
The tables are those of transformers 5.24.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.errors import LmkitError, some_of
from lmkit.recipe.run_folder import TOKENIZER_CONFIG
from lmkit.tokenizer.marks import CONFIG, named_by, read_beside, read_config

if TYPE_CHECKING:
    from lmkit.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("lmkit")


class _Class(NamedTuple):
    """A class that builds its own words.

    Attributes:
        pattern: one of `PATTERNS`; None: other words than lmkit has.
        nfc: whether a text is brought into normal form first.
        tokens: which token each key of `tokenizer_config.json` names that is not there.
        frame: the tokens around a text; None: those of the post-processor of `tokenizer.json`.
    """

    pattern: str | None
    nfc: bool = False
    tokens: Mapping[str, str] = {}
    frame: tuple[str, ...] | None = None


_OF_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_OF_QWEN2 = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_OF_COHERE = {"unk": "<UNK>", "bos": "<BOS_TOKEN>", "eos": "<|END_OF_TURN_TOKEN|>", "pad": "<PAD>"}
_OF_COHERE |= {"cls": "<CLS>", "sep": "<SEP>", "mask": "<MASK_TOKEN>"}
_OF_ROBERTA = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
_CLASSES = {
    "GPT2Tokenizer": _Class("gpt2", tokens=_OF_GPT2),
    "CodeGenTokenizer": _Class("gpt2", tokens=_OF_GPT2),
    "GPTNeoXTokenizer": _Class("gpt2", True, _OF_GPT2 | {"pad_token": "<|padding|>"}, frame=()),
    "CohereTokenizer": _Class("digits", True, {f"{key}_token": name for key, name in _OF_COHERE.items()}),
    "Qwen2Tokenizer": _Class("qwen2", True, _OF_QWEN2),
    **dict.fromkeys(
        ("RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "LukeTokenizer", "MvpTokenizer"),
        _Class("gpt2", tokens=_OF_ROBERTA, frame=("<s>", "</s>")),
    ),
    **dict.fromkeys(
        (
            *("Qwen3_5Tokenizer", "WhisperTokenizer", "CLIPTokenizer", "NougatTokenizer"),
            *("DebertaTokenizer", "BlenderbotTokenizer", "LayoutLMv3Tokenizer", "BertTokenizer"),
            *("DistilBertTokenizer", "MPNetTokenizer", "OpenAIGPTTokenizer", "GemmaTokenizer"),
            *("CodeLlamaTokenizer", "NllbTokenizer"),
        ),
        _Class(None),
    ),
}
"""By name without `Fast`. All other classes read words from `tokenizer.json`, or do not read byte-level BPE."""

_CLASS_OF_MODEL = {
    model: name
    for name, models in {
        "GPT2Tokenizer": "codegen dbrx gpt2 gpt_neo gptj jais2 opt phi starcoder2",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "CohereTokenizer": "cohere cohere2",
        "Qwen2Tokenizer": "qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
        "RobertaTokenizer": "bart longformer roberta",
        "WhisperTokenizer": "whisper",
    }.items()
    for model in models.split()
}
"""By `model_type` in config.json: the class if no file names one."""
_DECIDE = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Values of `model_type` that decide, whatever class is named."""
_ANY_CLASS = {
    name
    for names in (
        "arctic ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite",
        "granitemoe granitemoehybrid granitemoeshared hyperclovax internlm2 internlm3 iquestcoder jamba",
        "kimi_k25 kimi_linear llava mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral",
        "mistral3 mixtral modernbert modernbert-decoder molmo molmo2 nemotron olmo2 olmo3 olmo_hybrid",
        "opencua persimmon phi3 phimoe pixtral smolvlm stablelm step3_vl",
    )
    for name in names.split()
}
"""Values of `model_type` with which words are read from `tokenizer.json`, whatever class is named."""


def warn_of_differences(tokenizer: Tokenizer, path: Path) -> None:
    """Log a warning for each thing that `AutoTokenizer` reads otherwise in the files beside a `tokenizer.json`."""
    config, added = read_config(path), {token.text for token in tokenizer.added_tokens}
    if unread := sorted(named_by(config) - added):
        _log.warning(
            "%s: names %s, which %s does not add: they stay text, where transformers makes each a token",
            *(path.with_name(TOKENIZER_CONFIG), some_of([json.dumps(name) for name in unread]), path.name),
        )
    if config.get("split_special_tokens"):
        _log.warning(
            "%s: ignoring split_special_tokens: special tokens in a text are tokens, where transformers splits them",
            path.with_name(TOKENIZER_CONFIG),
        )
    name = _class_of(config, path)
    if not is_read_by(name, tokenizer, config):
        _log.warning(
            "%s: encoding as it says; transformers 5 uses its class %s, which finds other words or special tokens",
            *(path, name),
        )


def is_read_by(name: str, tokenizer: Tokenizer, config: Mapping[str, Any]) -> bool:
    """Return whether a class of transformers encodes as the tokenizer does.

    Args:
        config: of the `tokenizer_config.json` that names the class.
    """
    own = _CLASSES.get(name)
    if own is None:
        return True
    if (own.pattern, own.nfc) != (tokenizer.pattern, tokenizer.nfc):
        return False
    if tokenizer.whole_words or tokenizer.unk_id is not None:
        return False
    frame = [*tokenizer.prefix, *tokenizer.suffix]
    if own.frame is not None and frame != [tokenizer.special_ids.get(token) for token in own.frame]:
        return False
    added, named = {token.text for token in tokenizer.added_tokens}, named_by({**own.tokens, **config})
    if "added_tokens_decoder" in config:  # then the class has no other added tokens
        kept = {token["content"] for token in config["added_tokens_decoder"].values()}
        if not added <= named | kept:
            return False
    return named - named_by(config) <= added


def _class_of(config: Mapping[str, Any], path: Path) -> str:
    """Return the class that `AutoTokenizer` takes, without `Fast`; "" if that is the one for all tokenizers."""
    model: dict[str, Any] = {}
    with suppress(LmkitError):  # of something else, or read where it is needed
        model = read_beside(path, CONFIG)
    kind = str(model.get("model_type"))
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if named is None or kind in _DECIDE:
        return _CLASS_OF_MODEL.get(kind, "")
    return "" if kind in _ANY_CLASS else str(named).removesuffix("Fast")
