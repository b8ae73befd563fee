"""What `AutoTokenizer` makes of the files beside a `tokenizer.json`: the same, or a warning that names the file."""

import json

import pytest
import tokenizer_families as families
from raising import raises

from lmkit.errors import UsageError
from lmkit.tokenizer import Tokenizer

NFC = {"type": "NFC"}
DIGITS = {"pre_tokenizer": families.STARCODER}
QWEN2 = {"pre_tokenizer": families.QWEN2}


@pytest.fixture
def folder(tmp_path):
    """Writes a small tokenizer.json, and files beside it, `{name without ending: content}`; returns its path."""

    def write(changes=(), /, names=("<|endoftext|>", "<s>", "</s>"), **beside):
        path = tmp_path / "tokenizer.json"
        for file in tmp_path.iterdir():
            file.unlink()
        merges = [(b"h", b"h"), (b"h", b"e"), (b"1", b"2"), (b" ", b"1")]  # ids 256 to 259
        Tokenizer.from_merges(merges, names).save(path)
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | dict(changes)))
        for stem, content in beside.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(content))
        return path

    return write


def theirs(path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    return transformers.AutoTokenizer.from_pretrained(path.parent)


TEXT = "he 12e\u0301<s>"
GPT2_IDS = [257, 32, 258, 101, 0xCC, 0x81, 261]
DIGIT_IDS = [257, 32, 49, 50, 101, 0xCC, 0x81, 261]
QWEN2_IDS = [257, 32, 49, 50, 0xC3, 0xA9, 261]
NFC_IDS = [257, 32, 258, 0xC3, 0xA9, 261]


@pytest.mark.parametrize(
    ("changes", "named", "model", "ids", "alike"),
    [
        ({}, "GPT2Tokenizer", None, GPT2_IDS, True),
        ({}, None, "gpt2", GPT2_IDS, True),
        ({"normalizer": NFC, **QWEN2}, "Qwen2TokenizerFast", None, QWEN2_IDS, True),
        ({"normalizer": NFC}, "GPTNeoXTokenizer", None, NFC_IDS, True),
        (DIGITS, "PreTrainedTokenizerFast", "qwen3", DIGIT_IDS, True),
        (DIGITS, "LlamaTokenizerFast", "llama", DIGIT_IDS, True),
        (DIGITS, "GPT2Tokenizer", "granite", DIGIT_IDS, True),
        (DIGITS, "OurTokenizer", None, DIGIT_IDS, True),
        (DIGITS, "GPT2Tokenizer", "llama", GPT2_IDS, False),
        ({}, "Qwen2Tokenizer", None, QWEN2_IDS, False),
        ({}, "PreTrainedTokenizerFast", "qwen2", QWEN2_IDS, False),
        ({}, None, "qwen3", QWEN2_IDS, False),
        (QWEN2, "GPTNeoXTokenizerFast", None, NFC_IDS, False),
    ],
)
def test_a_class_that_finds_other_words_is_told(folder, caplog, changes, named, model, ids, alike):
    config = {"tokenizer_class": named, "pad_token": None}
    path = folder(changes, tokenizer_config=config, config={"model_type": model})
    assert (Tokenizer.load(path).encode(TEXT) == ids) == alike
    assert ("tokenizer.json" in caplog.text) != alike
    assert theirs(path)(TEXT)["input_ids"] == ids


@pytest.mark.parametrize(
    ("config", "text", "ids", "told"),
    [
        ({"split_special_tokens": True}, "<s>", [*b"<s>"], "split_special_tokens"),
        ({"split_special_tokens": False}, "<s>", [261], None),
        ({"bos_token": "<new>"}, "<new>", [263], "<new>"),
        ({"image_token": "<new>"}, "<new>", [263], "<new>"),
        ({"image_token": "<s>", "image_token_id": 9, "add_bos_token": True}, "<s>", [261], None),
        ({"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {}}, "<s>", [*b"<s>"], "GPT2Tokenizer"),
        ({"tokenizer_class": "OurTokenizer", "added_tokens_decoder": {}}, "<s>", [261], None),
    ],
)
def test_keys_that_change_which_tokens_a_text_has_are_told(folder, caplog, config, text, ids, told):
    path = folder(tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config})
    assert (Tokenizer.load(path).encode(text) == ids) == (told is None)
    assert (told or "") in caplog.text
    assert bool(caplog.text) == (told is not None)
    assert theirs(path)(text)["input_ids"] == ids


def test_tokens_that_a_class_adds_by_itself_are_told(folder, caplog):
    """GPT-2's class has `<|endoftext|>` as `unk_token`, `bos_token` and `eos_token`, unless the files name others."""
    named = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<s>")
    path = folder(names=["<s>"], tokenizer_config={"tokenizer_class": "GPT2Tokenizer", **named})
    Tokenizer.load(path)
    assert not caplog.text
    path = folder(names=["<s>"], tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    Tokenizer.load(path)
    assert "GPT2Tokenizer" in caplog.text
    assert theirs(path)("<|endoftext|>")["input_ids"] == [261]


@pytest.mark.parametrize(
    ("config", "older", "end"),
    [
        ({}, {"eos_token": "</s>", "bos_token": "<s>"}, 262),
        ({}, {"eos_token": {"content": "</s>", "lstrip": False, "normalized": False}}, 262),
        ({"eos_token": "<s>"}, {"eos_token": "</s>"}, 262),
        ({"eos_token": "<s>"}, {"pad_token": "</s>"}, 261),
        ({"eos_token": "<s>", "added_tokens_decoder": {}}, {"eos_token": "</s>"}, 261),
    ],
)
def test_older_folders_name_the_end_of_a_text_in_special_tokens_map(folder, caplog, config, older, end):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    path = folder(tokenizer_config=config, special_tokens_map=older)
    ours = Tokenizer.load(path)
    assert ours.end_of_text_id == end == theirs(path).eos_token_id
    assert not caplog.text
    if "eos_token" in older and "added_tokens_decoder" not in config:
        path.with_name("tokenizer_config.json").unlink()
        with raises(UsageError, "tokenizer.replaces_marks", path.with_name("special_tokens_map.json")):
            Tokenizer.from_merges([], ["<end>"]).with_end_of_text("<end>").save(path)


def test_older_folders_add_tokens_in_added_tokens(folder, caplog):
    added = {"<b>": 264, "<a>": 263, "<s>": 261}
    path = folder(
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<b>"},
        added_tokens=added,
    )
    ours, text = Tokenizer.load(path), "<a><b> <s>"
    assert ours.encode(text) == theirs(path)(text)["input_ids"] == [263, 264, 32, 261]
    assert {token.text for token in ours.added_tokens if not token.special} == {"<a>"}
    assert not caplog.text
    path = folder(added_tokens={"<a>": 300})
    with raises(UsageError, "tokenizer.unsupported", "added_tokens.json", "<a>"):
        Tokenizer.load(path)
