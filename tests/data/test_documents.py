"""What begins and ends a document, and how many bytes of text it has."""

import unicodedata

import pytest
from byte_tokenizers import of_bytes
from raising import raises

from lmkit.data.encoding import encode_corpus
from lmkit.data.shards import open_tokens
from lmkit.errors import UsageError
from lmkit.tokenizer import Tokenizer

END = "<|endoftext|>"


def framed(special_tokens=("<s>", "</s>"), **changes):
    """A tokenizer of bytes and special tokens."""
    return of_bytes(*special_tokens, **changes)


def encoded(tmp_path, sources, tokenizer, **options):
    """Return tokens, document starts and bytes of text."""
    for name, text in sources.items():
        (tmp_path / name).write_text(text, "utf-8")
    paths = [tmp_path / name for name in sources]
    meta = encode_corpus(paths, tmp_path / "t.npy", tokenizer, force=True, **options)
    file = open_tokens(tmp_path / "t.npy")
    assert len(file.documents) == meta.num_documents
    return file.tokens.tolist(), file.documents.tolist(), meta.num_bytes


@pytest.mark.parametrize(
    "sources",
    [
        {"two.jsonl": '{"text": "ab"}\n{"text": "cd"}'},
        {"two.JSONL": '{"text": "ab"}\r\n\r\n{"text": "cd"}\r\n'},
        {"two.ndjson": '{"text": "ab"}\n{"text": ""}\n{"text": "cd"}'},
        {"two.json": '[{"text": "ab"},\n {"text": "cd"}]'},
        {"two.json": '{"text": "ab"}\n{"text": "cd"}\n'},
        *({"one.json": '{\n"text": "ab"\n}', "two.txt": "cd"}, {"a.txt": "ab", "b.txt": "cd</s>\n"}),
        *({"doc.txt": "ab</s>cd</s>\r\n"}, {"begun.txt": "<s>ab</s><s>cd"}),
    ],
)
def test_documents_end_as_the_tokenizer_says(tmp_path, sources):
    tokens, documents, num_bytes = encoded(tmp_path, sources, framed(prefix=(256,)))
    assert tokens == [256, *b"ab", 257, 256, *b"cd", 257]
    assert documents == [0, 4]
    assert num_bytes == 4


def test_a_suffix_that_ends_a_text_is_not_doubled(tmp_path):
    both = framed(prefix=(256,), suffix=(257,))
    assert encoded(tmp_path, {"a": "ab</s>cd"}, both)[0] == [*both.encode("ab"), *both.encode("cd")]


@pytest.mark.parametrize(
    ("name", "text", "separator", "expected"),
    [
        ("a.txt", "ab\n\ncd\n\n", "\n\n", ([*b"ab", 257, *b"cd", 257], [0, 3])),
        ("a.txt", "ab\n--\ncd\n--\n \n", "\n--\n", ([*b"ab", 257, *b"cd", 257], [0, 3])),
        # It cuts no text of JSON lines; there, the token that ends a text is not doubled.
        (
            *("a.jsonl", '{"text": "a\\n\\nb\\n\\n"}\n{"text": "cd"}', "\n\n"),
            ([*b"a\n\nb", 257, *b"cd", 257], [0, 5]),
        ),
        ("a.jsonl", '{"text": "ab</s>"}\n{"text": "cd"}', None, ([*b"ab", 257, *b"cd", 257], [0, 3])),
    ],
)
def test_where_documents_end(tmp_path, name, text, separator, expected):
    assert encoded(tmp_path, {name: text}, framed(), separator=separator)[:2] == expected


def test_a_separator_ends_documents_of_text_files(tmp_path):
    text = {"a.txt": "ab<|endoftext|>\ncd\n<|endoftext|>\n", "b.txt": "</s>"}
    tokens, documents, num_bytes = encoded(tmp_path, text, framed(), separator=END)
    assert tokens == [*b"ab", 257, *b"\ncd\n", 257, 257, 257]
    assert (documents, num_bytes) == ([0, 3, 8, 9], len("ab\ncd\n"))


def test_an_empty_separator_is_refused(tmp_path):
    with raises(UsageError, "corpus.empty_separator", "--separator"):
        encoded(tmp_path, {"a.txt": "ab"}, framed(), separator="")


def test_a_byte_order_mark_is_no_text(tmp_path):
    more = {"b.jsonl": '\ufeff{"text": "cd"}', "c.json": '\ufeff[{"text": "ef"}]'}
    for one_file in (False, True):
        texts = {"a.txt": "\ufeffab\ufeff"} | ({} if one_file else more)
        tokens, _, num_bytes = encoded(tmp_path, texts, framed())
        assert tokens[:6] == [*"ab\ufeff".encode(), 257]
        assert num_bytes == (5 if one_file else 9)


def test_letters_of_another_tokenizers_mark_are_told(tmp_path, caplog):
    tokens, documents, _ = encoded(tmp_path, {"a.txt": f"ab{END}cd{END}"}, framed())
    assert (tokens, documents) == ([*f"ab{END}cd{END}".encode(), 257], [0])
    assert "2 times <|endoftext|>" in caplog.text


def test_documents_need_a_token_that_ends_them(tmp_path):
    without = framed(special_tokens=("<pad>",))
    assert encoded(tmp_path, {"a.txt": "ab"}, without)[:2] == ([*b"ab"], [0])
    for sources in ({"a.txt": "ab", "b.txt": "cd"}, {"a.jsonl": '{"text": "ab"}'}):
        with raises(UsageError, "tokenizer.no_end_of_text", next(iter(sources)), hint="--end-of-text"):
            encoded(tmp_path, sources, without)
    named = without.with_end_of_text("<pad>")
    texts = {"a.txt": "ab", "b.txt": "cd"}
    assert encoded(tmp_path, texts, named)[:2] == ([*b"ab", 256, *b"cd", 256], [0, 3])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ends", [True, False])
def test_documents_have_the_bytes_of_their_text_and_not_of_its_normal_form(tmp_path, story, workers, ends):
    texts = [unicodedata.normalize("NFD", text) for text in story.split(END)[:-1]]
    normal = framed(special_tokens=(END, "saw two") if ends else ("saw two",), nfc=True)
    texts = texts if ends else ["".join(texts)]
    (tmp_path / "a.txt").write_text("".join(text + END * ends for text in texts), "utf-8")
    encode_corpus(tmp_path / "a.txt", tmp_path / "a.npy", normal, workers=workers)
    sizes = open_tokens(tmp_path / "a.npy").sizes
    assert sizes is not None
    assert sizes.tolist() == [len(text.replace("saw two", "").encode()) for text in texts]
    encode_corpus(tmp_path / "a.txt", tmp_path / "b.npy", framed(special_tokens=(END,)), workers=workers)
    assert open_tokens(tmp_path / "b.npy").sizes is None


@pytest.mark.parametrize("other", ["", "<s>"])
def test_documents_have_the_bytes_of_characters_that_have_no_token(tmp_path, other):
    """Of which an unknown token stands in their place, or nothing."""
    vocab = {byte: bytes([byte]) for byte in range(128)}
    for unk in (None, 200):
        special = {"special_tokens": ("<unk>", END, "<s>"), "unk_id": unk}
        names = {200: "<unk>", 201: END, 202: "<s>"}
        letters = Tokenizer(vocab=vocab | names, merges=[], **special)
        (tmp_path / "a.txt").write_text(f"bl\u00fce{END}{other}fish{END}\u00fc{END}", "utf-8")
        encode_corpus(tmp_path / "a.txt", tmp_path / "a.npy", letters, force=True)
        file = open_tokens(tmp_path / "a.npy")
        assert file.sizes is not None
        assert (file.sizes.tolist(), file.meta.num_bytes) == ([5, 4, 2], 11)


def test_special_tokens_that_end_no_document_are_told(tmp_path, caplog):
    """As where a text has the end mark of a base model, and the tokenizer is of a chat model."""
    chat = framed(special_tokens=(END, "<|im_end|>")).with_end_of_text("<|im_end|>")
    assert encoded(tmp_path, {"a.txt": f"ab{END}cd{END}"}, chat)[1] == [0]
    assert f"2 times {END}" in caplog.text
    assert "corpus.separator" in caplog.text
    caplog.clear()
    assert encoded(tmp_path, {"a.txt": f"ab{END}cd{END}"}, chat, separator=END)[1] == [0, 3]
    assert encoded(tmp_path, {"a.txt": "<s>ab</s><s>cd"}, framed(prefix=(256,)))[1] == [0, 4]
    assert not caplog.text


def test_a_separator_is_refused_where_some_texts_are_of_json(tmp_path):
    both = {"a.txt": "ab--cd", "b.jsonl": '{"text": "ab--cd"}'}
    with raises(UsageError, "corpus.mixed_kinds", "a.txt", "b.jsonl"):
        encoded(tmp_path, both, framed(), separator="--")
