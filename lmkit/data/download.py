"""Download datasets: resume, check, and never leave half a file under its name.

A dataset registers itself, here or in a file from outside; its name is then known to recipes
(`corpus.source`) and to `lmkit data download`.

No digest is built in. A download is checked against the server instead: its length, and the SHA-256 that the Hugging
Face hub sends as the entity tag of large files. The digest of a finished file is recorded in `<name>.sha256` (the
format of sha256sum) and checked from then on.
"""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.plugins import wrong_result
from lmkit.registry import DATASETS
from lmkit.storage.atomic import PARTIAL_SUFFIX, FolderLock, atomic_path, naming, sha256_file, write_atomic
from lmkit.storage.inputs import open_input, read_input
from lmkit.storage.outputs import refuse_unwritable
from lmkit.streams import Progress

log = logging.getLogger("lmkit")
_BLOCK = 1 << 20
_ATTEMPTS = 6
RETRY_WAIT_S = 1.0
"""Pause before the second attempt, doubled before each further one."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RemoteFile:
    """A file of a dataset: its name in the folder of downloads and on the server. `.gz` files are unpacked.

    `max_bytes` limits both download and unpacked text, so that a small archive cannot fill the disk.
    """

    name: str
    remote: str
    max_bytes: int


@dataclass(frozen=True)
class Dataset:
    """A training file, or shards in their order, and a held-out file below one address; all in one folder."""

    base_url: str
    train: RemoteFile | Sequence[RemoteFile]
    valid: RemoteFile


_HUB = "https://huggingface.co/datasets"


@DATASETS.register("tinystories", order=1)
def tinystories() -> Dataset:
    """Return the stories of TinyStories that GPT-4 wrote (Eldan, Li 2023, arXiv:2305.07759)."""
    return Dataset(
        f"{_HUB}/roneneldan/TinyStories/resolve/main",
        RemoteFile("tinystories_train.txt", "TinyStoriesV2-GPT4-train.txt", 4_000_000_000),
        RemoteFile("tinystories_valid.txt", "TinyStoriesV2-GPT4-valid.txt", 100_000_000),
    )


@DATASETS.register("owt", order=2, aliases=("openwebtext",))
def owt() -> Dataset:
    """Return the sample of OpenWebText that Stanford's CS336 hands out."""
    return Dataset(
        f"{_HUB}/stanford-cs336/owt-sample/resolve/main",
        RemoteFile("owt_train.txt", "owt_train.txt.gz", 20_000_000_000),
        RemoteFile("owt_valid.txt", "owt_valid.txt.gz", 1_000_000_000),
    )


@DATASETS.register("fineweb_edu", order=3)
def fineweb_edu() -> Dataset:
    """Return 100 billion tokens of FineWeb-Edu (Penedo et al. 2024, arXiv:2406.17557), shuffled: nanochat's copy."""
    *train, valid = _shards("fineweb_edu", "shard_{:05}.parquet", range(1823), 1_000_000_000)
    return Dataset(f"{_HUB}/karpathy/fineweb-edu-100b-shuffle/resolve/main", train, valid)


@DATASETS.register("climbmix", order=4)
def climbmix() -> Dataset:
    """Return 400 billion tokens of ClimbMix (Diao et al. 2025, arXiv:2504.13161), shuffled: nanochat's copy."""
    *train, valid = _shards("climbmix", "shard_{:05}.parquet", range(6543), 1_000_000_000)
    return Dataset(f"{_HUB}/karpathy/climbmix-400b-shuffle/resolve/main", train, valid)


@DATASETS.register("fineweb10b", order=5, tokens=True)
def fineweb10b() -> Dataset:
    """Return 10 billion tokens of FineWeb (Penedo et al. 2024, arXiv:2406.17557) by GPT-2's tokenizer, 100 million a
    shard: modded-nanogpt's copy."""
    train = _shards("fineweb10b", "fineweb_train_{:06}.bin", range(1, 104), 250_000_000)
    (valid,) = _shards("fineweb10b", "fineweb_val_{:06}.bin", range(1), 250_000_000)
    return Dataset(f"{_HUB}/kjj0/fineweb10B-gpt2/resolve/main", train, valid)


def _shards(folder: str, remote: str, numbers: Iterable[int], max_bytes: int) -> list[RemoteFile]:
    names = map(remote.format, numbers)
    return [RemoteFile(f"{folder}/{name}", name, max_bytes) for name in names]


def download_dataset(
    dataset: str | Dataset,
    folder: str | os.PathLike[str],
    *,
    shards: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Fetch a dataset (or the one of a registered name) into `folder`; return its files: train, then valid.

    Of a dataset in several shards, fetch the first `shards`, one after another (None: one).

    Files that are there with their recorded digest are kept. An interrupted transfer is resumed if the file on the
    server is still the same (`If-Range`): at once after a cut connection, at the next call after a kill.
    `progress` is called with (stage, bytes done, bytes in all or 0 if the server does not say).

    Raises:
        UsageError: the dataset has fewer shards ("download.shards").
        LmkitError: the server cannot be reached or lacks the file ("download.failed"); the digest is wrong
            ("download.wrong_digest") or the file too large ("download.too_large"): the download is removed; the
            archive is damaged ("download.damaged"); another file has the name ("download.file_exists"); a file
            changed since it was fetched ("download.changed"); the disk refuses ("download.disk").
    """
    name = "the dataset"
    if isinstance(dataset, str):
        name, dataset = dataset, DATASETS.load(dataset)()
        if not isinstance(dataset, Dataset):
            raise wrong_result(DATASETS, name, f"{type(dataset).__name__}, no Dataset")
    folder = Path(folder)
    refuse_unwritable(folder, option="--folder; in a recipe corpus.folder")
    train = [dataset.train] if isinstance(dataset.train, RemoteFile) else dataset.train
    count = 1 if shards is None else shards
    if not 1 <= count <= len(train):
        message, hint = (
            f"{name}: has {len(train):,} training shards, not {count:,}",
            f"take 1 to {len(train):,}",
        )
        raise UsageError("download.shards", message, hint=f"{hint}: --shards; in a recipe corpus.shards")
    if len(train) > 1:
        log.info("%s: %d of %d training shards", name, count, len(train))
    files = [*train[:count], dataset.valid]

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            place = f" ({files.index(file) + 1} of {len(files)})" if len(files) > 2 else ""
            progress(stage + place, done, total)

    with FolderLock((folder / dataset.valid.name).parent):
        for file in files:
            path = folder / file.name
            fetched = path.with_name(file.remote) if file.remote.endswith(".gz") else path
            if _is_complete(path):
                continue
            if fetched == path or not _is_complete(fetched):
                for place in (path, fetched):
                    _refuse_to_replace(place)
                url = f"{dataset.base_url.rstrip('/')}/{file.remote}"
                _fetch(url, fetched, file.max_bytes, report)
            if fetched != path:
                _unpack(fetched, path, file.max_bytes, report)
    return [folder / file.name for file in files]


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _is_complete(path: Path) -> bool:
    recorded = _digest_path(path)
    if not (path.exists() and recorded.exists()):
        return False
    if not read_input(recorded).startswith(sha256_file(path).encode() + b" "):
        message = f"{path}: the content does not have the digest in {recorded.name}"
        raise LmkitError("download.changed", message, hint="delete both files to fetch the dataset again")
    return True


def _refuse_to_replace(path: Path) -> None:
    """Refuse to overwrite a file that no download made. A symbolic link may be replaced."""
    if path.is_file() and not path.is_symlink() and not _digest_path(path).exists():
        message = f"{path}: is there without {_digest_path(path).name}, and a download would replace it"
        hint = "move it away; or, if it is the dataset's, write what `sha256sum` prints of it into that file"
        raise LmkitError("download.file_exists", message, hint=hint)


def _fetch(url: str, path: Path, max_bytes: int, report: Progress) -> None:
    """Download a file by `<name>.lmkit-partial`, again after failures of the network; check and record its digest."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    note = partial.with_name(partial.name + ".json")
    failure = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
        try:
            expected = _receive(url, partial, note, max_bytes, report)
            break
        except urllib.error.HTTPError as error:
            failure = f"HTTP status {error.code}"
            error.close()
            if error.code < 500 and error.code != 429:
                raise LmkitError("download.failed", f"{url}: {failure}", hint="check the address") from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.filename is not None:  # the disk, not the network
                hint = "check the disk and the permissions"
                raise LmkitError("download.disk", f"{error.filename}: {reason(error)}", hint=hint) from None
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    else:
        hint = "run the same command again: it resumes where it stopped"
        raise LmkitError("download.failed", f"{url}: {failure} (tried {_ATTEMPTS} times)", hint=hint)
    digest = sha256_file(partial)
    if expected and digest != expected:
        partial.unlink()
        note.unlink()
        message = f"{url}: the digest is {digest[:12]}..., the server promised {expected[:12]}..."
        raise LmkitError("download.wrong_digest", message, hint="the download is removed; try again later")
    write_atomic(_digest_path(path), f"{digest}  {path.name}\n")
    os.replace(partial, path)
    note.unlink()


def _receive(url: str, partial: Path, note: Path, max_bytes: int, report: Progress) -> str:
    """Request the bytes that `partial` lacks, and append them. Return the digest that the server promised, or "".

    `note` holds the entity tag, size and digest of the version that `partial` is of. After an error of the network,
    the bytes received stay for the next attempt.
    """
    etag, size, digest = json.loads(read_input(note)) if note.exists() else ("", 0, "")
    headers = {"User-Agent": "lmkit"}
    start = partial.stat().st_size if etag and partial.exists() else 0
    if start:
        # The answer is the rest of the same file (206) or, if the file has changed, all of the new one (200).
        headers |= {"Range": f"bytes={start}-", "If-Range": etag}
        if start == size:
            return digest
    redirects = _KeepDigest()
    opener = urllib.request.build_opener(redirects)
    with opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as response:
        if response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise http.client.HTTPException("the server sent another part than it was asked for")
        else:
            start, size = 0, int(response.headers.get("Content-Length", "0"))
            etag = response.headers.get("ETag", "")
            digest = redirects.digest or _sha256_in(etag)
            if etag.startswith("W/"):  # does not promise equal bytes
                etag = ""
            partial.unlink(missing_ok=True)  # bytes of one version must not meet the tag of another
            write_atomic(note, json.dumps([etag, size, digest]))
        with naming(partial), open(partial, "r+b" if start else "wb") as file:
            file.seek(start)
            try:
                stage = f"download {partial.name.removesuffix(PARTIAL_SUFFIX)}"
                _copy(response, file, max_bytes, url, lambda done: report(stage, done, size))
            except LmkitError:
                partial.unlink()
                note.unlink()
                raise
            os.fsync(file.fileno())
            if size and file.tell() != size:
                raise http.client.HTTPException(f"the connection ended after {file.tell()} of {size} bytes")
    return digest


class _KeepDigest(urllib.request.HTTPRedirectHandler):
    """Keep the digest that the hub sends with its redirect to the storage: urllib would drop it. A renamed repository
    redirects once more before that, without a digest."""

    digest = ""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.digest = _sha256_in(headers.get("X-Linked-Etag", "")) or self.digest
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _sha256_in(etag: str) -> str:
    match = re.fullmatch(r'"?([0-9a-f]{64})"?', etag)
    return match[1] if match else ""


def _copy(
    source: IO[bytes] | gzip.GzipFile,
    target: IO[bytes],
    max_bytes: int,
    name: str,
    report: Callable[[int], None],
) -> None:
    """Copy what is left of `source` to a file, which may grow to `max_bytes`."""
    while block := source.read(_BLOCK):
        if target.tell() + len(block) > max_bytes:
            hint = "this is not the expected file: delete what is left of it"
            raise LmkitError("download.too_large", f"{name}: holds more than {max_bytes} bytes", hint=hint)
        target.write(block)
        report(target.tell())


def _unpack(archive: Path, path: Path, max_bytes: int, progress: Progress) -> None:
    """Decompress a .gz file to `path` and remove it."""
    stage, size = f"unpack {archive.name}", archive.stat().st_size
    try:
        with (
            atomic_path(path) as partial,
            open(partial, "wb") as file,
            open_input(archive) as packed,
            gzip.open(packed) as unpacked,
        ):
            _copy(unpacked, file, max_bytes, str(archive), lambda _: progress(stage, packed.tell(), size))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"{archive}: {error}"
        raise LmkitError("download.damaged", message, hint="delete it to fetch it again") from None
    write_atomic(_digest_path(path), f"{sha256_file(path)}  {path.name}\n")
    archive.unlink()
    _digest_path(archive).unlink()
