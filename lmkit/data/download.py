"""Download datasets: resume, check, and never leave half a file under its name.

A dataset registers itself, here or in a file from outside; its name is then known to recipes (`corpus.source`) and to
`lmkit data download`:

    from lmkit.data import Dataset, RemoteFile
    from lmkit.registry import DATASETS

    @DATASETS.register("fables")
    def fables() -> Dataset:
        train = RemoteFile("fables_train.txt", "train.txt.gz", max_bytes=1_000_000_000)
        valid = RemoteFile("fables_valid.txt", "valid.txt.gz", max_bytes=10_000_000)
        return Dataset("https://example.org/fables", train, valid)

No digest is built in. A download is checked against the server instead: its length, and the SHA-256 that the Hugging
Face hub sends as the entity tag of large files. The digest of a finished file is recorded in `<name>.sha256` (the
format of sha256sum) and checked from then on.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any

from lmkit.errors import LmkitError, reason
from lmkit.measure.progress import Progress
from lmkit.registry import DATASETS
from lmkit.storage import FolderLock, atomic_path, sha256_file, write_atomic

_BLOCK = 1 << 20
_ATTEMPTS = 6
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RemoteFile:
    """A text file of a dataset.

    Attributes:
        name: the file's name in the folder of downloads.
        remote: the file's name on the server; `.gz` files are unpacked.
        max_bytes: limit of both download and unpacked text, so that a small archive cannot fill the disk.
    """

    name: str
    remote: str
    max_bytes: int


@dataclass(frozen=True)
class Dataset:
    """A training and a held-out file below one address."""

    base_url: str
    train: RemoteFile
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


@DATASETS.register("owt", order=2)
def owt() -> Dataset:
    """Return the sample of OpenWebText that Stanford's CS336 hands out."""
    return Dataset(
        f"{_HUB}/stanford-cs336/owt-sample/resolve/main",
        RemoteFile("owt_train.txt", "owt_train.txt.gz", 20_000_000_000),
        RemoteFile("owt_valid.txt", "owt_valid.txt.gz", 1_000_000_000),
    )


def download_dataset(
    dataset: str | Dataset,
    folder: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    base_url: str | None = None,
    retry_wait_s: float = 1.0,
) -> list[Path]:
    """Fetch a dataset into `folder` and return its text files: train, then valid.

        >>> download_dataset("tinystories", "artifacts/data")  # doctest: +SKIP

    Files that are there with their recorded digest are kept. An interrupted transfer is resumed if the file on the
    server is still the same (`If-Range`): at once after a cut connection, at the next call after a kill.

    Args:
        dataset: a registered name, or the dataset itself.
        progress: called with (stage, bytes done, bytes in all or 0 if the server does not say).
        base_url: replaces the dataset's own address.
        retry_wait_s: pause before the second attempt in seconds, doubled before each further attempt.

    Raises:
        UsageError: no dataset has this name ("registry.unknown_name").
        LmkitError: the server cannot be reached or lacks the file ("download.failed"); the digest is wrong
            ("download.wrong_digest") or the file too large ("download.too_large"), in which case the download is
            removed; the archive is damaged ("download.damaged"); another file has the name ("download.file_exists");
            a file in `folder` changed since it was fetched ("download.changed"); the disk refuses ("download.disk").
    """
    if isinstance(dataset, str):
        dataset = DATASETS.load(dataset)()
        assert isinstance(dataset, Dataset)
    folder = Path(folder)
    report = progress or _silent
    paths = []
    with FolderLock(folder):
        for file in (dataset.train, dataset.valid):
            path = folder / file.name
            if not _is_complete(path):
                url = f"{(base_url or dataset.base_url).rstrip('/')}/{file.remote}"
                fetched = path.with_name(file.remote) if file.remote.endswith(".gz") else path
                if fetched == path or not _is_complete(fetched):
                    _refuse_to_replace(path)
                    _refuse_to_replace(fetched)
                    _fetch(url, fetched, file.max_bytes, report, retry_wait_s)
                if fetched != path:
                    _unpack(fetched, path, file.max_bytes, report)
            paths.append(path)
    return paths


def _refuse_to_replace(path: Path) -> None:
    """Refuse to overwrite a file that no download made. A symbolic link may be replaced."""
    if path.is_file() and not path.is_symlink() and not _digest_path(path).exists():
        raise LmkitError(
            "download.file_exists",
            f"{path}: is there without {_digest_path(path).name}, and a download would replace it",
            hint="move it away; or, if it is the dataset's, write what `sha256sum` prints of it into that file",
        )


def _is_complete(path: Path) -> bool:
    recorded = _digest_path(path)
    if not (path.exists() and recorded.exists()):
        return False
    if not recorded.read_bytes().startswith(sha256_file(path).encode() + b" "):
        raise LmkitError(
            "download.changed",
            f"{path}: the content does not have the digest in {recorded.name}",
            hint="delete both files to fetch the dataset again",
        )
    return True


def _fetch(url: str, path: Path, max_bytes: int, progress: Progress, retry_wait_s: float) -> None:
    """Download one file to `path`, check it, and record its digest."""
    transfer = _Transfer(url, path, max_bytes, progress)
    failure = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(retry_wait_s * 2 ** (attempt - 1))
        try:
            transfer.run()
            break
        except urllib.error.HTTPError as error:
            failure = f"HTTP status {error.code}"
            error.close()
            if error.code == 416:  # our part is longer than the file: begin again
                transfer.discard()
            elif error.code < 500 and error.code != 429:
                raise LmkitError("download.failed", f"{url}: {failure}", hint="check the address") from None
        except (OSError, http.client.HTTPException, _ShortBodyError) as error:
            if isinstance(error, OSError) and error.filename is not None:  # the disk, not the network
                raise LmkitError(
                    "download.disk",
                    f"{error.filename}: {reason(error)}",
                    hint="check the disk and the permissions",
                ) from None
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    else:
        raise LmkitError(
            "download.failed",
            f"{url}: {failure} (tried {_ATTEMPTS} times)",
            hint="run the same command again: it resumes where it stopped",
        )
    transfer.finish()


class _ShortBodyError(Exception):
    """The connection ended before the announced length."""


_VERSION_KINDS = {"validator": str, "size": int, "sha256": str}


class _Transfer:
    """A download in progress: `<name>.partial`, and a JSON file that says which version on the server it is from."""

    def __init__(self, url: str, path: Path, max_bytes: int, progress: Progress) -> None:
        self.url = url
        self.path = path
        self.max_bytes = max_bytes
        self.progress = progress
        self.partial = path.with_name(path.name + ".partial")
        self.version_path = path.with_name(path.name + ".partial.version.json")

    def run(self) -> None:
        """Request the missing bytes and append them.

        Raises:
            OSError, http.client.HTTPException, _ShortBodyError: the bytes received stay for the next attempt.
        """
        version = self._version()
        headers = {"User-Agent": "lmkit"}
        start = self.partial.stat().st_size if version.get("validator") and self.partial.exists() else 0
        if start:
            # The answer is the rest of the same file (206) or, if the file has changed, all of the new one (200).
            headers |= {"Range": f"bytes={start}-", "If-Range": version["validator"]}
            if start == version["size"]:
                return
        request = urllib.request.Request(self.url, headers=headers)
        redirects = _KeepDigest()
        opener = urllib.request.build_opener(redirects)
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            if response.status == 206:
                first, total = _content_range(response.headers)
                if first != start:
                    raise _ShortBodyError("the server sent another part than it was asked for")
            else:
                start, total = 0, _content_length(response.headers)
                self._note_version(response.headers, total, redirects.digest)
            self._append(response, start, total)

    def finish(self) -> None:
        """Check the digest, record it, rename the file."""
        digest = sha256_file(self.partial)
        expected = self._version().get("sha256", "")
        if expected and digest != expected:
            self.discard()
            raise LmkitError(
                "download.wrong_digest",
                f"{self.url}: the digest is {digest[:12]}..., the server promised {expected[:12]}...",
                hint="the download is removed; try again later",
            )
        write_atomic(_digest_path(self.path), f"{digest}  {self.path.name}\n")
        os.replace(self.partial, self.path)
        self.version_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the partial file."""
        self.partial.unlink(missing_ok=True)
        self.version_path.unlink(missing_ok=True)

    def _append(self, response: IO[bytes], start: int, total: int) -> None:
        done = start
        with open(self.partial, "r+b" if start else "wb") as file:
            file.seek(start)
            while block := response.read(_BLOCK):
                done += len(block)
                if done > self.max_bytes:
                    self.discard()
                    raise LmkitError(
                        "download.too_large",
                        f"{self.url}: more than {self.max_bytes} bytes",
                        hint="this is not the expected file; the download is removed",
                    )
                file.write(block)
                self.progress(f"download {self.path.name}", done, total)
            file.flush()
            os.fsync(file.fileno())
        if total and done != total:
            raise _ShortBodyError(f"the connection ended after {done} of {total} bytes")

    def _version(self) -> dict[str, Any]:
        """Return what `_note_version` wrote; {} if that is missing or damaged, so that the transfer begins again."""
        try:
            version = json.loads(self.version_path.read_text("utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        whole = (
            isinstance(version, dict)
            and {key: type(value) for key, value in version.items()} == _VERSION_KINDS
            and version["validator"].isascii()
            and version["validator"].isprintable()
        )
        return version if whole else {}

    def _note_version(self, headers: Message, total: int, linked_digest: str) -> None:
        etag = headers.get("ETag", "")
        # A weak tag (W/...) does not promise equal bytes. Without a strong tag or a date nothing can be resumed.
        validator = headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
        facts = {"validator": validator, "size": total, "sha256": linked_digest or _sha256_in(etag)}
        self.partial.unlink(missing_ok=True)  # bytes of one version must not meet the tag of another
        if validator or facts["sha256"]:
            write_atomic(self.version_path, json.dumps(facts))
        else:
            self.version_path.unlink(missing_ok=True)


class _KeepDigest(urllib.request.HTTPRedirectHandler):
    """Keep the digest that the hub sends with its redirect to the storage: urllib would drop it.

    A renamed repository redirects once more before that, without a digest.
    """

    digest = ""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self.digest = _sha256_in(headers.get("X-Linked-Etag", "")) or self.digest
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _sha256_in(etag: str) -> str:
    match = re.fullmatch(r'"?([0-9a-f]{64})"?', etag)
    return match[1] if match else ""


def _content_length(headers: Message) -> int:
    """Return the announced length; 0 if the server does not say."""
    text = headers.get("Content-Length") or "0"
    if not re.fullmatch(r"\d{1,18}", text):
        raise _ShortBodyError("the server sent a length that is no number")
    return int(text)


def _content_range(headers: Mapping[str, str] | Message) -> tuple[int, int]:
    match = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", headers.get("Content-Range") or "")
    if match is None:
        raise _ShortBodyError("the server sent a part without saying which")
    return int(match[1]), 0 if match[2] == "*" else int(match[2])


def _unpack(archive: Path, path: Path, max_bytes: int, progress: Progress) -> None:
    """Decompress a .gz file to `path` and remove it."""
    size = archive.stat().st_size
    done = 0
    try:
        with (
            atomic_path(path) as partial,
            open(partial, "wb") as file,
            open(archive, "rb") as packed,
            gzip.open(packed) as unpacked,
        ):
            while block := unpacked.read(_BLOCK):
                done += len(block)
                if done > max_bytes:
                    raise LmkitError(
                        "download.too_large",
                        f"{archive}: unpacks to more than {max_bytes} bytes",
                        hint="this is not the expected file; delete it",
                    )
                file.write(block)
                progress(f"unpack {archive.name}", packed.tell(), size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise LmkitError(
            "download.damaged", f"{archive}: {error}", hint="delete it to fetch it again"
        ) from None
    write_atomic(_digest_path(path), f"{sha256_file(path)}  {path.name}\n")
    archive.unlink()
    _digest_path(archive).unlink()


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
