"""Downloads against a server on this machine: resumed, checked, never half there."""

import gzip
import hashlib
import io
import random
import struct
import tarfile
from dataclasses import replace

import pytest
from programs import file_size_limit
from pydantic import ValidationError
from raising import raises

import lmkit.data.download as module
from lmkit.data.corpora import prepare_corpus
from lmkit.data.download import Dataset, RemoteFile, download_dataset
from lmkit.errors import LmkitError, UsageError
from lmkit.plugins import load_plugin
from lmkit.recipe.tables import CorpusConfig
from lmkit.registry import DATASETS

TRAIN = random.Random(0).randbytes(3_000_000)
VALID = b"held out\n"
DATASET = Dataset(
    "http://unused.invalid",
    RemoteFile("toy_train.txt", "train.txt", 10_000_000),
    RemoteFile("toy_valid.txt", "valid.txt", 10_000_000),
)
ZIPPED = Dataset(
    DATASET.base_url,
    RemoteFile("toy_train.txt", "train.txt.gz", 4_000_000),
    RemoteFile("toy_valid.txt", "valid.txt.gz", 10_000_000),
)


@pytest.fixture
def site(server):
    texts = {"train.txt": TRAIN, "valid.txt": VALID}
    server.files = texts | {f"{name}.gz": gzip.compress(text) for name, text in texts.items()}
    return server


@pytest.fixture
def fetch(site, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRY_WAIT_S", 0)

    def run(dataset=DATASET, **arguments):
        return download_dataset(replace(dataset, base_url=site.url), tmp_path / "data", **arguments)

    return run


def names(folder):
    return {path.name for path in folder.glob("*")} - {".lock"}


def ranges(site):
    return [request.get("Range") for request in site.requests]


@pytest.mark.parametrize("dataset", [DATASET, ZIPPED], ids=["text", "archives"])
def test_fetches_both_files_with_their_digests_once(fetch, site, tmp_path, dataset):
    seen = []
    train, valid = fetch(dataset, progress=lambda *facts: seen.append(facts))
    assert train.read_bytes() == TRAIN
    assert valid.read_bytes() == VALID
    recorded = (tmp_path / "data" / "toy_train.txt.sha256").read_text()
    assert recorded == f"{hashlib.sha256(TRAIN).hexdigest()}  toy_train.txt\n"
    files = {train.name, valid.name}
    assert names(tmp_path / "data") == files | {f"{name}.sha256" for name in files}
    if dataset is DATASET:
        assert ("download toy_train.txt", len(TRAIN), len(TRAIN)) in seen
    fetch(dataset)
    assert len(site.requests) == 2


CUT = {"cuts": [1_000_000, 500_000]}
RESUMED = [None, "bytes=1000000-", "bytes=1500000-"]


@pytest.mark.parametrize(
    ("manners", "asked"),
    [
        (CUT, RESUMED),
        (CUT | {"headers": {"ETag": 'W/"v1"'}}, [None] * 3),  # does not promise equal bytes
        ({"cuts": [1_000_000], "ranges": False}, RESUMED[:2]),
        ({"announce_length": 0}, [None]),
        ({"statuses": [503, 429, 500]}, [None] * 4),
    ],
    ids=str,
)
def test_a_cut_transfer_is_resumed_if_the_server_allows_it(fetch, site, manners, asked):
    vars(site).update({key: [*value] if isinstance(value, list) else value for key, value in manners.items()})
    train, valid = fetch()
    assert (train.read_bytes(), valid.read_bytes()) == (TRAIN, VALID)
    assert ranges(site)[:-1] == asked
    assert all(request.get("If-Range") in (None, *site.headers.values()) for request in site.requests)


@pytest.mark.parametrize(
    ("dataset", "stage", "done", "asked"),
    [
        (DATASET, "download toy_train.txt", 1 << 20, [None, "bytes=1048576-", None]),
        (ZIPPED, "unpack train.txt.gz", 0, [None, None]),
        (DATASET, "finish", 0, [None, None]),
    ],
)
def test_a_kill_at_any_time_costs_little(fetch, site, monkeypatch, dataset, stage, done, asked):
    def kill(at=stage, so_far=1 << 20, _total=0):
        if at == stage and so_far >= done:
            raise KeyboardInterrupt

    if stage == "finish":
        monkeypatch.setattr(module, "sha256_file", lambda partial: kill())
    with pytest.raises(KeyboardInterrupt):
        fetch(dataset, progress=kill)
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetch(dataset)[0].read_bytes() == TRAIN
    assert ranges(site) == asked


@pytest.mark.parametrize("changed", [False, True])
def test_fault_42_a_transfer_that_broke_off_goes_on_at_the_next_call(fetch, site, tmp_path, changed):
    site.cuts = [1_000_000] + [0] * 20
    with raises(LmkitError, "download.failed", "train.txt") as caught:
        fetch()
    assert caught.value.exit_code == 1
    assert names(tmp_path / "data") == {"toy_train.txt.lmkit-partial", "toy_train.txt.lmkit-partial.json"}
    site.cuts = []
    text, site.files["train.txt"] = (TRAIN[::-1],) * 2 if changed else (TRAIN, TRAIN)
    site.headers = {"ETag": '"v2"'} if changed else site.headers
    assert fetch()[0].read_bytes() == text
    assert ranges(site)[6] == "bytes=1000000-"


def test_another_part_than_was_asked_for_is_not_taken(fetch, site):
    site.cuts = [1_000_000]
    site.part_shift = 5
    with raises(LmkitError, "download.failed", "train.txt"):
        fetch()
    site.part_shift = 0
    assert fetch()[0].read_bytes() == TRAIN


def test_without_a_note_of_its_version_a_part_is_dropped(fetch, site, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "toy_train.txt.lmkit-partial").write_bytes(b"x" * 1000)
    assert fetch()[0].read_bytes() == TRAIN
    assert ranges(site)[0] is None


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_no_more_is_fetched_than_a_file_may_have(fetch, site, tmp_path, spare, fits):
    dataset = Dataset("", RemoteFile("toy_train.txt", "train.txt", len(TRAIN) + spare), DATASET.valid)
    if fits:
        assert fetch(dataset)[0].read_bytes() == TRAIN
        return
    with raises(LmkitError, "download.too_large", "2999999"):
        fetch(dataset)
    assert names(tmp_path / "data") == set()


def test_a_full_disk_is_no_fault_of_the_network(fetch, site, tmp_path):
    with file_size_limit(1_000_000), raises(LmkitError, "download.disk", "toy_train.txt.lmkit-partial"):
        fetch()
    assert len(site.requests) == 1  # trying again does not help
    assert fetch()[0].read_bytes() == TRAIN
    assert ranges(site)[1] == "bytes=1000000-"


def test_fault_42_a_short_body_is_no_file(fetch, site, tmp_path):
    site.announce_length = len(TRAIN) + 5
    with raises(LmkitError, "download.failed", "train.txt"):
        fetch()
    assert "toy_train.txt" not in names(tmp_path / "data")


@pytest.mark.parametrize(("by_redirect", "moved"), [(False, False), (True, False), (True, True)])
def test_fault_42_a_wrong_digest_is_refused_and_nothing_is_left(fetch, site, tmp_path, by_redirect, moved):
    site.moved = moved
    wrong = f'"{"0" * 64}"'
    if by_redirect:
        site.redirect_headers = {"X-Linked-Etag": wrong}
    else:
        site.headers = {"ETag": wrong}
    with raises(LmkitError, "download.wrong_digest", "train.txt"):
        fetch()
    assert names(tmp_path / "data") == set()


def test_the_digest_of_the_redirect_is_checked_after_a_resume_too(fetch, site):
    digest = hashlib.sha256(TRAIN).hexdigest()
    site.redirect_headers = {"X-Linked-Etag": f'"{digest}"'}
    site.cuts = [1_000_000]
    site.files["valid.txt"] = TRAIN  # the same header is sent for both
    assert fetch()[0].read_bytes() == TRAIN
    assert "bytes=1000000-" in ranges(site)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [(DATASET, "toy_train.txt"), (ZIPPED, "toy_train.txt"), (ZIPPED, "train.txt.gz")],
    ids=["text", "text of an archive", "archive"],
)
def test_a_file_that_no_download_made_is_not_replaced(fetch, site, tmp_path, dataset, name):
    own = tmp_path / "data" / name
    own.parent.mkdir()
    own.write_bytes(b"my own")
    with raises(LmkitError, "download.file_exists", name, f"{name}.sha256"):
        fetch(dataset)
    assert own.read_bytes() == b"my own"
    assert site.requests == []


def test_a_changed_file_on_disk_is_noticed(fetch):
    train, _ = fetch()
    train.write_bytes(TRAIN + b"!")
    recorded = train.with_name("toy_train.txt.sha256")
    for digest in (recorded.read_bytes(), b"", b"\n", b"\xff", b"0" * 64):
        recorded.write_bytes(digest)
        with raises(LmkitError, "download.changed", "toy_train.txt"):
            fetch()


@pytest.mark.parametrize(
    ("archive", "code"),
    [
        (gzip.compress(bytes(5_000_000)), "download.too_large"),
        (gzip.compress(TRAIN)[:-1000], "download.damaged"),
        (b"not gzip at all", "download.damaged"),
        (gzip.compress(TRAIN)[:2000] + bytes(100) + gzip.compress(TRAIN)[2100:], "download.damaged"),
        (gzip.compress(TRAIN)[:10] + b"\xff" * 100, "download.damaged"),
    ],
    ids=["bomb", "cut", "other", "damaged", "no deflate"],
)
def test_a_bad_archive_leaves_no_text(fetch, site, tmp_path, archive, code):
    site.files["train.txt.gz"] = archive
    with raises(LmkitError, code, "train.txt.gz"):
        fetch(ZIPPED)
    assert "toy_train.txt" not in names(tmp_path / "data")
    assert not any(name.endswith(".lmkit-partial") for name in names(tmp_path / "data"))


def test_fault_41_nothing_in_an_archive_decides_where_it_is_unpacked(fetch, site, tmp_path):
    """gzip members carry a name, a tar archive paths: all of it is content, and lands in the one text."""
    named, tarred = io.BytesIO(), io.BytesIO()
    with gzip.GzipFile("../outside.txt", "wb", fileobj=named) as file:
        file.write(VALID)
    site.files["valid.txt.gz"] = named.getvalue()
    with tarfile.open(fileobj=tarred, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside.txt"))
    site.files["train.txt.gz"] = gzip.compress(tarred.getvalue())
    train, valid = fetch(ZIPPED)
    assert (train.read_bytes(), valid.read_bytes()) == (tarred.getvalue(), VALID)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_fault_41_a_link_in_the_way_is_replaced_and_not_followed(fetch, tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("precious")
    (tmp_path / "data").mkdir()
    for name in ("toy_train.txt", "toy_train.txt.lmkit-partial", "toy_valid.txt.sha256"):
        (tmp_path / "data" / name).symlink_to(outside)
    train, _ = fetch()
    assert train.read_bytes() == TRAIN
    assert outside.read_text() == "precious"


# ---- datasets in shards: files of the real layout, below the real names


def parquet_of(texts):
    """A Parquet file as nanochat's: small row groups, zstd, one column."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    options = {"row_group_size": 4, "use_dictionary": False, "compression": "zstd", "write_statistics": False}
    parquet.write_table(arrow.table({"text": texts}), file, **options)
    return file.getvalue()


def token_shard(ids):
    """A token file as llm.c's: 256 int32, then ids of 16 bits."""
    header = [20240520, 1, len(ids), *[0] * 253]
    return struct.pack("<256i", *header) + struct.pack(f"<{len(ids)}H", *ids)


SHARDED = {
    "fineweb_edu": ("shard_{:05}.parquet", 0, 1822, "shard_01822.parquet"),
    "climbmix": ("shard_{:05}.parquet", 0, 6542, "shard_06542.parquet"),
    "fineweb10b": ("fineweb_train_{:06}.bin", 1, 103, "fineweb_val_000000.bin"),
}


@pytest.fixture(params=SHARDED)
def sharded(request, server, tmp_path, monkeypatch):
    """A registered dataset in shards, served from here: the first three, and the part that is held out."""
    monkeypatch.setattr(module, "RETRY_WAIT_S", 0)
    name, (pattern, first, count, held_out) = request.param, SHARDED[request.param]
    made = DATASETS.load(name)()
    assert made.base_url.startswith("https://huggingface.co/datasets/")
    assert [file.remote for file in made.train] == [pattern.format(first + i) for i in range(count)]
    assert {f"{name}/{file.remote}" == file.name for file in (*made.train, made.valid)} == {True}
    numbers = range(first, first + 3)
    contents = {
        remote: token_shard([number] * 9) if name == "fineweb10b" else parquet_of([f"text {number}"] * 9)
        for number, remote in enumerate([*map(pattern.format, numbers), held_out])
    }
    server.files = dict(contents)
    monkeypatch.setattr(module, "_HUB", server.url)
    server.prefix = made.base_url.removeprefix("https://huggingface.co/datasets/")
    return name, contents


def fetched(site):
    return [path.rpartition("/")[2] for path in site.paths]


def test_the_first_shards_are_fetched_and_kept(sharded, server, tmp_path, terminal):
    name, contents = sharded
    *train, valid = contents
    terminal(f"data download {name} --folder data")
    assert fetched(server) == [train[0], valid]
    printed = terminal(f"data download {name} --folder data --shards 3")
    assert fetched(server) == [train[0], valid, train[1], train[2]]  # only what is new
    assert printed.splitlines() == [f"data/{name}/{file}" for file in contents]
    folder = tmp_path / "data" / name
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in contents} == contents
    assert names(folder) == {*contents, *(f"{file}.sha256" for file in contents)}


def test_a_cut_shard_is_resumed_and_those_before_it_are_kept(sharded, server, tmp_path):
    name, contents = sharded
    seen, remotes = [], list(contents)
    server.cuts = [len(contents[remotes[0]]), 100]
    files = download_dataset(name, tmp_path, shards=2, progress=lambda *facts: seen.append(facts))
    assert [file.read_bytes() for file in files] == [contents[remotes[i]] for i in (0, 1, 3)]
    assert ranges(server) == [None, None, "bytes=100-", None]
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == [f"download {file.name} ({i} of 3)" for i, file in enumerate(files, 1)]


@pytest.mark.parametrize("wrong", ["digest", "missing"])
def test_a_wrong_shard_is_named_and_costs_no_other(sharded, server, tmp_path, wrong):
    name, contents = sharded
    remotes = list(contents)
    content = server.files.pop(remotes[1])
    code = "download.failed"
    if wrong == "digest":
        server.files[remotes[1]] = content[:-1] + b"!"
        server.redirect_headers, code = {}, "download.wrong_digest"
        server.digests = {remote: hashlib.sha256(data).hexdigest() for remote, data in contents.items()}
    with raises(LmkitError, code, remotes[1]):
        download_dataset(name, tmp_path, shards=3)
    assert names(tmp_path / name) == {remotes[0], f"{remotes[0]}.sha256"}
    server.files[remotes[1]] = content
    before = len(server.paths)
    assert len(download_dataset(name, tmp_path, shards=3)) == 4
    assert set(fetched(server)[before:]) == {*remotes[1:]}


def test_more_shards_than_there_are_are_refused(sharded, tmp_path):
    name, _ = sharded
    count = SHARDED[name][2]
    for shards in (0, count + 1):
        with raises(UsageError, "download.shards", name, f"{count:,}", hint="corpus.shards"):
            download_dataset(name, tmp_path / "data", shards=shards)
    with raises(UsageError, "download.shards"):
        download_dataset(DATASET, tmp_path / "data", shards=2)
    assert not (tmp_path / "data").exists()


def test_shards_of_parquet_are_a_corpus(sharded, tmp_path):
    name, _ = sharded
    if name == "fineweb10b":
        with pytest.raises(ValidationError, match=f"lmkit data download {name} --shards 8.*data.train"):
            CorpusConfig(source=name)
        return
    table = CorpusConfig(source=name, folder=tmp_path / "data", shards=2)
    files = prepare_corpus(table, tmp_path / "run")
    assert (files.train, files.valid) == ((tmp_path / "run/train.txt",), (tmp_path / "run/valid.txt",))
    ends = [f"text {number}<|endoftext|>" * 9 for number in (0, 1, 3)]
    assert files.train[0].read_text() + files.valid[0].read_text() == "".join(ends)
    with pytest.raises(ValidationError, match="shards"):
        CorpusConfig(shards=2)


PLUGIN = """
from lmkit.data import Dataset, RemoteFile
from lmkit.registry import DATASETS

@DATASETS.register("fables")
def fables():
    return Dataset("{url}", RemoteFile("f_train.txt", "train.txt", 10**7), RemoteFile("f_valid.txt", "valid.txt", 10))
"""


def test_what_a_dataset_from_outside_returns_is_checked(tmp_path):
    DATASETS.register("odd")(dict)
    with raises(LmkitError, "plugin.returned", "dataset 'odd'", "dict, no Dataset"):
        download_dataset("odd", tmp_path)


def test_a_dataset_from_outside_serves_recipes_and_the_command_line(site, tmp_path, terminal):
    (tmp_path / "fables.py").write_text(PLUGIN.format(url=site.url))
    load_plugin(tmp_path / "fables.py")
    table = CorpusConfig(source="fables", folder=tmp_path / "data")
    files = prepare_corpus(table, tmp_path / "run")
    assert files.valid[0].read_bytes() == VALID
    printed = terminal("data", "download", "fables", "--folder", tmp_path / "data")
    assert printed.splitlines() == [str(path) for path in (*files.train, *files.valid)]
    DATASETS.unregister("fables")
    with pytest.raises(ValidationError, match="tinystories"):
        CorpusConfig(source="fables")
