"""A web server on this machine that can misbehave, and errors by their codes."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lmkit.errors import LmkitError


class FileServer:
    """Serves `files`; the other attributes say how well."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {"ETag": '"v1"'}
        self.redirect_headers: dict[str, str] | None = None
        """Given, a path without `/storage` in it is answered by a redirect with these."""
        self.moved = False
        """A path without `/new` in it is answered by a redirect before that one."""
        self.cuts: list[int] = []
        """The next answers end after that many bytes of their body."""
        self.statuses: list[int] = []
        """The next answers are these errors."""
        self.ranges = True
        self.announce_length: int | None = None
        """Instead of the true length of a body; 0: none is announced."""
        self.part_shift = 0
        """How far beside the part that was asked for an answer begins."""
        self.total = ""
        """Instead of the length of the whole file in `Content-Range`."""
        self.requests: list[dict[str, str]] = []
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self):
        site = self.server.site
        site.requests.append(dict(self.headers))
        if site.statuses:
            self.send_error(site.statuses.pop(0))
            return
        if site.moved and not self.path.startswith(("/new", "/storage")):
            self.send_response(307)
            self.send_header("Location", "/new" + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if site.redirect_headers is not None and not self.path.startswith("/storage"):
            self.send_response(302)
            for name, value in site.redirect_headers.items():
                self.send_header(name, value)
            self.send_header("Location", "/storage" + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = site.files.get(self.path.removeprefix("/storage").removeprefix("/new").lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = self._start(site)
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        for name, value in site.headers.items():
            self.send_header(name, value)
        if start:
            start += site.part_shift
            total = site.total or len(content)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{total}")
        body = content[start:]
        if site.announce_length != 0:
            self.send_header("Content-Length", str(site.announce_length or len(body)))
        self.end_headers()
        self.wfile.write(body[: site.cuts.pop(0)] if site.cuts else body)

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


@pytest.fixture
def refuses():
    """Expect an error by its code, with words that its message holds, and a hint."""

    @contextmanager
    def expect(code, *words, kind=LmkitError):
        with pytest.raises(kind) as caught:
            yield caught
        assert caught.value.code == code, caught.value
        assert [word for word in words if word not in caught.value.message] == [], caught.value
        assert caught.value.hint

    return expect
