"""What a dataset folder can do, wherever it is: the `Storage` protocol. Paths and URLs become folders here.

    data/owt                       local.py: a folder of this machine
    s3://bucket/some/prefix        object_folder.py: S3 and compatible stores (R2, MinIO, Ceph): set AWS_ENDPOINT_URL
    gs://bucket/some/prefix        Google Cloud Storage
    az://container/some/prefix     Azure Blob Storage

A URL with anything else in it (a user, a query, a fragment, a second URL) is refused: secrets come from the environment
or a profile, and each place has one name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tokenmill import arguments, records
from tokenmill.errors import DiskFullError, RecipeError
from tokenmill.sizes import format_bytes
from tokenmill.storage.filesystem import FileStat, FileSystem
from tokenmill.storage.local import Folder, Forget, R, SizeOf, T
from tokenmill.storage.output import Digest, EventLog, Output


class Storage(Protocol):
    """A dataset folder: names like `train/00000.bin`, and durable files under them.

    A file appears under its name as a whole or not at all, and its bytes are durable by then.
    """

    # What it costs or allows. Callers ask this, never what kind of folder it is.
    can_map: ClassVar[bool]
    """Files can be memory-mapped. Otherwise a reader keeps local copies of them."""
    links_are_free: ClassVar[bool]
    """A second name for a file takes no time. Otherwise the commit copies shards while units run."""
    stat_is_cheap: ClassVar[bool]
    """Sizes can be asked file by file. Otherwise the commit, which asks for each file anyway, is the only check."""
    writes_are_fast: ClassVar[bool]
    """A caller can wait for a write. Otherwise a worker encodes the next unit during an upload."""
    has_spool: ClassVar[bool]
    """Files grow in a spool on this machine before they come here, so that scratch would be one copy more."""

    @property
    def path(self) -> str:
        """The path or URL of the folder."""

    @property
    def fs(self) -> FileSystem:
        """The system calls behind local files, those of the spool included."""

    @property
    def holds_all(self) -> bool:
        """Whether all files may be here at the same time. A cache of a few shards cannot hold all."""

    def at(self, name: str) -> str:
        """The path or URL of a file."""

    def relative(self, path: str) -> str:
        """The name of the file at a path."""

    def to_record(self) -> dict[str, Any]:
        """This folder as plain data, for `from_record` in another process of this machine."""

    # Before a build.

    def ready(self) -> tuple[Storage, str]:
        """This folder as a writer needs it, and a note for the user: not every store keeps two writers apart."""

    def make(self, name: str = "") -> None:
        """Make the folder and its missing parents, each one durable."""

    def check_place(self) -> None:
        """Raise `OutputError` if the path is taken by something else than a folder."""

    def check_no_links(self, names: Iterable[str]) -> None:
        """Raise `StorageError` if one of these folders, or one in .build, is a link. Changes nothing."""

    def free_bytes(self) -> int | None:
        """How much can still be written; None if that is unknown."""

    # Writing. `committed` says whether a receipt vouches for the name already.

    def create(self, name: str) -> Output:
        """Start a new file; it appears under its name only when it is published."""

    def publish(self, outputs: Sequence[Output], *, committed: Callable[[], bool] = ...) -> dict[str, Digest]:
        """Make files durable under their final names."""

    def write(self, name: str, data: bytes, *, committed: Callable[[], bool] = ...) -> Digest:
        """Publish one small file."""

    def write_parts(self, name: str, parts: Iterable[bytes], *, committed: Callable[[], bool] = ...) -> Digest:
        """Publish one file from its parts."""

    def replace(self, name: str, data: bytes) -> None:
        """Publish a small file in place of its older version."""

    def claim(self, name: str, data: bytes) -> bool:
        """Publish a small file unless it exists, without its durability; False if another process was faster."""

    def touch(self, name: str) -> None:
        """Renew the time of a file: a heartbeat."""

    def link(self, name: str, new: str, digest: Digest) -> None:
        """Give a published file with this digest a second name."""

    def link_all(self, links: Iterable[tuple[str, str, Digest]]) -> None:
        """`link` for each of many (name, new name, digest)."""

    def sync(self, name: str) -> None:
        """Make the names inside a folder durable."""

    def open_log(self, name: str) -> EventLog:
        """A log of events to append to."""

    # Reading.

    def read(self, name: str, *, max_bytes: int = ...) -> bytes:
        """All of a small file."""

    def part(self, name: str, start: int, size: int) -> bytes:
        """These bytes of a file; fewer where it ends."""

    def blocks(self, name: str, *, max_bytes: int | None = None, cold: bool = False) -> Generator[memoryview]:
        """A file's bytes, block by block; each block is valid until the next one."""

    def digest(self, name: str, *, cold: bool = False) -> Digest:
        """Size and SHA-256 of a file as it is stored now."""

    def stat(self, name: str) -> FileStat | None:
        """Size and kind of a file or folder; None if it does not exist."""

    def exists(self, name: str) -> bool:
        """Whether a name is taken."""

    def size_of(self, name: str) -> int | None:
        """The size of a plain file; None if it does not exist."""

    def sizes_in(self, parents: Iterable[str]) -> SizeOf:
        """`size_of` for many files in these folders, with one listing for each folder where that is faster."""

    def names(self, name: str = "") -> list[str]:
        """The names in a folder, in order."""

    def sizes(self, name: str) -> dict[str, int]:
        """The files in a folder, and the size of each."""

    def need(self, names: Sequence[str], forget: Forget | None = None) -> AbstractContextManager[None]:
        """Have the files of a shard on this machine during a `with` block, and afterwards until `forget` is called."""

    def each(self, ask: Callable[[T], R], items: Iterable[T], *, ahead: int = ...) -> Iterator[R]:
        """The answer of `ask`, which asks this folder something, for each item, in order."""

    def announce(self, items: Iterable[T], name: Callable[[T], str], *, ahead: int = ...) -> Iterator[T]:
        """The items, in order, with each file of that name read ahead where that helps."""

    # Removing.

    def quarantine(self, name: str) -> str:
        """Move a file that cannot be trusted out of the way, and keep it."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove many files or folders."""

    def remove_tree(self, name: str) -> None:
        """Remove a file, or a folder with its content. Links are removed, not followed."""

    def remove_empty(self, name: str) -> None:
        """Remove a folder if it is empty."""

    def sweep(self, name: str = "") -> None:
        """Remove temp files that a killed writer left."""

    # Working together.

    def alone(self) -> AbstractContextManager[None]:
        """Be the only process of this machine in this block, where the folder can be locked."""

    def back_off(self) -> None:
        """Send no requests for a while to a store that does not answer."""


HUB_SCHEME = "hf://"
_PREFIX = "hf://datasets/"


def is_hub(place: str) -> bool:
    return place.startswith(HUB_SCHEME)


CACHE = "TOKENMILL_CACHE"


def open_folder(
    path: str | os.PathLike[str], *, spool: str | os.PathLike[str] | None = None, name: str = "path"
) -> Storage:
    """The folder at a path or URL. Files for a URL grow below `spool` first. Errors mention the argument's `name`."""
    text = arguments.place(name, path)
    if not is_url(text):
        return Folder(os.path.abspath(text))
    url = str(parse_url(text))
    # A trainer that reads a local dataset does not load object stores.
    from tokenmill.storage.object_folder import ObjectFolder

    base = local_folder(spool).path if spool is not None else os.path.join(cache_path(), "spool")
    return ObjectFolder(url, spool=os.path.join(base, f"tokenmill-{records.digest(url)[:12]}"))


def local_folder(path: str | os.PathLike[str], *, name: str = "path") -> Folder:
    """The folder at a path of this machine."""
    text = arguments.place(name, path)
    if is_url(text):
        raise RecipeError(f"{text.partition(':')[0]}:// is not a place on this machine", hint="give a local folder")
    return Folder(os.path.abspath(text))


def cache_path() -> str:
    """Where copies of remote files are kept on this machine: TOKENMILL_CACHE, or a folder in the user's home."""
    found = os.environ.get(CACHE) or os.path.join(os.path.expanduser("~"), ".cache", "tokenmill")
    return local_folder(found, name=CACHE).path


def from_record(record: dict[str, Any]) -> Storage:
    """The folder of a record that `Storage.to_record` made."""
    if "spool" not in record:
        return Folder(**record)
    from tokenmill.storage.object_folder import ObjectFolder

    return ObjectFolder(**record)


SCHEMES = ("s3", "gs", "az")
_ANY_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/:]")
_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*)(?:/(?P<key>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Url:
    """A bucket and a key in it: an object, a prefix, or a pattern of them."""

    scheme: str
    bucket: str
    key: str

    @property
    def root(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root


def is_url(place: str) -> bool:
    """Whether a place is a URL of any kind, or a chain of them. One slash is enough: pathlib removes the other."""
    return _ANY_SCHEME.match(place) is not None


def parse_url(place: str) -> Url:
    """The parts of a URL of a known scheme. Any other URL is a `RecipeError` that does not show it."""
    scheme = place.partition(":")[0]
    if scheme not in SCHEMES:
        raise RecipeError(
            f"{scheme}:// URLs are not supported by this version",
            hint=f"give a local path, or a URL of {', '.join(f'{known}://' for known in SCHEMES)}",
        )
    if not place.startswith(f"{scheme}://"):
        raise RecipeError(f"{scheme}: is not followed by //", hint="give a URL as a string: a Path changes it")
    found = _URL.fullmatch(place)
    if "@" in place.removeprefix(f"{scheme}://").partition("/")[0]:
        raise RecipeError(
            f"a {scheme}:// URL contains a user or a secret",
            hint="give credentials in the environment, or in a profile (AWS_PROFILE)",
        )
    if found is None:
        raise RecipeError(f"a {scheme}:// URL names no bucket", hint=f"write it like {scheme}://bucket/prefix")
    key = (found["key"] or "").rstrip("/")
    if what := wrong_key(key):
        raise RecipeError(f"a {scheme}:// URL contains {what}", hint=f"write it like {scheme}://bucket/prefix")
    return Url(scheme, found["bucket"], key)


def wrong_key(key: str) -> str:
    """What a key contains that it must not; empty if it is valid."""
    wrong = {
        "a second URL": "://" in key or "::" in key,
        "a query or a fragment": "#" in key or re.search(r"\?[\w.~-]+=", key) is not None,
        "a control character": not key.isprintable(),
        "an empty or a relative part": bool(key) and any(part in ("", ".", "..") for part in key.split("/")),
    }
    return next((what for what, is_there in wrong.items() if is_there), "")


MARGIN_BYTES = 64_000_000


def same_disk(one: Storage, other: Storage) -> bool:
    """Whether two folders of this machine, existing or not, are on the same file system."""
    return _device(one.path) == _device(other.path)


def _device(path: str) -> int:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def has_space(folder: Storage, need: int) -> bool:
    """Whether `need` bytes and a margin are free. True if that is unknown."""
    return _fits(need, folder.free_bytes())


def require_space(folder: Storage, need: int, *, hint: str = "free some space, or choose another output") -> None:
    """Raise `DiskFullError` unless `need` bytes and a margin are free."""
    free = folder.free_bytes()
    if free is not None and not _fits(need, free):
        raise DiskFullError(
            f"{folder.path} needs about {format_bytes(need + MARGIN_BYTES)} and has {format_bytes(free)} free: "
            f"{format_bytes(need + MARGIN_BYTES - free)} are missing",
            hint=hint,
        )


def _fits(need: int, free: int | None) -> bool:
    return free is None or need <= 0 or need + MARGIN_BYTES <= free
