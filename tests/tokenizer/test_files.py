"""Tokenizer files: round trips, other libraries, and damage."""

import json
import pickle
import random

import pytest
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.files import to_bytes, to_characters
from lmkit.tokenizer.tokenizer_json import to_json


def test_round_trip(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    for attribute in ("vocab", "merges", "special_ids", "sha256"):
        assert getattr(loaded, attribute) == getattr(trained, attribute)


def test_the_text_is_that_of_json_dumps_and_stays_the_same():
    """Token files and checkpoints record its hash."""
    vocab = {i: bytes([i]) for i in range(256)} | {256: b'"\\', 257: b' "\\'}
    merges = [(b'"', b"\\"), (b" ", b'"\\')]
    tokenizer = Tokenizer(vocab=vocab, merges=merges, special_tokens=('<|"end"|>\n',))
    text = to_json(tokenizer)
    assert json.dumps(json.loads(text), ensure_ascii=False) == text
    assert tokenizer.sha256 == "4c41a5e0b2f61009398d17ebc3b685d9f3beb14cf160df7e5a19cff2921a3c46"


def test_a_special_token_that_reads_like_an_ordinary_one_is_refused():
    vocab = {i: bytes([i]) for i in range(256)} | {256: b" the"}
    tokenizer = Tokenizer(vocab=vocab, merges=[], special_tokens=("Ġthe",))
    assert tokenizer.encode(" theĠthe") != []
    with raises(UsageError, "tokenizer.special_tokens"):
        to_json(tokenizer)


def test_hugging_face_loads_it_agrees_and_writes_it(trained, tmp_path, real_text):
    tokenizers = pytest.importorskip("tokenizers")
    trained.save(tmp_path / "ours.json")
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "ours.json"))
    text = real_text + "<|endoftext|><|pad|> <|two words|>\n\n<|pad|>  x"
    assert other.encode(text).ids == trained.encode(text)
    assert other.decode(trained.encode(text), skip_special_tokens=False) == text
    assert other.get_vocab_size() == trained.vocab_size
    other.save(str(tmp_path / "theirs.json"))
    assert Tokenizer.load(tmp_path / "theirs.json").sha256 == trained.sha256


def test_gpt2_files(trained, tmp_path, real_text):
    trained.save_gpt2(tmp_path)
    loaded = Tokenizer.load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert loaded.special_ids == trained.special_ids
    assert loaded.encode(real_text) == trained.encode(real_text)
    assert (tmp_path / "merges.txt").read_text("utf-8").startswith("#version: 0.2\n")


def test_fault_115_what_gpt2_files_cannot_hold_is_said(tmp_path, caplog):
    vocab = {i: bytes([i]) for i in range(256)}
    tokenizer = Tokenizer(vocab=vocab, merges=[], special_tokens=("<s>", "</s>"), prefix=[256], suffix=[257])
    tokenizer.save_gpt2(tmp_path)
    (record,) = caplog.records
    assert "<s>" in record.getMessage()
    assert "</s>" in record.getMessage()


@pytest.mark.parametrize("kept", [0, 40])
def test_fault_127_a_cut_list_of_merges_is_damage(trained, tmp_path, kept):
    trained.save_gpt2(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_text("\n".join(merges.read_text().splitlines()[: 1 + kept]))
    with pytest.raises(LmkitError) as caught:
        Tokenizer.load_gpt2(tmp_path / "vocab.json", merges)
    assert str(merges) in caught.value.message


def test_gpt2_files_with_their_own_order_of_bytes(tmp_path):
    """GPT-2 numbers the visible bytes first, and its end-of-text token is in the vocabulary."""
    visible = sorted(range(256), key=lambda byte: (ord(to_characters(bytes([byte]))), byte))
    vocab = {to_characters(bytes([byte])): i for i, byte in enumerate(visible)}
    vocab |= {"Ġt": 256, "he": 257, "Ġthe": 258, "<|endoftext|>": 259}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ t\nh e\nĠt he\n", "utf-8")
    tokenizer = Tokenizer.load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert tokenizer.special_ids == {"<|endoftext|>": 259}
    assert tokenizer.encode(" the he!<|endoftext|>") == [258, vocab["Ġ"], 257, vocab["!"], 259]
    assert tokenizer.encode(" the" * 5000) == [258] * 5000


def test_a_merge_that_begins_like_a_comment(tmp_path):
    vocab = {i: bytes([i]) for i in range(256)} | {256: b"#v"}
    tokenizer = Tokenizer(vocab=vocab, merges=[(b"#", b"v")], special_tokens=())
    tokenizer.save_gpt2(tmp_path)
    assert Tokenizer.load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt").merges == [(b"#", b"v")]


def test_fault_31_cut_at_any_byte(tmp_path):
    vocab = {i: bytes([i]) for i in range(256)} | {256: b"he", 257: "é".encode()}
    tokenizer = Tokenizer(
        vocab=vocab, merges=[(b"h", b"e"), (b"\xc3", b"\xa9")], special_tokens=("<|endoftext|>",)
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    whole = path.read_bytes()
    rng = random.Random(0)
    for size in [0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 300)]:
        path.write_bytes(whole[:size])
        with pytest.raises(LmkitError, match=r"tokenizer\.json") as caught:
            Tokenizer.load(path)
        assert (caught.value.code, caught.value.exit_code) == ("tokenizer.damaged_file", 1)
    path.write_bytes(whole)
    assert Tokenizer.load(path).sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[]", "tokenizer.damaged_file"),
        ("{}", "tokenizer.damaged_file"),
        ('{"model": 3}', "tokenizer.damaged_file"),
        ('{"model": {"type": "BPE"}, "pre_tokenizer": null, "added_tokens": []}', "tokenizer.unsupported"),
    ],
)
def test_fault_31_other_content(tmp_path, content, code):
    (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(LmkitError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path / "tokenizer.json")
    assert caught.value.code == code
    assert caught.value.hint


@pytest.fixture
def foreign(tmp_path):
    """Writes a small tokenizer.json with changes, `{dotted path: value}`."""

    def write(changes):
        merges = [(b"h", b"e"), (b"he", b"l"), (b"l", b"l"), (b"o", b" ")]
        path = tmp_path / "foreign.json"
        Tokenizer.from_merges(merges, ["<s>", "</s>"]).save(path)  # ids 260 and 261
        content = json.loads(path.read_text("utf-8"))
        for dotted, value in changes.items():
            place, (*parents, last) = content, [int(k) if k.isdigit() else k for k in dotted.split(".")]
            for key in parents:
                place = place[key]
            place[last] = value
        path.write_text(json.dumps(content), "utf-8")
        return path

    return write


A = {"Sequence": {"id": "A", "type_id": 0}}
BEGIN, END = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("<s>", "</s>"))
OFFSETS = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(*single, begin=(260,)):
    special_tokens = {
        text: {"id": text, "ids": ids, "tokens": [text] * len(ids)}
        for text, ids in (("<s>", list(begin)), ("</s>", [261]))
    }
    pair = [A, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special_tokens}


PADDING = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"post_processor": OFFSETS}, [], []),
        ({"post_processor": template(BEGIN, A)}, [260], []),
        ({"post_processor": template(BEGIN, A, END, begin=(260, 7))}, [260, 7], [261]),
        ({"post_processor": {"type": "Sequence", "processors": [OFFSETS, template(A, END)]}}, [], [261]),
        (
            {"post_processor": {"type": "BertProcessing", "cls": ["<s>", 260], "sep": ["</s>", 261]}},
            [260],
            [261],
        ),
        (
            {
                "post_processor": {
                    "type": "RobertaProcessing",
                    "cls": ["<s>", 260],
                    "sep": ["</s>", 261],
                    "trim_offsets": True,
                    "add_prefix_space": False,
                }
            },
            [260],
            [261],
        ),
        ({"model.merges": [["l", "l"], ["h", "e"], ["he", "l"], ["o", "\u0120"], ["l", "l"]]}, [], []),
        ({"model.continuing_subword_prefix": "", "model.dropout": 0.0, "model.unk_token": "<s>"}, [], []),
        ({"added_tokens.0.normalized": True, "added_tokens.1.special": False}, [], []),
        ({"padding": PADDING | {"pad_to_multiple_of": None}}, [], []),
        ({"truncation": TRUNCATION, "padding": PADDING, "post_processor": template(BEGIN, A)}, [260], []),
    ],
)
def test_fault_103_a_foreign_tokenizer_gives_the_ids_of_hugging_face(
    foreign, changes, before, after, caplog, tmp_path
):
    tokenizers = pytest.importorskip("tokenizers")
    path = foreign(changes)
    ours, theirs = Tokenizer.load(path), tokenizers.Tokenizer.from_file(str(path))
    ignored = {"truncation", "padding"} & set(changes)
    assert len(caplog.records) == bool(ignored)
    assert all(field in caplog.text for field in ignored)
    theirs.no_truncation()
    theirs.no_padding()
    ours.save(tmp_path / "again.json")
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "again.json"))
    assert Tokenizer.load(tmp_path / "again.json").sha256 == pickle.loads(pickle.dumps(ours)).sha256
    for text in ("", "hello <s>hell</s> o ", "llll"):
        assert ours.encode(text) == theirs.encode(text).ids == again.encode(text).ids
        plain = ours.encode(text, add_special_tokens=False)
        assert [*before, *plain, *after] == ours.encode(text) == ours.encode_bytes(text.encode())
        assert [*before, *plain, *after] == list(ours.encode_iterable([text]))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        *[(field, {field: value}) for field, value in (
            ("model.continuing_subword_prefix", "##"), ("model.end_of_word_suffix", "</w>"),
            ("model.dropout", 0.1), ("normalizer", {"type": "NFKC"}),
            ("pre_tokenizer.add_prefix_space", True), ("pre_tokenizer.use_regex", False),
            ("pre_tokenizer", {"type": "Whitespace"}), ("pre_tokenizer", None), ("model.type", "Unigram"),
        )],
        *[(f"added_tokens[1].{key}", {f"added_tokens.1.{key}": True}) for key in ("lstrip", "rstrip", "single_word")],
        ("added_tokens[0].id", {"added_tokens.0.id": 300}),
        ("added_tokens[1].normalized", {"added_tokens.1.normalized": True, "added_tokens.1.content": "s>h",
                                        "added_tokens.1.id": 262}),
        ("post_processor.processors[1]",
         {"post_processor": {"type": "Sequence", "processors": [template(BEGIN, A), template(A, END)]}}),
        ("post_processor", {"post_processor": template(A, A)}),
        ("post_processor", {"post_processor": template(BEGIN)}),
        ("post_processor", {"post_processor": {"type": "Other"}}),
    ],
)  # fmt: skip
def test_fault_103_a_field_that_would_change_the_ids_is_named(foreign, terminal, field, changes):
    path = foreign(changes)
    refusal = terminal.refuses("tokenizer", "encode", path, "hello", code="tokenizer.unsupported")
    assert f" {field} = " in refusal.error
    assert path.name in refusal.error


def test_fault_103_a_post_processor_with_an_unknown_id_is_damage(foreign):
    for ids in ([9999], [True], [[1]], ["<s>"]):
        with pytest.raises(LmkitError, match=r"foreign\.json") as caught:
            Tokenizer.load(foreign({"post_processor": template(BEGIN, A, begin=ids)}))
        assert caught.value.code == "tokenizer.damaged_file"


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json") as caught:
        Tokenizer.load(tmp_path / "none.json")
    assert caught.value.code == "tokenizer.unreadable"


def test_the_alphabet_is_a_bijection():
    every = bytes(range(256))
    assert to_bytes(to_characters(every)) == every
    assert to_characters(b" the\n") == "ĠtheĊ"
    for character in (" ", "\u0000", "日", "\u00ad"):
        with pytest.raises(ValueError):  # noqa: PT011
            to_bytes(character)
