"""The viewer answers its own pages only: with the token, to its own address, under headers that protect them."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import tokenmill as api
from conftest import write_jsonl
from tokenmill.inspection.viewer import HOST, Viewer


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("viewer")
    write_jsonl(folder / "a.jsonl", ["one text", "<script>alert(1)</script>"])
    path = api.prepare(folder / "a.jsonl", folder / "out", tokenizer="byte", workers=1).output
    with api.view(path) as viewer:
        yield viewer


def ask(
    viewer: Viewer, path: str, *, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    """An answer to exactly these headers; `cookie="good"` is that of the token."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if names.get("cookie") == "good":
        names["cookie"] = f"tokenmill-{viewer.port}={token_of(viewer)}"
    connection = http.client.HTTPConnection(HOST, viewer.port, timeout=20)
    connection.request(method, path, body, {"host": f"{HOST}:{viewer.port}", **names})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def token_of(viewer: Viewer) -> str:
    return parse_qs(urlsplit(viewer.url).query)["token"][0]


def test_the_token_of_the_address_becomes_a_cookie_that_opens_the_pages(viewer: Viewer) -> None:
    first, _ = ask(viewer, f"/?token={token_of(viewer)}")
    assert (first.status, first.headers["location"]) == (303, "/"), "the token leaves the address"
    cookie = first.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    page, text = ask(viewer, "/", cookie=cookie.partition(";")[0])
    assert page.status == 200
    assert "<h1>" in text


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({}, "/"),
        ({}, "/static/viewer.js"),
        ({}, "/?token=wrong"),
        ({}, "/?token=%C3%A9%00"),
        ({"cookie": "tokenmill=x"}, "/document?n=0"),
        ({"cookie": "good", "host": "evil.example"}, "/"),
        ({"cookie": "good", "host": "127.0.0.1"}, "/"),
        ({"cookie": "good", "origin": "https://evil.example"}, "/"),
        ({"cookie": "good", "origin": "null"}, "/"),
    ],
)
def test_anything_else_is_refused(viewer: Viewer, headers: dict[str, str], path: str) -> None:
    answer, text = ask(viewer, path, **headers)
    assert answer.status == 403
    assert "script" not in text


def test_every_answer_has_the_headers_that_protect_it(viewer: Viewer) -> None:
    for path, headers in (("/", {"cookie": "good"}), ("/", {}), ("/nothing", {"cookie": "good"})):
        answer, _ = ask(viewer, path, **headers)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in policy


def test_texts_are_escaped_and_no_page_has_style_or_script_of_its_own(viewer: Viewer) -> None:
    for path in ("/", "/documents", "/document?n=1", "/search?q=%3Cscript%3E", "/sample?n=0&seq_len=20"):
        _, text = ask(viewer, path, cookie="good")
        assert "<script>" not in text
        assert text.count("<script src=") == 1
        assert "style=" not in text
        assert " on" not in "".join(part.partition(">")[0] for part in text.split("<")[1:])


def test_only_get_changes_nothing_and_only_one_form_is_posted(viewer: Viewer) -> None:
    answer, _ = ask(viewer, "/document?n=0", method="POST", body="n=1", cookie="good")
    assert answer.status == 405
    answer, _ = ask(viewer, "/text", method="POST", body="text=" + "a" * (1 << 20), cookie="good")
    assert answer.status == 413
    answer, text = ask(viewer, "/text", method="POST", body="text=a%3Cb", cookie="good")
    assert answer.status == 200
    assert "3 tokens" in text


@pytest.mark.parametrize("path", ["/static/../viewer.py", "/static/%2e%2e/viewer.py", "/static/base.html", "/x"])
def test_files_that_are_not_listed_are_not_served(viewer: Viewer, path: str) -> None:
    answer, text = ask(viewer, path, cookie="good")
    assert answer.status == 404
    assert "import" not in text


def test_only_this_machine_can_connect(viewer: Viewer) -> None:
    assert viewer._socket.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_an_error_with_a_way_out(tmp_path: Path, viewer: Viewer) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    path = api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output
    with pytest.raises(api.OutputError, match=f"port {viewer.port}"):
        api.view(path, port=viewer.port)
    with pytest.raises(api.RecipeError, match="port"):
        api.view(path, port=70_000)


def test_it_ends_when_it_is_closed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    path = api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output
    viewer = api.view(path)
    assert "running" in repr(viewer)
    assert token_of(viewer) not in repr(viewer)
    viewer.close()
    assert "closed" in repr(viewer)
    with pytest.raises(OSError, match="refused"), socket.create_connection((HOST, viewer.port), 5):
        pass


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    path = api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output
    command = [sys.executable, "-m", "tokenmill", "view", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "Ctrl-C" in process.stdout.readline()
        address = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(HOST, int(address.port or 0), timeout=20)
        connection.request("GET", f"/?{address.query}")
        assert connection.getresponse().status == 303
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
