"""Token files of llm.c and modded-nanogpt: read, written, and refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from byte_tokenizers import of_bytes
from raising import raises

from lmkit.data import bin_files, token_files
from lmkit.data.bin_files import bin_writer
from lmkit.data.encoding import encode_corpus
from lmkit.data.packing import PackedBatches
from lmkit.data.shards import open_tokens, read_meta, with_num_bytes
from lmkit.errors import LmkitError, UsageError
from lmkit.storage.atomic import PARTIAL_SUFFIX

GPT2, LLAMA3 = (20240520, 1, "<u2"), (20240801, 7, "<u4")
END = "<|endoftext|>"
TEXTS = ("one fish two fish", "red fish", "", "blüe fish and a longer line of fish", "x")


def write(path, ids, form=GPT2, *, count=None):
    """As llm.c's `write_datafile`."""
    magic, version, dtype = form
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


@pytest.mark.parametrize(
    ("form", "mark", "dtype"), [(GPT2, 50256, np.uint16), (LLAMA3, 128000, np.uint32)], ids=["gpt2", "llama3"]
)
def test_shards_of_llm_c(tmp_path, form, mark, dtype):
    ids = [mark, 5, 6, mark, 7, 8, 9]
    file = open_tokens(write(tmp_path / "a.bin", ids, form))
    assert isinstance(file.tokens, np.memmap)
    assert (file.tokens.dtype, file.tokens.tolist()) == (dtype, ids)
    assert file.documents.tolist() == [1, 4]
    meta = file.meta
    assert (meta.num_tokens, meta.num_documents, meta.num_bytes, meta.vocab_size) == (7, 2, 0, mark + 1)
    assert meta.tokenizer_sha256 == ""
    assert open_tokens(tmp_path / "a.bin", vocab_size=150_000).meta.vocab_size == 150_000
    write(tmp_path / "a.bin", [*ids[:-1], 10], form)
    assert read_meta(tmp_path / "a.bin").source_sha256 != meta.source_sha256


@pytest.mark.parametrize(
    ("shards", "starts"),
    [
        ([[9, 5, 6], [9, 7, 8]], [1, 4]),
        ([[9, 5, 6], [7, 9, 8]], [1, 5]),  # the first document goes on in the second shard
        ([[9, 5, 9], [7, 8]], [1, 3]),
        ([[5, 6, 9, 7], [8, 9]], [0, 3]),  # the token stands behind each document
        ([[9], [5, 9, 9]], [1, 3]),  # with an empty document
        ([[9, 9]], [1]),
    ],
)
def test_documents_begin_after_the_end_of_text_token_wherever_it_stands(tmp_path, shards, starts):
    tokenizer = of_bytes(END)
    for number, ids in enumerate(shards):
        write(tmp_path / f"{number}.bin", [256 if i == 9 else i for i in ids])
    file = open_tokens(tmp_path / "*.bin", tokenizer=tokenizer)
    assert file.documents.tolist() == starts
    assert file.meta.num_documents == len(starts)
    assert (file.meta.vocab_size, file.meta.tokenizer_sha256) == (257, tokenizer.sha256)


@pytest.mark.parametrize("piece", [100, 1 << 24])
def test_ids_beyond_the_vocabulary_are_named_with_their_position(tmp_path, piece, monkeypatch):
    monkeypatch.setattr(token_files, "_CHECK_TOKENS", piece)
    ids = [50256, *range(500)]
    write(tmp_path / "a.bin", [*ids, 50304, 60000])
    with raises(LmkitError, "tokens.damaged", "a.bin", "50304", "position 501", hint="model.vocab_size"):
        open_tokens(tmp_path / "a.bin", vocab_size=50304)
    assert open_tokens(tmp_path / "a.bin", vocab_size=60001).documents.tolist() == [1]


def test_damaged_files_are_refused_by_name_and_position(tmp_path):
    path = write(tmp_path / "a.bin", [50256, 1, 2, 3])
    whole = path.read_bytes()
    for size in (0, 3, 4, 1023, 1024, 1025, len(whole) - 1):
        path.write_bytes(whole[:size])
        code = "tokens.no_header" if size < 4 else "tokens.damaged"
        with raises(LmkitError, code, "a.bin", "" if size < 4 else "1024"):
            open_tokens(path)
    path.write_bytes(whole + b"\1")
    with raises(LmkitError, "tokens.damaged", "a.bin", "4.5 tokens", "4 in its header"):
        open_tokens(path)
    with raises(LmkitError, "tokens.damaged", "-1 in its header"):
        open_tokens(write(path, [1, 2], count=-1))
    with raises(LmkitError, "tokens.other_format", "a.bin", "version 3", "byte 4"):
        open_tokens(write(path, [1, 2], (20240520, 3, "<u2")))
    with raises(LmkitError, "tokens.empty", "a.bin"):
        open_tokens(write(path, []))


def test_raw_ids_of_nanogpt_are_refused_and_the_hint_converts_them(tmp_path):
    ids = [50256, *range(2000)]
    np.array(ids, np.uint16).tofile(tmp_path / "train.bin")
    with raises(LmkitError, "tokens.no_header", "train.bin", hint="nanoGPT") as error:
        open_tokens(tmp_path / "train.bin")
    _, code, _ = error.value.hint.split('"')
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert open_tokens(tmp_path / "new.bin").tokens.tolist() == ids


def test_shards_of_two_forms_are_no_sequence(tmp_path):
    write(tmp_path / "a.bin", [1, 2])
    write(tmp_path / "b.bin", [1, 2], LLAMA3)
    with raises(UsageError, "tokens.other_shard", "b.bin", "uint32", "a.bin", "uint16"):
        open_tokens(tmp_path / "?.bin")


def encoded(tmp_path, tokenizer, **options):
    """Return both forms of a corpus."""
    (tmp_path / "a.txt").write_text(END.join(TEXTS) + END, "utf-8")
    npy = encode_corpus(tmp_path / "a.txt", tmp_path / "a.npy", tokenizer, force=True, separator=END)
    options = {"format": "bin", "separator": END} | options
    bins = encode_corpus(tmp_path / "a.txt", tmp_path / "shards", tokenizer, **options)
    assert bins.num_documents == npy.num_documents == len(TEXTS)
    one = open_tokens(tmp_path / "a.npy")
    several = with_num_bytes(open_tokens(tmp_path / "shards_*.bin", tokenizer=tokenizer), tokenizer)
    assert bins.num_tokens == len(several.tokens)
    return one, several


@pytest.mark.parametrize("prefix", [(), (257,)])
@pytest.mark.parametrize("shard_tokens", [1, 7, 33, 1000])
def test_what_is_written_is_the_npy_file_but_for_the_place_of_the_mark(tmp_path, shard_tokens, prefix):
    tokenizer = of_bytes(END, "<s>", prefix=prefix)
    one, several = encoded(tmp_path, tokenizer, shard_tokens=shard_tokens)
    assert several.tokens[:].tolist() == [256, *one.tokens[:-1].tolist()]
    assert several.documents.tolist() == (one.documents + np.uint64(1)).tolist()
    assert several.meta.num_bytes == one.meta.num_bytes == sum(len(text.encode()) for text in TEXTS)
    shards = sorted(tmp_path.glob("shards_*"))
    total = len(one.tokens)
    sizes = [(path.stat().st_size - 1024) // 2 for path in shards]
    assert sizes == [
        *[shard_tokens] * (total // shard_tokens),
        *[total % shard_tokens] * (total % shard_tokens > 0),
    ]
    assert shards[-1].name == f"shards_{len(shards) - 1:06d}.bin"
    header = np.fromfile(shards[-1], "<i4", 256)
    assert header[:3].tolist() == [20240520, 1, sizes[-1]]
    assert not header[3:].any()


def test_packed_documents_are_those_of_the_npy_file(tmp_path):
    for file in encoded(tmp_path, of_bytes(END), shard_tokens=20):
        settings = {"batch_size": 1, "context_length": 13, "seed": 0}
        batches = PackedBatches(file.tokens, document_starts=file.documents, **settings)
        first = int(file.documents[0])
        size = len(file.tokens) - first
        targets = torch.cat([batches.batch(row)[1].reshape(-1) for row in range(size)])  # 13 epochs
        for epoch in targets.reshape(13, size).tolist():
            assert sorted(epoch) == sorted(file.tokens[first:].tolist())
        begun = {start for row in range(size) for start, _ in batches.pieces(row)[1:]}
        assert begun <= {*file.documents.tolist()}  # only the first piece of a row goes on with a document


def test_shards_appear_together_and_replace_older_ones(tmp_path, monkeypatch):
    tokenizer = of_bytes(END)
    encoded(tmp_path, tokenizer, shard_tokens=5)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("shards_*")}
    assert len(before) > 9
    with raises(UsageError, "output.exists", "shards_000000.bin"):
        encoded(tmp_path, tokenizer)

    def break_off(error):
        with bin_writer(tmp_path / "shards", tokenizer, 5) as writer:
            writer.append(np.full(23, 65), documents=[0])
            if error is not None:
                raise error

    for error in (OSError("disk"), None):
        with pytest.raises(OSError if error else RuntimeError, match="disk" if error else "not finished"):
            break_off(error)
        assert {path.name: path.read_bytes() for path in tmp_path.glob("shards_*")} == before
    left = tmp_path / f"shards_000001.bin{PARTIAL_SUFFIX}"  # of a process that was killed
    left.write_bytes(b"half" * 1000)
    first = tmp_path / "shards_000000.bin"
    first.rename(first.with_name(first.name + PARTIAL_SUFFIX))  # killed before the first shard had its name
    with raises(LmkitError, "tokens.damaged", "shards_000000.bin"):
        open_tokens(tmp_path / "shards_*.bin")
    _, several = encoded(tmp_path, tokenizer, shard_tokens=50, force=True)
    assert sorted(path.name for path in tmp_path.glob("shards_*")) == [
        "shards_000000.bin",
        "shards_000001.bin",
    ]
    assert len(several.tokens) < 100


def test_the_name_may_be_a_folder_or_end_in_bin(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "fish").mkdir()
    for output in ("fish", "b.bin"):
        encode_corpus(tmp_path / "a.txt", tmp_path / output, of_bytes(END), format="bin")
    assert open_tokens(tmp_path / "fish/fish_000000.bin").tokens.tolist() == [256, *b"ab"]
    assert open_tokens(tmp_path / "b_000000.bin").tokens.tolist() == [256, *b"ab"]
    with raises(UsageError, "tokens.name", "c.bin", hint="--format bin"):
        encode_corpus(tmp_path / "a.txt", tmp_path / "c.bin", of_bytes(END))


def test_tokenizers_that_fit_no_bin_file_are_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("ab")
    with raises(UsageError, "tokenizer.no_end_of_text"):
        encode_corpus(tmp_path / "a.txt", tmp_path / "t", of_bytes("<pad>"), format="bin")
    large = of_bytes(END)
    monkeypatch.setattr(large, "vocab_size", (1 << 16) + 1)
    with raises(UsageError, "tokens.bin_vocabulary", "65,537"):
        encode_corpus(tmp_path / "a.txt", tmp_path / "t", large, format="bin")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert bin_files.written(tmp_path / "t") == []
