"""A web server on this machine that can misbehave; a text and its tokenizer."""

from __future__ import annotations

import itertools
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lmkit.tokenizer import chunks, train_tokenizer

END = "<|endoftext|>"


@dataclass
class FileServer:
    """Serves `files`; the other attributes say how well.

    Attributes:
        redirect_headers: given, a path without `/storage` is answered by a redirect with these.
        moved: a path without `/new` is answered by a redirect before that one.
        cuts: the next answers end after that many bytes of their body.
        statuses: the next answers are these errors.
        announce_length: instead of the true length of a body; 0: none is announced.
        part_shift: how far beside the part that was asked for an answer begins.
        prefix: of the paths of all files.
        digests: of files, sent with a redirect as the hub does.
        paths: of the files that were sent, also if they were cut.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"v1"'})
    redirect_headers: dict[str, str] | None = None
    moved: bool = False
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    ranges: bool = True
    announce_length: int | None = None
    part_shift: int = 0
    requests: list[dict[str, str]] = field(default_factory=list)
    prefix: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self):
        site = self.server.site
        site.requests.append(dict(self.headers))
        if site.statuses:
            self.send_error(site.statuses.pop(0))
            return
        if site.moved and not self.path.startswith(("/new", "/storage")):
            self._answer(307, {"Location": "/new" + self.path, "Content-Length": "0"})
            return
        if site.redirect_headers is not None and not self.path.startswith("/storage"):
            where = {"Location": "/storage" + self.path, "Content-Length": "0"}
            if digest := site.digests.get(self.path.rpartition("/")[2]):
                where["X-Linked-Etag"] = f'"{digest}"'
            self._answer(302, site.redirect_headers | where)
            return
        name = self.path.removeprefix("/storage").removeprefix("/new").lstrip("/")
        content = site.files.get(name.removeprefix(site.prefix + "/"))
        if content is None or not name.startswith(site.prefix):
            self.send_error(404)
            return
        site.paths.append(name)
        start = self._start(site)
        if start >= len(content):
            self.send_error(416)
            return
        headers = dict(site.headers)
        if start:
            start += site.part_shift
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if site.announce_length != 0:
            headers["Content-Length"] = str(site.announce_length or len(body))
        self._answer(206 if "Content-Range" in headers else 200, headers)
        self.wfile.write(body[: site.cuts.pop(0)] if site.cuts else body)

    def _answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _start(self, site):
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range", site.headers.get("ETag")) in site.headers.values()
        return int(wanted[1]) if wanted and same and site.ranges else 0

    def log_message(self, *_):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, site):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.site = site


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = FileServer()
    with _Server(site) as running:
        site.url = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def story():
    people = ("Tom", "Lily", "the naïve fox", "日本の猫")
    things = ("a ball", "two apples", "it's", "\n\n  a tree")
    sentences = [f"{p} saw {t}. {q} didn't, and it cost {i}€!" for i, (p, t, q) in
                 enumerate(itertools.product(people, things, people))]  # fmt: skip
    return "".join(f"{' '.join(sentences[i:] + sentences[:i])}\n{END}" for i in range(len(sentences)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, story):
    path = tmp_path_factory.mktemp("corpus") / "story.txt"
    path.write_text(story, "utf-8")
    return train_tokenizer([path], vocab_size=400, special_tokens=(END, END * 2, "saw two"))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks.exact_chunks, "__kwdefaults__", {"size": 200, "source": 0})
    monkeypatch.setattr(chunks.read_blocks, "__defaults__", (77,))
