"""Fetch the known datasets: resumed, checked, never half there.

No digest is built in, because none is known here with certainty. What the server says is checked instead: the length,
and the SHA-256 that the Hugging Face hub sends as the entity tag of large files. The digest of a finished file is
recorded beside it (`<name>.sha256`, the format of sha256sum) and holds from then on.
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
from lmkit.storage import FolderLock, atomic_path, sha256_file, write_atomic

_BLOCK = 1 << 20
_ATTEMPTS = 6
_TIMEOUT_S = 60.0
_AGAIN = "run the same command again: it goes on where it stopped"


@dataclass(frozen=True)
class RemoteFile:
    """One text file of a dataset; `remote` is its name on the server, compressed where it ends in `.gz`."""

    name: str
    remote: str
    max_bytes: int
    """More than this is neither fetched nor unpacked: a small archive must not fill the disk."""


@dataclass(frozen=True)
class Dataset:
    """Files below one address."""

    base_url: str
    train: RemoteFile
    valid: RemoteFile


_HUB = "https://huggingface.co/datasets"
DATASETS: dict[str, Dataset] = {
    # Eldan, Li 2023, arXiv:2305.07759; the GPT-4 half of the stories.
    "tinystories": Dataset(
        f"{_HUB}/roneneldan/TinyStories/resolve/main",
        RemoteFile("tinystories_train.txt", "TinyStoriesV2-GPT4-train.txt", 4_000_000_000),
        RemoteFile("tinystories_valid.txt", "TinyStoriesV2-GPT4-valid.txt", 100_000_000),
    ),
    # The sample of OpenWebText that Stanford's CS336 hands out.
    "owt": Dataset(
        f"{_HUB}/stanford-cs336/owt-sample/resolve/main",
        RemoteFile("owt_train.txt", "owt_train.txt.gz", 20_000_000_000),
        RemoteFile("owt_valid.txt", "owt_valid.txt.gz", 1_000_000_000),
    ),
}


def download(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    base_url: str | None = None,
    retry_wait_s: float = 1.0,
) -> list[Path]:
    """Fetch a dataset into `folder` and return its text files: train, then valid.

    Files that are there and have their recorded digest are kept; one without is refused. An interrupted transfer is
    resumed if the file on the server is still the same (`If-Range`), after a cut connection at once, after a kill at
    the next call.

    Args:
        progress: called with (what, bytes done, bytes in all or 0 where the server does not say).
        base_url: another place for the files than the dataset's own.
        retry_wait_s: pause before the second attempt, doubled before each further one.

    Raises:
        LmkitError: the server cannot be reached or has no such file; the length or the digest is wrong (what was
            fetched is then removed); the archive is damaged or too large; a file of that name is there already.
    """
    folder = Path(folder)
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
                    _fetch(url, fetched, file.max_bytes, progress or _silent, retry_wait_s)
                if fetched != path:
                    _unpack(fetched, path, file.max_bytes, progress or _silent)
            paths.append(path)
    return paths


def _refuse_to_replace(path: Path) -> None:
    """A file that no download made stays; a link is no loss."""
    if path.is_file() and not path.is_symlink() and not _digest_path(path).exists():
        raise LmkitError(
            f"{path}: is there without {_digest_path(path).name}, and a download would replace it",
            hint="move it away; or, if it is the dataset's, write what `sha256sum` prints of it into that file",
        )


def _is_complete(path: Path) -> bool:
    recorded = _digest_path(path)
    if not (path.exists() and recorded.exists()):
        return False
    if not recorded.read_bytes().startswith(sha256_file(path).encode() + b" "):
        raise LmkitError(
            f"{path}: the content does not have the digest in {recorded.name}",
            hint="delete both files to fetch the dataset again",
        )
    return True


def _fetch(url: str, path: Path, max_bytes: int, progress: Progress, retry_wait_s: float) -> None:
    """Bring one file to `path`, whole and checked, with its recorded digest."""
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
            if error.code == 416:  # what we have is longer than the file: begin again
                transfer.discard()
            elif error.code < 500 and error.code != 429:
                raise LmkitError(f"{url}: {failure}", hint="is the address right?") from None
        except (OSError, http.client.HTTPException, _ShortBodyError) as error:
            if isinstance(error, OSError) and error.filename is not None:  # the disk, not the network
                raise LmkitError(
                    f"{error.filename}: {reason(error)}",
                    hint="check the disk and the permissions",
                ) from None
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    else:
        raise LmkitError(f"{url}: {failure} (tried {_ATTEMPTS} times)", hint=_AGAIN)
    transfer.finish()


class _ShortBodyError(Exception):
    """The connection ended before the announced length."""


_VERSION_KINDS = {"validator": str, "size": int, "sha256": str}


class _Transfer:
    """One file on its way: `<name>.partial` and, beside it, which version of the file on the server it is from."""

    def __init__(self, url: str, path: Path, max_bytes: int, progress: Progress) -> None:
        self.url = url
        self.path = path
        self.max_bytes = max_bytes
        self.progress = progress
        self.partial = path.with_name(path.name + ".partial")
        self.version_path = path.with_name(path.name + ".partial.version.json")

    def run(self) -> None:
        """Ask for what is missing and append it.

        Raises:
            OSError, http.client.HTTPException, _ShortBodyError: what is there stays for the next attempt.
        """
        version = self._version()
        headers = {"User-Agent": "lmkit"}
        start = self.partial.stat().st_size if version.get("validator") and self.partial.exists() else 0
        if start:
            # Either the rest of the very same file (206) or, if it has changed, all of the new one (200).
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
        """Check the digest, record it, give the file its name."""
        digest = sha256_file(self.partial)
        expected = self._version().get("sha256", "")
        if expected and digest != expected:
            self.discard()
            raise LmkitError(
                f"{self.url}: the digest is {digest[:12]}..., the server promised {expected[:12]}...",
                hint="what was fetched is removed; try again later",
            )
        write_atomic(_digest_path(self.path), f"{digest}  {self.path.name}\n")
        os.replace(self.partial, self.path)
        self.version_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forget what was fetched."""
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
                        f"{self.url}: more than {self.max_bytes} bytes",
                        hint="this is not the expected file; what was fetched is removed",
                    )
                file.write(block)
                self.progress(f"download {self.path.name}", done, total)
            file.flush()
            os.fsync(file.fileno())
        if total and done != total:
            raise _ShortBodyError(f"the connection ended after {done} of {total} bytes")

    def _version(self) -> dict[str, Any]:
        """What `_note_version` wrote; {}, so that the transfer begins again, where that is missing or damaged."""
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
        # A weak tag (W/...) does not promise equal bytes: with neither this nor a date, nothing can be resumed.
        validator = headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
        facts = {"validator": validator, "size": total, "sha256": linked_digest or _sha256_in(etag)}
        self.partial.unlink(missing_ok=True)  # never the bytes of one version beside the tag of another
        if validator or facts["sha256"]:
            write_atomic(self.version_path, json.dumps(facts))
        else:
            self.version_path.unlink(missing_ok=True)


class _KeepDigest(urllib.request.HTTPRedirectHandler):
    """The hub names the digest in the answer that redirects to the storage, which urllib would drop. (A renamed
    repository redirects before that, without one.)"""

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
    """What the server announces; 0 where it does not say."""
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
                        f"{archive}: unpacks to more than {max_bytes} bytes",
                        hint="this is not the expected file; delete it",
                    )
                file.write(block)
                progress(f"unpack {archive.name}", packed.tell(), size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise LmkitError(f"{archive}: {error}", hint="delete it to fetch it again") from None
    write_atomic(_digest_path(path), f"{sha256_file(path)}  {path.name}\n")
    archive.unlink()
    _digest_path(archive).unlink()


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
