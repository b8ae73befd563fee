"""The special tokens that begin and end a text, in the files beside a tokenizer."""

import pickle

import pytest
from byte_tokenizers import of_bytes
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.marks import NO_MARKS, Marks

SPECIAL = ("<s>", "<|im_end|>", "<end>")  # ids 256, 257, 258: none of them has a conventional name
BEGIN, TURN, END = 256, 257, 258


def as_object(text):
    return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": False}


def test_the_tokenizer_of_a_training_begins_texts_as_token_files_begin_documents(folder):
    named = Tokenizer.load(folder(tokenizer_config={"bos_token": "<s>", "eos_token": "<end>"}))
    trained = named.for_training()
    assert (named.start_id, trained.start_id, trained.end_of_text_id) == (BEGIN, END, END)
    assert trained.sha256 == named.sha256
    prefixed = of_bytes(*SPECIAL, prefix=[BEGIN], marks=Marks("<s>", "<end>"))
    assert prefixed.for_training() is prefixed


@pytest.mark.parametrize("described", [str, as_object])
def test_a_token_as_text_or_as_an_object(folder, described):
    named = {"bos_token": described("<s>"), "eos_token": described("<end>")}
    tokenizer = Tokenizer.load(folder(tokenizer_config=named))
    assert tokenizer.marks == Marks("<s>", "<end>", (END,))
    assert (tokenizer.start_id, tokenizer.end_of_text_id) == (BEGIN, END)


@pytest.mark.parametrize("nothing", [None, "", {}, {"content": None}, 3])
def test_no_token_leaves_a_conventional_name(folder, nothing):
    named = {"bos_token": nothing, "eos_token": nothing}
    tokenizer = Tokenizer.load(folder(tokenizer_config=named))
    assert tokenizer.marks == NO_MARKS
    assert (tokenizer.start_id, tokenizer.end_of_text_id) == (None, None)
    assert Tokenizer.load(folder(special=("</s>",), tokenizer_config=named)).marks == Marks(
        None, "</s>", (256,)
    )


@pytest.mark.parametrize(
    ("ids", "end", "stops"),
    [
        (END, "<end>", (END,)),
        ([TURN, END], "<|im_end|>", (TURN, END)),
        ([10, END], "<end>", (END, 10)),  # 10 is a newline: generation stops there, but no text ends with it
        *((10, None, (10,)), ([], None, ()), (None, None, ()), ([True, "258", 1.0], None, ())),
    ],
)
@pytest.mark.parametrize("stem", ["generation_config", "config"])
def test_ids(folder, ids, end, stops, stem):
    tokenizer = Tokenizer.load(folder(**{stem: {"eos_token_id": ids, "bos_token_id": 0}}))
    assert tokenizer.marks == Marks(None, end, stops)


def test_which_file_counts(folder):
    named, generation = {"eos_token": "<end>"}, {"eos_token_id": [TURN, END]}
    path = folder(tokenizer_config=named, generation_config=generation, config={"eos_token_id": 3})
    assert Tokenizer.load(path).marks == Marks(None, "<end>", (END, TURN))
    path.with_name("generation_config.json").write_text("{}")
    assert Tokenizer.load(path).marks == Marks(None, "<end>", (END, 3))
    path.with_name("tokenizer_config.json").unlink()
    path.with_name("generation_config.json").write_text('{"eos_token_id": null}')
    assert Tokenizer.load(path).marks == NO_MARKS


def test_saved_loaded_and_pickled(folder, tmp_path):
    path = folder(
        tokenizer_config={"bos_token": "<s>", "eos_token": "<end>"},
        generation_config={"eos_token_id": [END, TURN, 10], "temperature": 0.5},
    )
    tokenizer = Tokenizer.load(path)
    again = tmp_path / "again" / "tokenizer.json"
    again.parent.mkdir()
    again.write_text("{}")  # the tokenizer that is replaced, with its marks
    (again.parent / "tokenizer_config.json").write_text('{"eos_token": "gone"}')
    (again.parent / "generation_config.json").write_text('{"eos_token_id": 1}')
    tokenizer.save(again)
    for copy in (Tokenizer.load(again), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.marks == tokenizer.marks == Marks("<s>", "<end>", (END, TURN, 10))
        assert copy.sha256 == tokenizer.sha256
    described = [again.parent / name for name in ("tokenizer_config.json", "generation_config.json")]
    written = [file.stat().st_mtime_ns for file in described]
    tokenizer.save(again)  # the files say the same already
    assert [file.stat().st_mtime_ns for file in described] == written


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("tokenizer_config.json", '{"eos_token": "gone", "other": 2}'),
        ("tokenizer_config.json", '{"eos_token": "gone"}'),
        ("generation_config.json", '{"eos_token_id": [1]}'),
        ("generation_config.json", '{"eos_token_id": 1, "other": 2}'),
    ],
)
def test_a_file_of_somebody_else_beside_a_new_tokenizer_is_left_alone(name, theirs, tmp_path):
    (tmp_path / name).write_text(theirs)
    tokenizer = Tokenizer.from_merges([], ["<|endoftext|>"])
    with raises(UsageError, "tokenizer.replaces_marks", tmp_path / name):
        tokenizer.save(tmp_path / "tokenizer.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, theirs)]


def test_files_beside_a_tokenizer_of_another_name_are_not_its_own(folder, tmp_path):
    path = folder(name="gpt2.json", tokenizer_config={"eos_token": "<end>"}, config={"eos_token_id": 10})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.marks == NO_MARKS
    ended = tokenizer.with_end_of_text("<end>")
    with raises(UsageError, "tokenizer.marks", tmp_path / "other.json", hint="tokenizer.json"):
        ended.save(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
    ended.save(tmp_path / "new" / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "new" / "tokenizer.json").end_of_text_id == END


def test_another_end_is_another_tokenizer(folder):
    plain = Tokenizer.load(folder())
    hashes = {plain.sha256, *(plain.with_end_of_text(text).sha256 for text in SPECIAL)}
    assert len(hashes) == 4
    conventional = Tokenizer.from_merges([], ["<|endoftext|>"])
    assert conventional.with_end_of_text("<|endoftext|>").sha256 == conventional.sha256
    with raises(UsageError, "tokenizer.end_of_text", "<none>", hint="<end>"):
        plain.with_end_of_text("<none>")


@pytest.mark.parametrize("content", [b"", b'{"eos_token": ', b"[]", b"\xff{}", b"[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_a_damaged_file_is_named(folder, name, content):
    path = folder()
    path.with_name(name).write_bytes(content)
    with raises(LmkitError, "tokenizer.damaged_marks", path.with_name(name)):
        Tokenizer.load(path)


def test_an_end_that_the_vocabulary_lacks(folder):
    path = folder(tokenizer_config={"eos_token": "<none>", "bos_token": "<no>"})
    with raises(UsageError, "tokenizer.unsupported", path.with_name("tokenizer_config.json"), "<none>"):
        Tokenizer.load(path)
    path = folder(tokenizer_config={"bos_token": "<no>"})
    assert Tokenizer.load(path).marks == NO_MARKS


# ---- older folders

NAMES = ("<|endoftext|>", "<s>", "</s>")


def theirs(path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    return transformers.AutoTokenizer.from_pretrained(path.parent)


@pytest.mark.parametrize(
    ("config", "older", "end"),
    [
        ({}, {"eos_token": "</s>", "bos_token": "<s>"}, 258),
        ({}, {"eos_token": {"content": "</s>", "lstrip": False, "normalized": False}}, 258),
        ({"eos_token": "<s>"}, {"eos_token": "</s>"}, 258),
        ({"eos_token": "<s>"}, {"pad_token": "</s>"}, 257),
        ({"eos_token": "<s>", "added_tokens_decoder": {}}, {"eos_token": "</s>"}, 257),
    ],
)
def test_older_folders_name_the_end_of_a_text_in_special_tokens_map(folder, caplog, config, older, end):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    path = folder(special=NAMES, tokenizer_config=config, special_tokens_map=older)
    ours = Tokenizer.load(path)
    assert ours.end_of_text_id == end == theirs(path).eos_token_id
    assert not caplog.text
    if "eos_token" in older and "added_tokens_decoder" not in config:
        path.with_name("tokenizer_config.json").unlink()
        with raises(UsageError, "tokenizer.replaces_marks", path.with_name("special_tokens_map.json")):
            Tokenizer.from_merges([], ["<end>"]).with_end_of_text("<end>").save(path)


def test_older_folders_add_tokens_in_added_tokens(folder, caplog):
    added = {"<b>": 260, "<a>": 259, "<s>": 257}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<b>"}
    path = folder(special=NAMES, tokenizer_config=config, added_tokens=added)
    ours, text = Tokenizer.load(path), "<a><b> <s>"
    assert ours.encode(text) == theirs(path)(text)["input_ids"] == [259, 260, 32, 257]
    assert {token.text for token in ours.added_tokens if not token.special} == {"<a>"}
    assert not caplog.text
    path = folder(special=NAMES, added_tokens={"<a>": 300})
    with raises(UsageError, "tokenizer.unsupported", "added_tokens.json", "<a>"):
        Tokenizer.load(path)
