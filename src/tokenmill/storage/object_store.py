"""An object store: the few requests that tokenmill makes of it, with errors of ours.

The only module that imports obstore, which retries what a server refuses for a moment. An answer
that breaks off in its middle is asked for again here, from the object as it was (its etag).

Settings of object stores from the environment, and for S3 from the AWS profile files.

The environment goes to the clients as it is (AWS_ACCESS_KEY_ID, AZURE_STORAGE_ACCOUNT_KEY, ...). Where it
holds no keys of S3, the profile's files are looked at: AWS_PROFILE names it, "default" otherwise.

Requests that are under way when a process forks.

A child has none of its parent's other threads, so what one of them had begun would never end there.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import math
import mmap
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as answers
from obstore.store import AzureStore, GCSStore, S3Store

from tokenmill.errors import DatasetError, ObjectChangedError, RecipeError, SilentStoreError, StorageError, is_panic
from tokenmill.storage.base import Url

if TYPE_CHECKING:
    from obstore.store import S3Config


T = TypeVar("T")

PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
# Up to here one request is cheaper than parts: those are three requests more, and the store joins them.
WHOLE_BYTES = 64 << 20
# Memory that comes back from a reader is used again; larger blocks would be new pages each time.
CHUNK_BYTES = 1 << 20
# An upload has at most 10,000 parts.
_MAX_PARTS = 9_000
_REQUESTS_AT_ONCE = 16
_TRIES = 6
# Who has not answered for so long, twice, is not asked again.
_PATIENCE_SECONDS = 100
# How long no requests are sent to a store that was given up.
_BACK_OFF_SECONDS = 30
# How long a copy inside of a store may take, and how often it is looked at.
_COPY_SECONDS = 300
_COPYING_LATER = ("az:",)
_LOOK_SECONDS = 0.2
_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "10m"}
_RETRY = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=45),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=10), "base": 2},
}
# What a second try would not change.
_FINAL = (
    answers.InvalidPathError,
    answers.NotSupportedError,
    ValueError,
)
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_OTHERS: dict[str, Any] = {"gs": GCSStore, "az": AzureStore}
_SILENCE_HINT = "check the network and the endpoint; the same command goes on"
# Where a cloud's machine asks who it is: the last place to look for credentials.
_METADATA = "http://169.254.169.254/"
_NO_BUCKET = re.compile("<Code>(NoSuchBucket|ContainerNotFound)</Code>")
# What a put with a condition is answered. A server in trouble says the first to any request, and then it means nothing.
_TAKEN = (answers.AlreadyExistsError, answers.PreconditionError)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as it stands. `sha256` is what its writer said of it, empty if it said nothing.

    `version` is what a store knows it by that does not go by etags.
    """

    key: str
    size: int
    etag: str
    modified: int
    sha256: str = ""
    version: str = ""


@functools.cache
def open_store(root: Url) -> Store:
    """The store of a bucket: one for each process, since it keeps its connections."""
    return Store(root)


class Store:
    """A bucket and the connections to it."""

    def __init__(self, root: Url) -> None:
        self.root = root.root
        self._process = os.getpid()
        self._backed_off_until = 0.0
        self._store = _connect(root)
        self._pool = ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="tokenmill-store")

    def begin(self, ask: Callable[..., T], *given: Any) -> Future[T]:
        """Have something asked, some of its kind at a time, while the caller does other things."""
        self._check_process()
        return self._pool.submit(ask, *given)

    def back_off(self) -> None:
        """Send no requests for a while: a command that is about to end would wait for each answer."""
        self._backed_off_until = time.monotonic() + _BACK_OFF_SECONDS

    def is_usable(self) -> bool:
        """Whether this is the process that opened it: neither connections nor threads survive a fork."""
        return self._process == os.getpid()

    def _check_process(self) -> None:
        """Whoever waited for an answer in a forked process would wait for ever."""
        if not self.is_usable():
            raise StorageError(
                f"{self.root} cannot be reached from a forked process",
                hint="start processes with the spawn method, or open the dataset in each of them",
            )

    def find(self, key: str) -> ObjectInfo | None:
        """An object; None if there is none."""
        return self._find(key, but=(FileNotFoundError,))

    def find_copy(self, key: str, size: int) -> ObjectInfo | None:
        """An object that may be a copy of so many bytes under way: it is waited for.

        Azure copies in its own time. Until then the copy is empty, or whoever asks for it is told of a conflict.
        What has been empty for long is no copy under way.
        """
        end = time.monotonic() + _COPY_SECONDS
        while self.root.startswith(_COPYING_LATER) and time.monotonic() < end:
            with contextlib.suppress(answers.AlreadyExistsError):
                found = self._find(key, but=(FileNotFoundError, answers.AlreadyExistsError))
                if found is None or found.size or not size or _seconds_since(found) > _COPY_SECONDS:
                    return found
            time.sleep(_LOOK_SECONDS)
        return self.find(key)

    def _find(self, key: str, but: tuple[type[Exception], ...]) -> ObjectInfo | None:
        def ask() -> ObjectInfo:
            answer = obstore.get(self._store, key, options={"head": True})
            said = answer.attributes.get("sha256", "")
            return _found(answer.meta, said if isinstance(said, str) else "")

        try:
            return self._ask(key, ask, but=but)
        except FileNotFoundError:
            return None

    def fetch(self, key: str, start: int, stop: int, etag: str) -> obstore.Bytes:
        """Bytes [start, stop) of an object that must still be the one with this etag."""

        def ask() -> obstore.Bytes:
            answer = obstore.get(self._store, key, options=_range(start, stop, etag))
            _check_etag(answer.meta, etag)
            data = answer.bytes()
            if len(data) != stop - start:
                raise answers.GenericError(f"{len(data)} bytes came for [{start}, {stop})")
            return data

        return self._unchanged(key, ask)

    def fetch_parts(self, found: ObjectInfo, start: int, stop: int, take: Callable[[bytes], None]) -> None:
        """Bytes of an object as it was found, handed over as they come; where an answer breaks off, the next begins."""
        at = start

        def ask() -> None:
            nonlocal at
            answer = obstore.get(self._store, found.key, options=_range(at, stop, found.etag))
            _check_etag(answer.meta, found.etag)
            if answer.meta["size"] != found.size:
                raise answers.PreconditionError(f"{answer.meta['size']} bytes in all")
            for part in answer.stream(min_chunk_size=CHUNK_BYTES):
                take(part)
                at += len(part)
            if at != stop:
                raise answers.GenericError(f"{at - start} bytes came for [{start}, {stop})")

        self._unchanged(found.key, ask)

    def _unchanged(self, key: str, ask: Callable[[], T]) -> T:
        """What is asked of an object that must not have changed."""
        try:
            return self._ask(key, ask, but=(FileNotFoundError, answers.PreconditionError))
        except answers.PreconditionError:
            raise ObjectChangedError(
                f"{self.at(key)} changed while it was read", hint="does another process write there?"
            ) from None
        except FileNotFoundError:
            raise ObjectChangedError(f"{self.at(key)} is gone", hint="does another process work there?") from None

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """All of a small object, in one request; None if there is none."""

        def ask() -> bytes | int:
            answer = obstore.get(self._store, key)
            size = answer.meta["size"]
            return size if size > max_bytes else bytes(answer.bytes())

        try:
            found = self._ask(key, ask)
        except FileNotFoundError:
            return None
        if isinstance(found, int):
            raise DatasetError(f"{self.at(key)} has {found} bytes, too many", hint="the object is damaged")
        return found

    def put(self, key: str, data: bytes | Path, *, sha256: str = "") -> None:
        """Put an object in place of whatever is there, large ones in parts."""
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        part = max(PART_BYTES, size // _MAX_PARTS + 1)
        said = {"sha256": sha256} if sha256 else None

        def ask() -> object:
            if size <= WHOLE_BYTES:
                return obstore.put(self._store, key, _content(data), attributes=said, use_multipart=False)
            return obstore.put(self._store, key, data, attributes=said, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

        self._must(key, ask)

    def put_stream(self, key: str, blocks: Callable[[], Iterator[bytes | memoryview]], *, sha256: str = "") -> None:
        """Put an object whose bytes come from elsewhere; a second try asks for them again."""
        said = {"sha256": sha256} if sha256 else None
        self._must(key, lambda: obstore.put(self._store, key, map(bytes, blocks()), attributes=said))

    def put_new(self, key: str, data: bytes | Path, *, sha256: str = "") -> bool:
        """Put an object where none is; False if there is one. After any error, nobody knows whether it was put."""
        said = {"sha256": sha256} if sha256 else None
        try:
            with self._explained(key, but=_TAKEN):
                obstore.put(self._store, key, _content(data), attributes=said, mode="create", use_multipart=False)
        except _TAKEN:
            return False
        return True

    def put_over(self, found: ObjectInfo, data: bytes) -> bool:
        """Put an object in place of the one that was found; False if that one is not there any more."""
        known: Any = {"e_tag": found.etag, **({"version": found.version} if found.version else {})}
        try:
            with self._explained(found.key, but=(*_TAKEN, FileNotFoundError)):
                obstore.put(self._store, found.key, data, mode=known)
        except (*_TAKEN, FileNotFoundError):
            return False
        return True

    def copy(self, key: str, new: str) -> None:
        """Copy an object inside of the store; `FileNotFoundError` if there is none."""
        self._ask(key, lambda: obstore.copy(self._store, key, new))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, whether they are there or not."""
        try:
            if keys:
                self._ask(keys[0], lambda: obstore.delete(self._store, list(keys)))
        except FileNotFoundError:  # of several, not every store deletes the others then
            if len(keys) > 1:
                all_at_once([partial(self.delete, [key]) for key in keys])

    def under(self, prefix: str) -> list[ObjectInfo]:
        """Every object below a prefix, which ends where a part of its keys does."""
        found = self._must(prefix, lambda: obstore.list(self._store, prefix or None).collect())
        return [_found(meta) for meta in found]

    def children(self, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
        """Prefixes and objects right below a prefix."""
        found = self._must(prefix, lambda: obstore.list_with_delimiter(self._store, prefix or None))
        return list(found["common_prefixes"]), [_found(meta) for meta in found["objects"]]

    def has_children(self, prefix: str) -> bool:
        """Whether anything is below a prefix, without listing all of it."""
        return self._must(prefix, lambda: any(obstore.list(self._store, prefix or None, chunk_size=1)))

    def at(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _must(self, key: str, ask: Callable[[], T]) -> T:
        """What fails for the want of a bucket only."""
        try:
            return self._ask(key, ask)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _no_bucket(self) -> StorageError:
        return StorageError(f"{self.root} is not there", hint="check its name and the endpoint, or make it first")

    def _ask(self, key: str, ask: Callable[[], T], but: tuple[type[Exception], ...] = (FileNotFoundError,)) -> T:
        """Ask until there is an answer; what may be asked twice only."""
        end = time.monotonic() + _PATIENCE_SECONDS
        for attempt in range(1, _TRIES + 1):
            patient_until = math.inf if attempt == 1 else end if attempt < _TRIES else 0
            with self._explained(key, but=but, patient_until=patient_until):
                return ask()
            time.sleep(random.uniform(0.5, 1) * 0.05 * 2**attempt)
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def _explained(self, key: str, *, but: tuple[type[Exception], ...], patient_until: float = 0) -> Iterator[None]:
        """Errors as ours, but for those that the caller judges; those that may pass are swallowed for a while."""
        self._check_process()
        if time.monotonic() < self._backed_off_until:
            raise SilentStoreError(f"{self.at(key)}: no answer a moment ago", hint=_SILENCE_HINT)
        try:
            with UNDER_WAY:
                yield
        except but:
            raise
        except BaseException as error:
            if is_panic(error):
                raise _gave_up(self.at(key), error, self.root.partition(":")[0]) from None
            if not isinstance(error, (answers.BaseError, OSError, ValueError)):
                raise
            if _NO_BUCKET.search(str(error)):
                raise self._no_bucket() from None
            if time.monotonic() < patient_until and not isinstance(error, _FINAL) and not _is_denied(error):
                return
            if silence := _silence(error):
                raise SilentStoreError(f"{self.at(key)}: no answer: {silence}", hint=_SILENCE_HINT) from None
            hint = _hint(error, self.root.partition(":")[0])
            raise StorageError(f"{self.at(key)}: {_reason(error)}", hint=hint) from None


def _connect(root: Url) -> Any:
    """A client, with the credentials that the environment or a profile holds."""
    options: Any = {"client_options": dict(_CLIENT), "retry_config": _RETRY}
    try:
        if root.scheme in _OTHERS:
            if endpoint_of(root.scheme).startswith("http://"):
                options["client_options"]["allow_http"] = True
            return _OTHERS[root.scheme](root.bucket, **options)
        settings = {"checksum_algorithm": "SHA256", **s3_settings()}
        if settings.pop("allow_http", False):
            options["client_options"]["allow_http"] = True
        # The store itself compares what arrives with this.
        return S3Store(root.bucket, config=cast("S3Config", settings), **options)
    except BaseException as error:
        if is_panic(error):
            raise _gave_up(root.root, error, root.scheme) from None
        if not isinstance(error, (answers.BaseError, ValueError)):
            raise
        hint = f"check the credentials ({_CREDENTIALS[root.scheme]}), and the endpoint if one is named"
        raise StorageError(f"{root.root}: {_reason(error)}", hint=hint) from None


def _gave_up(place: str, error: BaseException, scheme: str) -> StorageError:
    """What obstore panics of: settings that it cannot even make a request with, as a rule."""
    return StorageError(
        f"{place}: obstore cannot make the request: {_reason(error)}",
        hint=f"check the credentials ({_CREDENTIALS[scheme]}) and the endpoint: is there a space or a line end in one?",
    )


def _content(data: bytes | Path) -> bytes | mmap.mmap:
    """All that is to be put. A file is mapped: its pages are sent as they are, and take no memory of ours."""
    if isinstance(data, bytes) or not data.stat().st_size:
        return data if isinstance(data, bytes) else b""
    with data.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _range(start: int, stop: int, etag: str) -> Any:
    return {"range": (start, stop), **({"if_match": etag} if etag else {})}


def _check_etag(meta: Any, etag: str) -> None:
    """A store may ignore the condition that it was given."""
    if etag and _quoted(meta["e_tag"]) != _quoted(etag):
        raise answers.PreconditionError(f"its etag is {meta['e_tag']}")


def _found(meta: Any, sha256: str = "") -> ObjectInfo:
    modified = int(meta["last_modified"].timestamp() * 1_000_000_000)
    return ObjectInfo(meta["path"], meta["size"], _quoted(meta["e_tag"]), modified, sha256, meta["version"] or "")


def _seconds_since(found: ObjectInfo) -> float:
    return time.time() - found.modified / 1_000_000_000


def _quoted(etag: str | None) -> str:
    """An etag as headers have it. Azure lists it bare."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


def _reason(error: BaseException) -> str:
    """What a server or a connection said, in one line. An answer may repeat who asked, so little of it is kept."""
    if _METADATA in str(error):
        return "there are no credentials"
    text = " ".join(str(error).partition("Debug source:")[0].split())
    said = re.search(r"<Code>([\w.-]+)</Code>", text)
    status = re.search(r"status code: \d+ [A-Za-z -]*", text)
    text = text[: status.end()] if status else text.partition("<")[0][:300]
    return f"{text.rstrip(' :')}{f': {said[1]}' if said else ''}"


def _silence(error: BaseException) -> str:
    """Why nothing was answered; empty if something was."""
    if not re.search(r"HttpError \{\s+kind: (Connect|Timeout)", str(error)) or _METADATA in str(error):
        return ""
    cause = re.search(r'(?:message|error): "([^"]{1,200})"', str(error))
    return cause[1] if cause else "it takes too long"


def _is_denied(error: BaseException) -> bool:
    """Whether it is a matter of who asks. What is said of a list has the server's answer in its text alone."""
    denied = isinstance(error, answers.PermissionDeniedError | answers.UnauthenticatedError)
    return denied or _METADATA in str(error) or re.search(r"status code: 40[13]\b", str(error)) is not None


def _hint(error: BaseException, scheme: str) -> str:
    if isinstance(error, answers.InvalidPathError):
        return "rename the object: its name has an empty or a relative part"
    if _is_denied(error):
        return f"check the credentials ({_CREDENTIALS[scheme]}) and their rights"
    return "check the network, the endpoint and the credentials; the same command goes on"


def all_at_once(asks: Sequence[Callable[[], T]]) -> list[T]:
    """The answers to several questions, asked side by side; the first error is raised when all are through."""
    if len(asks) <= 1:
        return [ask() for ask in asks]
    with ThreadPoolExecutor(min(len(asks), _REQUESTS_AT_ONCE), thread_name_prefix="tokenmill-asks") as pool:
        waiting = [pool.submit(ask) for ask in asks]
    return [future.result() for future in waiting]


_FIELDS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_IN_HEADERS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
)  # fmt: skip


def endpoint_of(scheme: str) -> str:
    """The server that the environment names for URLs of this kind; empty if it is the cloud's own."""
    name = next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)
    return "" if name is None else _checked(os.environ[name], name)


def _checked(endpoint: str, where: str) -> str:
    """An endpoint with which a client can begin something. Its text is not shown: it may hold a secret."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint) or not _has_host(endpoint):
        raise RecipeError(f"{where} is no address of a server", hint="write it like https://minio.example.org:9000")
    return endpoint


def _has_host(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, a port that is no number
        return False


def s3_settings() -> dict[str, Any]:
    """What the client does not find in the environment by itself; `allow_http` if its endpoint is not encrypted."""
    settings: dict[str, Any] = {}
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        settings = _profile(os.environ.get("AWS_PROFILE", ""))
    # In a header, they would end the client with a panic.
    for where, value in {**{name: os.environ.get(name, "") for name in _IN_HEADERS}, **settings}.items():
        if not value.isprintable():
            raise RecipeError(
                f"{where} holds a line end or another control character", hint="set it anew, without what is behind it"
            )
    endpoint = endpoint_of("s3") or _checked_profile(settings)
    if endpoint:
        settings["endpoint"] = endpoint
        settings["allow_http"] = endpoint.startswith("http://")
    if "AWS_REGION" in os.environ or "AWS_DEFAULT_REGION" in os.environ:
        settings.pop("region", None)
    return settings


def _checked_profile(settings: dict[str, Any]) -> str:
    return _checked(settings["endpoint"], "the endpoint_url of the profile") if settings.get("endpoint") else ""


def _profile(name: str) -> dict[str, Any]:
    """The static keys, region and endpoint of a profile. None if there is no such thing and none was asked for."""
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", f"profile {name}" if name and name != "default" else "default"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name or "default"),
    ):
        parser = configparser.RawConfigParser()
        path = Path(os.environ.get(variable, default)).expanduser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except (configparser.Error, UnicodeDecodeError):
            raise RecipeError(f"{path} cannot be read", hint="it holds sections of `name = value` lines") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    if name and not found:
        raise RecipeError(f"there is no AWS profile {name!r}", hint="check AWS_PROFILE and ~/.aws/config")
    if name and "aws_access_key_id" not in found:
        raise RecipeError(
            f"the AWS profile {name!r} holds no keys of its own",
            hint="put short-lived ones into the environment: aws configure export-credentials --format env",
        )
    return {ours: found[theirs] for theirs, ours in _FIELDS.items() if theirs in found}


class UnderWay:
    """Counts requests. A fork waits until there are none: a child would hang on what another thread has not ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_none(self) -> None:
        """Wait for the last one, and let no other begin."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._count)

    def go_on(self) -> None:
        self._changed.release()


UNDER_WAY = UnderWay()
os.register_at_fork(before=UNDER_WAY.wait_for_none, after_in_parent=UNDER_WAY.go_on, after_in_child=UNDER_WAY.go_on)
