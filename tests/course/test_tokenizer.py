"""What a course asks of a byte-level BPE tokenizer, through the public API."""

from lmkit.tokenizer import Tokenizer, train_tokenizer

END = "<|end|>"


def test_training_merges_the_most_frequent_pair_and_of_equals_the_greatest(tmp_path):
    """Worked by hand: words hug x 10, pug x 5, hugs x 5, pun x 12 (each after a line break, which is a word)."""
    text = tmp_path / "words.txt"
    text.write_text("\n".join(["hug"] * 10 + ["pug"] * 5 + ["hugs"] * 5 + ["pun"] * 12))
    tokenizer = train_tokenizer(text, vocab_size=256 + 4 + 1, special_tokens=[END])
    # u g 20; then h ug 15 (u n 12); then u n 12 and p u 12 are equal: the greater pair of bytes is u n; then p un 12.
    assert tokenizer.merges == [(b"u", b"g"), (b"h", b"ug"), (b"u", b"n"), (b"p", b"un")]
    assert tokenizer.encode("hugs") == [257, ord("s")]
    assert tokenizer.encode("pugs") == [ord("p"), 256, ord("s")]
    assert tokenizer.encode(f"pun{END}") == [259, 260]


def test_no_merge_crosses_words_or_special_tokens(tmp_path):
    text = tmp_path / "stories.txt"
    text.write_text(f"ab cd{END}" * 50)
    tokenizer = train_tokenizer(text, vocab_size=300, special_tokens=[END])
    # All pairs come 50 times: c d (the greatest), a b, then the blank, which belongs to the word behind it.
    assert [left + right for left, right in tokenizer.merges] == [b"cd", b"ab", b" cd"]


def test_special_tokens_stay_whole_and_the_longest_wins():
    tokenizer = Tokenizer.from_merges([(b"a", b"b")], special_tokens=[END, END + END])
    single, double = tokenizer.encode(END)[0], tokenizer.encode(END + END)[0]
    assert tokenizer.encode(f"ab{END}{END}{END}ab") == [256, double, single, 256]
    assert tokenizer.decode([256, double, single]) == f"ab{END}{END}{END}"


def test_every_text_comes_back_and_a_cut_character_is_replaced():
    tokenizer = Tokenizer.from_merges([(b"t", b"h"), (b"th", b"e"), (b"\xc3", b"\xa9")])
    for text in ("", " ", "the thé\n\n\tthe", "naïve 日本語 🙂", "a\u0301\u200d"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é") == [258]
    assert tokenizer.decode([0xF0, 0x9F]) == "\ufffd"  # half of a 🙂


def test_a_stream_is_encoded_as_the_whole_text():
    tokenizer = Tokenizer.from_merges([(b"t", b"h"), (b"th", b"e")], special_tokens=[END])
    text = f"the theme {END} then the end"
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]  # cuts words and the special token
    assert list(tokenizer.encode_iterable(pieces)) == tokenizer.encode(text)


def test_saved_and_loaded_it_encodes_alike(tmp_path):
    tokenizer = Tokenizer.from_merges([(b"t", b"h"), (b"th", b"e")], special_tokens=[END])
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.encode(f"the {END}") == tokenizer.encode(f"the {END}")
