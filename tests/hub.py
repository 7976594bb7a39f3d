"""A hub on this machine: it speaks as much of the hub's protocol as its client needs to list and fetch datasets."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
from huggingface_hub import constants, file_download

from tokenmill.storage import hub_client

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = COMMIT[::-1]
LARGE = (".parquet", ".gz", ".zst")


@dataclass
class Repository:
    """A dataset `org/name` with one commit, or two if its branch has moved on to `later` files. Its tag `v1` has not.

    `token` is what a request must show, if there is one. Requests that hold a text of `silent` get no answer.
    """

    files: dict[str, bytes]
    later: dict[str, bytes] = field(default_factory=dict)
    token: str = ""
    spoiled: dict[str, int] = field(default_factory=dict)  # files, and how many answers come with a wrong byte
    silent: tuple[str, ...] = ()
    ignores_ranges: bool = False
    requests: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def commits(self) -> list[str]:
        return [COMMIT, LATER] if self.later else [COMMIT]

    @property
    def main(self) -> str:
        return self.commits[-1]

    def at(self, commit: str) -> dict[str, bytes]:
        return self.later if commit == LATER else self.files

    def etag(self, key: str, data: bytes) -> str:
        if key.endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

    def tree(self, commit: str) -> list[dict[str, Any]]:
        return [self._entry(key, data) for key, data in sorted(self.at(commit).items())]

    def _entry(self, key: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": key, "size": len(data), "oid": self.etag(key, data)[:40]}
        if key.endswith(LARGE):
            entry["lfs"] = {"oid": self.etag(key, data), "size": len(data), "pointerSize": 130}
        return entry


class _Handler(BaseHTTPRequestHandler):
    repository: ClassVar[Repository]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        wanted = self.headers.get("Range", "")
        request = " ".join(filter(None, (self.command, path, wanted)))
        self.repository.requests.append(request)
        if any(text in request for text in self.repository.silent):
            self.repository.closing.wait()
            self.close_connection = True
            return
        is_first = COMMIT in path or path.endswith("/revision/v1")
        commit = LATER if LATER in path else COMMIT if is_first else self.repository.main
        headers = {"X-Repo-Commit": commit}
        status, data = 404, b""
        if self.repository.token and self.headers.get("Authorization") != f"Bearer {self.repository.token}":
            said = f"{self.headers.get('Authorization')} is nobody here"
            status, headers = 403, {**headers, "X-Error-Message": said}
        elif commit not in self.repository.commits and "/datasets/org/name/" in path:
            headers["X-Error-Code"] = "RevisionNotFound"
        elif path in (f"/api/datasets/org/name/revision/{revision}" for revision in ("main", "v1", commit)):
            status, data = 200, json.dumps({"id": "org/name", "sha": commit, "siblings": []}).encode()
        elif path.startswith(tuple(f"/api/datasets/org/name/tree/{revision}" for revision in ("main", "v1", commit))):
            status, data = 200, json.dumps(self.repository.tree(commit)).encode()
        elif path.startswith(f"/datasets/org/name/resolve/{commit}/"):
            status, data, headers = self._file(path.partition(f"{commit}/")[2], wanted, headers, body=body)
        else:
            is_ours = "/datasets/org/name/" in path
            headers["X-Error-Code"] = "RevisionNotFound" if is_ours else "RepoNotFound"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            with suppress(ConnectionError):  # who asked has heard enough
                self.wfile.write(data)

    def _file(self, key: str, wanted: str, headers: dict[str, str], *, body: bool) -> tuple[int, bytes, dict[str, str]]:
        data = self.repository.at(headers["X-Repo-Commit"]).get(key)
        if data is None:
            return 404, b"", {**headers, "X-Error-Code": "EntryNotFound"}
        headers = {**headers, "ETag": f'"{self.repository.etag(key, data)}"'}
        if body and self.repository.spoiled.get(key, 0) > 0:
            self.repository.spoiled[key] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        if wanted and not self.repository.ignores_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1 if last else None]
            return 206, part, {**headers, "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}
        return 200, data, headers

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve(repository: Repository) -> Iterator[str]:
    """Gives the hub's address."""
    handler = type("Handler", (_Handler,), {"repository": repository})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            repository.closing.set()
            server.shutdown()
            thread.join()


def lead_to(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client of this process ask a hub, and keep what it gets in a folder."""
    settings = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_ASSETS_CACHE": str(folder / "assets"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
        if hasattr(file_download, name):  # a client before 1.0 copies some of them
            monkeypatch.setattr(file_download, name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub_client.files_at.cache_clear()


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HF_HUB_OFFLINE in a process that knows nothing yet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_client.files_at.cache_clear()
