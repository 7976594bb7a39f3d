"""Settings of object stores from the environment and AWS profiles, and servers that do not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.errors import RecipeError, SilentStoreError, StorageError
from tokenmill.storage import object_store
from tokenmill.storage.base import Url
from tokenmill.storage.object_store import Store, endpoint_of, s3_settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "config").write_text("[default]\nregion = eu-west-1\n[profile lab]\nendpoint_url = http://minio:9000\n")
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = one\naws_secret_access_key = two\n"
        "[lab]\naws_access_key_id = three\naws_secret_access_key = four\naws_session_token = five\n"
    )
    return tmp_path


def test_keys_come_from_the_default_profile(home: Path) -> None:
    assert s3_settings() == {"access_key_id": "one", "secret_access_key": "two", "region": "eu-west-1"}


def test_a_profile_is_named_by_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert s3_settings() == {
        "access_key_id": "three",
        "secret_access_key": "four",
        "session_token": "five",
        "endpoint": "http://minio:9000",
        "allow_http": True,
    }


def test_keys_of_the_environment_win_over_profiles(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://r2.example")
    assert s3_settings() == {"endpoint": "https://r2.example", "allow_http": False}


@pytest.mark.parametrize(("name", "said"), [("nobody", "no AWS profile"), ("bare", "no keys of its own")])
def test_a_profile_without_keys_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    (home / "config").write_text("[profile bare]\nregion = x\nsso_session = corp\n")
    monkeypatch.setenv("AWS_PROFILE", name)
    with pytest.raises(RecipeError, match=said):
        s3_settings()


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_a_line_end_behind_a_setting_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Files that were made elsewhere have them; the client would end with a panic."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv(name, "secret\r")
    with pytest.raises(RecipeError, match=f"{name} contains a line end") as caught:
        s3_settings()
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("endpoint", ["http://[::1", "http://host:port", "http://:9000", "http://host:0"])
def test_half_an_address_of_a_server_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(RecipeError, match="AWS_ENDPOINT_URL is not the address of a server"):
        endpoint_of("s3")


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("s3", "AWS_ENDPOINT_URL"), ("gs", "GOOGLE_BASE_URL"), ("az", "AZURE_STORAGE_ENDPOINT"), ("az", "AZURE_ENDPOINT")],
)
def test_a_server_is_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, home: Path, scheme: str, variable: str
) -> None:
    assert endpoint_of(scheme) == ""
    monkeypatch.setenv(variable, "http://127.0.0.1:1/account")
    assert endpoint_of(scheme) == "http://127.0.0.1:1/account"


@pytest.fixture
def nothing_there() -> Iterator[str]:
    """The endpoint of a server that has nothing, without encryption."""

    class Nothing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("gs", {"GOOGLE_BASE_URL": "", "GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az", {"AZURE_STORAGE_ENDPOINT": "", "AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_SKIP_SIGNATURE": "true"}),
    ],
)
def test_a_server_that_the_environment_names_may_do_without_encryption(
    nothing_there: str, monkeypatch: pytest.MonkeyPatch, scheme: str, settings: dict[str, str]
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value or nothing_there)
    assert Store(Url(scheme, "container", "")).find("a") is None


@pytest.mark.parametrize(
    ("scheme", "name", "value"),
    [("az", "AZURE_STORAGE_ACCOUNT_NAME", ""), ("gs", "GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")],
)
def test_wrong_settings_are_told_by_their_names(
    monkeypatch: pytest.MonkeyPatch, scheme: str, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match=f"{scheme}://bucket: ") as caught:
        Store(Url(scheme, "bucket", ""))
    assert name in caught.value.hint


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://nobody.invalid", "Name or service not known|failed to lookup"),
        ("", "takes too long"),
    ],
)
def test_a_server_that_does_not_answer_is_told_from_one_that_refuses(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "else",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint or f"http://127.0.0.1:{mute.getsockname()[1]}",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            object_store, "_CLIENT", {"connect_timeout": "200ms", "read_timeout": "200ms", "timeout": "1s"}
        )
        monkeypatch.setattr(object_store, "_RETRY", {"max_retries": 0, "retry_timeout": timedelta(seconds=1)})
        monkeypatch.setattr(object_store, "_TRIES", 2)
        with pytest.raises(SilentStoreError, match=f"no answer: .*({said})"):
            Store(Url("s3", "bucket", "")).find("a")


def test_a_store_that_is_left_alone_is_not_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=lambda: now))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        given_up = Store(Url("s3", "bucket", ""))
        given_up.back_off()
        with pytest.raises(SilentStoreError, match="s3://bucket/a: no answer a moment ago"):
            given_up.find("a")
        mute.settimeout(0)
        with pytest.raises(BlockingIOError):
            mute.accept()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("text", ["127.0.0.1:5555", "http://", "ftp://host", "https:// host", "SECRET"])
def test_an_endpoint_that_is_no_address_is_refused_by_its_name_alone(
    monkeypatch: pytest.MonkeyPatch, scheme: str, text: str
) -> None:
    name = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}[scheme]
    monkeypatch.setenv(name, text)
    with pytest.raises(RecipeError, match=f"{name} is not the address of a server") as caught:
        Store(Url(scheme, "bucket", ""))
    assert text not in caught.value.message
