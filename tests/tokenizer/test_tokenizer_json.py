"""`tokenizer.json`, of lmkit and of others: the ids of Hugging Face's library, or a refusal that names the field."""

import itertools
import json
import pickle
import random
import time

import pytest
import tokenizer_families as families
from marking import full_except
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chunks import exact_chunks
from lmkit.tokenizer.engine import new_encoder
from lmkit.tokenizer.files import to_characters, to_json
from lmkit.tokenizer.pretokenize import AddedToken


def test_the_text_is_that_of_json_dumps_and_stays_the_same():
    """Token files and checkpoints record its hash."""
    tokenizer = Tokenizer.from_merges([(b'"', b"\\"), (b" ", b'"\\')], ['<|"end"|>\n'])
    text = to_json(tokenizer)
    assert json.dumps(json.loads(text), ensure_ascii=False) == text
    assert tokenizer.sha256 == "4c41a5e0b2f61009398d17ebc3b685d9f3beb14cf160df7e5a19cff2921a3c46"


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


def test_fault_31_cut_at_any_byte(tmp_path):
    tokenizer = Tokenizer.from_merges([(b"h", b"e"), (b"\xc3", b"\xa9")], ["<|endoftext|>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    whole = path.read_bytes()
    rng = random.Random(0)
    for size in [0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 300)]:
        path.write_bytes(whole[:size])
        with raises(LmkitError, "tokenizer.damaged_file", "tokenizer.json") as caught:
            Tokenizer.load(path)
        assert caught.value.exit_code == 1
    path.write_bytes(whole)
    assert Tokenizer.load(path).sha256 == tokenizer.sha256


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


MARKS = ("<s>", "</s>")
A = {"Sequence": {"id": "A", "type_id": 0}}
BEGIN, END = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("<s>", "</s>"))
AROUND = {"cls": ["<s>", 260], "sep": ["</s>", 261]}
ROBERTA = {"trim_offsets": True, "add_prefix_space": False}
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
        ({"post_processor": {"type": "BertProcessing", **AROUND}}, [260], [261]),
        ({"post_processor": {"type": "RobertaProcessing", **AROUND, **ROBERTA}}, [260], [261]),
        ({"model.merges": [["l", "l"], ["h", "e"], ["he", "l"], ["o", "\u0120"], ["l", "l"]]}, [], []),
        ({"model.continuing_subword_prefix": "", "model.dropout": 0.0, "model.unk_token": "<s>"}, [], []),
        ({"model.byte_fallback": True, "model.fuse_unk": None}, [], []),
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
        assert [*before, *plain, *after] == ours.encode(text)
        assert [*before, *plain, *after] == list(ours.encode_iterable([text]))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        *[(field, {field: value}) for field, value in (
            ("model.continuing_subword_prefix", "##"), ("model.end_of_word_suffix", "</w>"),
            ("model.dropout", 0.1), ("normalizer", {"type": "NFKC"}),
            ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
            ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "_"}),
            ("pre_tokenizer", {"type": "Whitespace"}), ("pre_tokenizer", None), ("model.type", "Unigram"),
        )],
        ("pre_tokenizer", {"pre_tokenizer.add_prefix_space": True}),
        ("pre_tokenizer", {"pre_tokenizer.use_regex": False}),
        ("added_tokens[1].single_word", {"added_tokens.1.single_word": True}),
        ("added_tokens[0].id", {"added_tokens.0.id": 300}),
        ("added_tokens[1].id", {"added_tokens.1.content": "<new>", "added_tokens.1.id": 300}),
        ("added_tokens[1].normalized", {"added_tokens.1": families.added("e\u0301", 262, normalized=True),
                                        "normalizer": {"type": "NFC"}}),
        ("model.byte_fallback", {"model.byte_fallback": True, "model.vocab": {"a": 0, "<s>": 260, "</s>": 261},
                                 "model.merges": []}),
        ("model.unk_token", {"model.unk_token": "?!", "model.vocab": {"a": 0, "<s>": 260, "</s>": 261},
                             "model.merges": []}),
        ("model.vocab", {"model.vocab.!": 1}),
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


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        ([("<b>", 258), ("<a>", 259)], [*b"hi ", 259, 32, 257, 32, 258, 32, 257]),
        ([("<a>", 259), ("<b>", 258)], [*b"hi ", 259, 32, 257, 32, 258, 32, 257]),
        ([("<a>", 258, False, False)], [*b"hi ", 258, 32, 257, *b" <b> ", 257]),
        ([("h", 104)], [*b"hi <a> ", 257, *b" <b> ", 257]),
    ],
)
def test_tokens_that_the_config_adds_are_found_as_in_transformers(folder, tokens, ids, tmp_path):
    found = {str(token[1]): families.added(*token) for token in tokens}
    path = folder(
        special=MARKS,
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": found},
    )
    ours, text = Tokenizer.load(path), "hi <a> </s> <b> </s>"
    assert ours.encode(text) == ids
    ours.save(tmp_path / "again.json")
    assert Tokenizer.load(tmp_path / "again.json").encode(text) == ids
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(path.parent)(text)["input_ids"] == ids


def test_tokens_that_only_other_keys_of_the_config_name_are_told(folder, caplog):
    Tokenizer.load(
        folder(
            special=MARKS,
            tokenizer_config={"pad_token": "</s>", "additional_special_tokens": ["<s>", {"content": "</s>"}]},
        )
    )
    assert not caplog.text
    Tokenizer.load(
        folder(
            special=MARKS, tokenizer_config={"mask_token": "<m>", "extra_special_tokens": {"image": "<i>"}}
        )
    )
    assert "<i>" in caplog.text
    assert "<m>" in caplog.text


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"added_tokens_decoder": {"300": families.added("<a>", 300)}}, "added_tokens_decoder.300.id"),
        ({"added_tokens_decoder": {"258": families.added("<a>", 258, single_word=True)}}, "258.single_word"),
        ({"add_prefix_space": True}, "add_prefix_space"),
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}, "add_prefix_space"),
    ],
)
def test_what_the_config_would_change_otherwise_is_refused_by_name(folder, config, field):
    with raises(UsageError, "tokenizer.unsupported", "tokenizer_config.json", field):
        Tokenizer.load(folder(special=MARKS, tokenizer_config=config))


@pytest.mark.parametrize("decoder", [[1], {"x": {"content": "<a>"}}, {"258": {}}, {"258": "<a>"}])
def test_a_damaged_config_is_named(folder, decoder):
    with raises(LmkitError, "tokenizer.damaged_marks", "tokenizer_config.json", "added_tokens_decoder"):
        Tokenizer.load(folder(special=MARKS, tokenizer_config={"added_tokens_decoder": decoder}))


def test_fault_103_a_post_processor_with_an_unknown_id_is_damage(foreign):
    for ids in ([9999], [True], [[1]], ["<s>"]):
        with raises(LmkitError, "tokenizer.damaged_file", "foreign.json"):
            Tokenizer.load(foreign({"post_processor": template(BEGIN, A, begin=ids)}))


def test_names_that_two_tokens_have():
    """A special token that is written like an ordinary one is that token, as in Hugging Face's library."""
    vocab = {i: bytes([i]) for i in range(256)} | {256: b" the"}
    tokenizer = Tokenizer(vocab=vocab, merges=[], special_tokens=("Ġthe", "a", "é"))
    assert tokenizer.special_ids == {"Ġthe": 256, "a": ord("a"), "é": 0xE9}
    assert tokenizer.encode(" theĠthe a") == [*b" the", 256, *b" a"]


@pytest.mark.parametrize(("name", "whole_words"), [("Ā", False), ("Ġthe", True)])
def test_a_special_token_that_others_would_read_as_text_is_refused(name, whole_words):
    """The vocabulary lacks the byte, or the word, that the name stands for."""
    vocab = {i: bytes([i]) for i in range(1, 256)}
    tokenizer = Tokenizer(vocab=vocab, merges=[], special_tokens=(name,), whole_words=whole_words)
    assert tokenizer.encode(f"b{name}") == [ord("b"), 256]
    with raises(UsageError, "tokenizer.special_tokens", name):
        to_json(tokenizer)


def test_text_that_is_an_added_token_stays_one_without_special_tokens(foreign):
    path = foreign({"added_tokens.1.special": False})
    ours = Tokenizer.load(path)
    assert ours.special_tokens == ("<s>",)
    assert ours.added_tokens == (AddedToken("<s>"), AddedToken("</s>", special=False))
    assert ours.encode("<s></s>", allowed_special=()) == [*b"<s>", 261]


def test_a_token_that_ends_a_text_is_special(tmp_path, foreign):
    """As in transformers, also if tokenizer.json does not say so."""
    transformers = pytest.importorskip("transformers")
    path = foreign({"added_tokens": []}).rename(tmp_path / "tokenizer.json")
    named = {"eos_token": "</s>", "bos_token": "he", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    ours, theirs = Tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special_ids == {"he": 256, "</s>": 261}
    assert (ours.end_of_text_id, ours.start_id) == (261, 256)
    for text in ("hello</s>", "<s>help"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode("hel") == [256, ord("l")]


def test_loading_does_not_compare_every_added_token_with_every_token(foreign):
    names = {f"<{i}>": 262 + i for i in range(50_000)}
    vocab = {to_characters(bytes([byte])): byte for byte in range(256)} | {"<s>": 260, "</s>": 261} | names
    tokens = [families.added(name, token_id) for name, token_id in list(names.items())[:5000]]
    path = foreign({"added_tokens": tokens, "model.vocab": vocab, "model.merges": []})
    start = time.process_time()
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<7><70><7000") == [269, 332, *b"<7000"]
    assert time.process_time() - start < 4  # comparing takes ten seconds


# ---- files of ten families


def agrees(name, content, folder, number, transformers=None):
    """Compare the ids of `number` random texts; return False if lmkit refuses the file."""
    tokenizers = pytest.importorskip("tokenizers")
    path, again = folder / f"{name}.json", folder / name / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    theirs = tokenizers.Tokenizer.from_file(str(path))
    try:
        ours = Tokenizer.load(path)
    except UsageError as error:
        assert error.code == "tokenizer.unsupported"
        return False
    again.parent.mkdir()
    ours.save(again)
    others = [tokenizers.Tokenizer.from_file(str(again))]
    if transformers is not None:
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (again.parent / "tokenizer_config.json").write_text(json.dumps(described))
        others.append(transformers.AutoTokenizer.from_pretrained(again.parent)._tokenizer)
    copy = pickle.loads(pickle.dumps(Tokenizer.load(again)))
    assert copy.sha256 == ours.sha256
    encode, rng = new_encoder(copy.merge_table), random.Random(name)
    added = [token["content"] for token in content["added_tokens"]]
    for _ in range(number):
        text = families.random_text(rng, added)
        right = theirs.encode(text).ids
        assert ours.encode(text) == right, text
        for other in others:
            assert other.encode(text).ids == right, text
        chunks = exact_chunks([text.encode()], copy.specials, size=12)
        parts = [encode(chunk.data, copy.specials)[0].tolist() for chunk in chunks]
        assert [*copy.prefix, *itertools.chain.from_iterable(parts), *copy.suffix] == right, text
    return True


@pytest.mark.parametrize("family", families.FAMILIES)
def test_families(family, tmp_path, code):
    transformers = pytest.importorskip("transformers") if code == "native" else None
    variants = ("plain", "odd", "older", "fused") if code == "native" else ("odd", "seen")
    for name, content in families.files([family], variants):
        assert agrees(name, content, tmp_path, 20, transformers) == (family not in families.REFUSED)


@pytest.mark.parametrize("number", full_except(200, 1500))
def test_any_files(tmp_path, code, number):
    tokenizers = pytest.importorskip("tokenizers")
    path, again, refused = tmp_path / "given.json", tmp_path / "again.json", 0
    for seed in range(number):
        rng = random.Random(seed)
        content = families.random_file(rng)
        path.write_text(json.dumps(content), "utf-8")
        others = [tokenizers.Tokenizer.from_file(str(path))]
        try:
            ours = Tokenizer.load(path)
            ours.save(again)
            others.append(tokenizers.Tokenizer.from_file(str(again)))
        except UsageError as error:
            assert error.code in ("tokenizer.unsupported", "tokenizer.special_tokens")
            refused += 1
            if error.code == "tokenizer.unsupported":
                continue
        parts = [*families.CHARACTERS, *(token["content"] for token in content["added_tokens"])]
        for _ in range(20):
            text = "".join(rng.choices(parts, k=rng.randint(0, 14)))
            ids = ours.encode(text)
            for other in others:
                assert ids == other.encode(text).ids, (seed, text)
    assert refused < 0.6 * number


def test_missing_file(tmp_path):
    with raises(UsageError, "tokenizer.unreadable", "none.json"):
        Tokenizer.load(tmp_path / "none.json")
