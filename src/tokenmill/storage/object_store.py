"""Object stores (S3, GCS, Azure): requests with retries and our errors, credentials, and forks.

The only module that imports obstore. obstore retries requests that a server refuses for a moment; an answer that breaks
off in the middle is requested again here, from the object with the same etag. A conditional put is not safe to repeat:
`object_folder.py` reads what is there before it tries again.

obstore takes credentials from the environment (AWS_ACCESS_KEY_ID, AZURE_STORAGE_ACCOUNT_KEY, ...). It does not read AWS
profiles, so we do: if the environment has no keys for S3, those of AWS_PROFILE, or of the profile "default", are used.

A forked process does not have the other threads of its parent, so a request that one of them had begun would never end
there. Therefore a fork waits until no request is in flight.
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
# Up to this size one request is cheaper than parts, which take three more requests and are joined by the store.
WHOLE_BYTES = 64 << 20
# The allocator reuses blocks of this size; larger blocks would be new pages each time.
CHUNK_BYTES = 1 << 20
# An upload has at most 10,000 parts.
_MAX_PARTS = 9_000
_REQUESTS_AT_ONCE = 16
_TRIES = 6
# After this time a request that fails again is given up, even if it has tries left.
_PATIENCE_SECONDS = 100
# How long no requests are sent after `back_off`.
_BACK_OFF_SECONDS = 30
# How long a copy inside of a store may take, the stores that copy asynchronously, and how often they are polled.
_COPY_SECONDS = 300
_COPYING_LATER = ("az:",)
_POLL_SECONDS = 0.2
_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "10m"}
_RETRY = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=45),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=10), "base": 2},
}
# Errors that another try would not change.
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
_SILENCE_HINT = "check the network and the endpoint, then run the same command again to resume"
# Where a machine in a cloud asks for its own credentials: the last of the places that are tried.
_METADATA = "http://169.254.169.254/"
_NO_BUCKET = re.compile("<Code>(NoSuchBucket|ContainerNotFound)</Code>")
# The answers to a conditional put. An overloaded server gives the first one to any request, where it means nothing.
_TAKEN = (answers.AlreadyExistsError, answers.PreconditionError)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as it is stored now. `sha256` comes from its writer; empty if the writer gave none.

    `version` identifies it in stores that do not use etags.
    """

    key: str
    size: int
    etag: str
    modified: int
    sha256: str = ""
    version: str = ""


@functools.cache
def open_store(root: Url) -> Store:
    """The store of a bucket, with its connections; one per process."""
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
        """Make a request in one of a few threads."""
        self._check_process()
        return self._pool.submit(ask, *given)

    def back_off(self) -> None:
        """Send no requests for a while, so that a command that is about to end does not wait for answers."""
        self._backed_off_until = time.monotonic() + _BACK_OFF_SECONDS

    def is_usable(self) -> bool:
        """Whether this process opened the store: neither connections nor threads survive a fork."""
        return self._process == os.getpid()

    def _check_process(self) -> None:
        """Raise `StorageError` in a forked process, which would wait for an answer forever."""
        if not self.is_usable():
            raise StorageError(
                f"{self.root} cannot be reached from a forked process",
                hint="start processes with the spawn method, or open the dataset in each of them",
            )

    def find(self, key: str) -> ObjectInfo | None:
        """An object; None if it does not exist."""
        return self._find(key, but=(FileNotFoundError,))

    def find_copy(self, key: str, size: int) -> ObjectInfo | None:
        """An object that may be an unfinished copy of `size` bytes, which is waited for.

        Azure copies asynchronously. Until a copy is complete, it is empty or a request for it is a conflict. An object
        that has been empty for long is not an unfinished copy.
        """
        end = time.monotonic() + _COPY_SECONDS
        while self.root.startswith(_COPYING_LATER) and time.monotonic() < end:
            with contextlib.suppress(answers.AlreadyExistsError):
                found = self._find(key, but=(FileNotFoundError, answers.AlreadyExistsError))
                if found is None or found.size or not size or _seconds_since(found) > _COPY_SECONDS:
                    return found
            time.sleep(_POLL_SECONDS)
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
        """Pass bytes of an object to `take` as they arrive. After an answer that broke off, the next one continues."""
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
        """The answer to a request for an object that must not have changed."""
        try:
            return self._ask(key, ask, but=(FileNotFoundError, answers.PreconditionError))
        except answers.PreconditionError:
            raise ObjectChangedError(
                f"{self.at(key)} changed while it was read", hint="is another process writing there?"
            ) from None
        except FileNotFoundError:
            raise ObjectChangedError(f"{self.at(key)} is gone", hint="is another process using that place?") from None

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """All of a small object, in one request; None if it does not exist."""

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
        """Put an object, replacing any other; large ones in parts."""
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        part = max(PART_BYTES, size // _MAX_PARTS + 1)
        said = {"sha256": sha256} if sha256 else None

        def ask() -> object:
            if size <= WHOLE_BYTES:
                return obstore.put(self._store, key, _content(data), attributes=said, use_multipart=False)
            return obstore.put(self._store, key, data, attributes=said, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

        self._must(key, ask)

    def put_stream(self, key: str, blocks: Callable[[], Iterator[bytes | memoryview]], *, sha256: str = "") -> None:
        """Put an object from blocks. Each try calls `blocks` again."""
        said = {"sha256": sha256} if sha256 else None
        self._must(key, lambda: obstore.put(self._store, key, map(bytes, blocks()), attributes=said))

    def put_new(self, key: str, data: bytes | Path, *, sha256: str = "") -> bool:
        """Put an object unless one exists; False if one does. After an error, it may have been put or not."""
        said = {"sha256": sha256} if sha256 else None
        try:
            with self._explained(key, but=_TAKEN):
                obstore.put(self._store, key, _content(data), attributes=said, mode="create", use_multipart=False)
        except _TAKEN:
            return False
        return True

    def put_over(self, found: ObjectInfo, data: bytes) -> bool:
        """Replace an object by another; False if it has changed since it was found."""
        known: Any = {"e_tag": found.etag, **({"version": found.version} if found.version else {})}
        try:
            with self._explained(found.key, but=(*_TAKEN, FileNotFoundError)):
                obstore.put(self._store, found.key, data, mode=known)
        except (*_TAKEN, FileNotFoundError):
            return False
        return True

    def copy(self, key: str, new: str) -> None:
        """Copy an object inside of the store. `FileNotFoundError` if it does not exist."""
        self._ask(key, lambda: obstore.copy(self._store, key, new))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects that may or may not exist."""
        try:
            if keys:
                self._ask(keys[0], lambda: obstore.delete(self._store, list(keys)))
        except FileNotFoundError:  # some stores delete none of several if one does not exist
            if len(keys) > 1:
                all_at_once([partial(self.delete, [key]) for key in keys])

    def under(self, prefix: str) -> list[ObjectInfo]:
        """Every object below a prefix, which consists of whole parts of keys."""
        found = self._must(prefix, lambda: obstore.list(self._store, prefix or None).collect())
        return [_found(meta) for meta in found]

    def children(self, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
        """Prefixes and objects directly below a prefix."""
        found = self._must(prefix, lambda: obstore.list_with_delimiter(self._store, prefix or None))
        return list(found["common_prefixes"]), [_found(meta) for meta in found["objects"]]

    def has_children(self, prefix: str) -> bool:
        """Whether a prefix has any objects, without listing all of them."""
        return self._must(prefix, lambda: any(obstore.list(self._store, prefix or None, chunk_size=1)))

    def at(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _must(self, key: str, ask: Callable[[], T]) -> T:
        """The answer to a request for which `FileNotFoundError` can only mean that the bucket does not exist."""
        try:
            return self._ask(key, ask)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _no_bucket(self) -> StorageError:
        return StorageError(f"{self.root} does not exist", hint="check its name and the endpoint, or create it first")

    def _ask(self, key: str, ask: Callable[[], T], but: tuple[type[Exception], ...] = (FileNotFoundError,)) -> T:
        """The answer to a request that is safe to repeat, tried up to `_TRIES` times with growing pauses.

        These tries come on top of those of obstore, which does not repeat a request whose answer broke off.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        for attempt in range(1, _TRIES + 1):
            patient_until = math.inf if attempt == 1 else end if attempt < _TRIES else 0
            with self._explained(key, but=but, patient_until=patient_until):
                return ask()
            time.sleep(random.uniform(0.5, 1) * 0.05 * 2**attempt)
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def _explained(self, key: str, *, but: tuple[type[Exception], ...], patient_until: float = 0) -> Iterator[None]:
        """Turn errors into ours, except those in `but`. Until `patient_until`, errors that may pass are ignored."""
        self._check_process()
        if time.monotonic() < self._backed_off_until:
            raise SilentStoreError(f"{self.at(key)}: no answer a moment ago", hint=_SILENCE_HINT)
        try:
            with IN_FLIGHT:
                yield
        except but:
            raise
        except BaseException as error:
            if is_panic(error):
                raise _panic_error(self.at(key), error, self.root.partition(":")[0]) from None
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
    """A client with the credentials of the environment or a profile."""
    options: Any = {"client_options": dict(_CLIENT), "retry_config": _RETRY}
    try:
        if root.scheme in _OTHERS:
            if endpoint_of(root.scheme).startswith("http://"):
                options["client_options"]["allow_http"] = True
            return _OTHERS[root.scheme](root.bucket, **options)
        settings = {"checksum_algorithm": "SHA256", **s3_settings()}
        if settings.pop("allow_http", False):
            options["client_options"]["allow_http"] = True
        # The store itself compares the bytes that arrive with their SHA-256.
        return S3Store(root.bucket, config=cast("S3Config", settings), **options)
    except BaseException as error:
        if is_panic(error):
            raise _panic_error(root.root, error, root.scheme) from None
        if not isinstance(error, (answers.BaseError, ValueError)):
            raise
        hint = f"check the credentials ({_CREDENTIALS[root.scheme]}), and the endpoint if one is named"
        raise StorageError(f"{root.root}: {_reason(error)}", hint=hint) from None


def _panic_error(place: str, error: BaseException, scheme: str) -> StorageError:
    """The error for a panic of obstore, usually caused by settings with which it cannot form a request."""
    return StorageError(
        f"{place}: obstore cannot make the request: {_reason(error)}",
        hint=f"check the credentials ({_CREDENTIALS[scheme]}) and the endpoint: does one have a space or a line end?",
    )


def _content(data: bytes | Path) -> bytes | mmap.mmap:
    """The bytes to put. A file is mapped, so it takes no memory of this process."""
    if isinstance(data, bytes) or not data.stat().st_size:
        return data if isinstance(data, bytes) else b""
    with data.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _range(start: int, stop: int, etag: str) -> Any:
    return {"range": (start, stop), **({"if_match": etag} if etag else {})}


def _check_etag(meta: Any, etag: str) -> None:
    """Compare the etag here too, because a store may ignore the condition of a request."""
    if etag and _quoted(meta["e_tag"]) != _quoted(etag):
        raise answers.PreconditionError(f"its etag is {meta['e_tag']}")


def _found(meta: Any, sha256: str = "") -> ObjectInfo:
    modified = int(meta["last_modified"].timestamp() * 1_000_000_000)
    return ObjectInfo(meta["path"], meta["size"], _quoted(meta["e_tag"]), modified, sha256, meta["version"] or "")


def _seconds_since(found: ObjectInfo) -> float:
    return time.time() - found.modified / 1_000_000_000


def _quoted(etag: str | None) -> str:
    """An etag in quotes, as in headers. Azure lists it without."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


def _reason(error: BaseException) -> str:
    """The message of a server or connection in one line. Little of it is kept, because it may repeat credentials."""
    if _METADATA in str(error):
        return "there are no credentials"
    text = " ".join(str(error).partition("Debug source:")[0].split())
    said = re.search(r"<Code>([\w.-]+)</Code>", text)
    status = re.search(r"status code: \d+ [A-Za-z -]*", text)
    text = text[: status.end()] if status else text.partition("<")[0][:300]
    return f"{text.rstrip(' :')}{f': {said[1]}' if said else ''}"


def _silence(error: BaseException) -> str:
    """Why there was no answer; empty if there was one."""
    if not re.search(r"HttpError \{\s+kind: (Connect|Timeout)", str(error)) or _METADATA in str(error):
        return ""
    cause = re.search(r'(?:message|error): "([^"]{1,200})"', str(error))
    return cause[1] if cause else "it takes too long"


def _is_denied(error: BaseException) -> bool:
    """Whether credentials or rights are the cause. For listings, only the text of the error has the status."""
    denied = isinstance(error, answers.PermissionDeniedError | answers.UnauthenticatedError)
    return denied or _METADATA in str(error) or re.search(r"status code: 40[13]\b", str(error)) is not None


def _hint(error: BaseException, scheme: str) -> str:
    if isinstance(error, answers.InvalidPathError):
        return "rename the object: its name has an empty or a relative part"
    if _is_denied(error):
        return f"check the credentials ({_CREDENTIALS[scheme]}) and their rights"
    return "check the network, the endpoint and the credentials, then run the same command again to resume"


def all_at_once(asks: Sequence[Callable[[], T]]) -> list[T]:
    """The answers to several requests, made concurrently. The first error is raised after all have ended."""
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
    """The endpoint that the environment names for a scheme; empty for the default of the cloud."""
    name = next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)
    return "" if name is None else _checked(os.environ[name], name)


def _checked(endpoint: str, where: str) -> str:
    """The endpoint, if it is a URL. Errors do not show it, because it may contain a secret."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint) or not _has_host(endpoint):
        raise RecipeError(
            f"{where} is not the address of a server", hint="write it like https://minio.example.org:9000"
        )
    return endpoint


def _has_host(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is not a number
        return False


def s3_settings() -> dict[str, Any]:
    """Settings that obstore does not take from the environment; `allow_http` if the endpoint is not encrypted."""
    settings: dict[str, Any] = {}
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        settings = _profile(os.environ.get("AWS_PROFILE", ""))
    # In a header, control characters would make the client panic.
    for where, value in {**{name: os.environ.get(name, "") for name in _IN_HEADERS}, **settings}.items():
        if not value.isprintable():
            raise RecipeError(
                f"{where} contains a line end or another control character", hint="set it again without it"
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
    """The static keys, region and endpoint of a profile; empty if there is no default profile."""
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
            raise RecipeError(f"{path} cannot be read", hint="it has sections of `name = value` lines") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    if name and not found:
        raise RecipeError(f"there is no AWS profile {name!r}", hint="check AWS_PROFILE and ~/.aws/config")
    if name and "aws_access_key_id" not in found:
        raise RecipeError(
            f"the AWS profile {name!r} has no keys of its own",
            hint="put temporary keys into the environment: aws configure export-credentials --format env",
        )
    return {ours: found[theirs] for theirs, ours in _FIELDS.items() if theirs in found}


class RequestsInFlight:
    """Counts the requests in flight. A fork waits until there are none."""

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
        """Wait for the last request to end, and do not let another begin."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._count)

    def resume(self) -> None:
        self._changed.release()


IN_FLIGHT = RequestsInFlight()
os.register_at_fork(before=IN_FLIGHT.wait_for_none, after_in_parent=IN_FLIGHT.resume, after_in_child=IN_FLIGHT.resume)
