"""The words of Llama 3, Qwen2 and SmolLM, whole words and normal forms, against Hugging Face's library."""

from raising import raises

from lmkit.errors import UsageError
from lmkit.tokenizer import Tokenizer

KINDS = {
    "gpt2": {},
    "digits": {"pattern": "digits"},
    "llama3": {"pattern": "llama3", "whole_words": True},
    "qwen2": {"pattern": "qwen2", "nfc": True},
}


def kind_of(trained, name):
    """The trained tokenizer with another pattern; Llama's has two words that no merges make."""
    vocab = {i: token for i, token in trained.vocab.items() if i not in trained.special_ids.values()}
    vocab |= {2100: b" theory", 2101: b"self-", 2102: b"\n\n\n"}
    return Tokenizer(
        vocab=vocab, merges=trained.merges, special_tokens=("<|endoftext|>", "<|pad|>"), **KINDS[name]
    )


def test_whole_words_need_no_merges(trained, code):
    ours = kind_of(trained, "llama3")
    assert ours.encode(" theory") == [2100]
    assert ours.encode("\n\n\n") == [2102]
    assert ours.encode("self-") != [2101]  # two words of the pattern
    assert kind_of(trained, "gpt2").encode(" theory") != [2100]


def test_qwen_composes_what_lies_between_special_tokens(trained, code):
    ours = kind_of(trained, "qwen2")
    text = "cafe\u0301<|pad|>e\u0301"
    assert ours.decode(ours.encode(text)) == "caf\u00e9<|pad|>\u00e9"
    assert ours.encode_bytes(text.encode() + b"\xff") == [*ours.encode(text), *ours.encode_bytes(b"\xff")]


def test_gpt2_files_cannot_hold_other_words(trained, tmp_path):
    with raises(UsageError, "tokenizer.unsupported"):
        kind_of(trained, "llama3").save_gpt2(tmp_path)
    assert not list(tmp_path.iterdir())
