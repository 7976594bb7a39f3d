"""Where a dataset is: a path of this machine or a URL, and the folder that stands for it.

URLs of object stores: which ones are taken, and what they name.

    s3://bucket/some/prefix        S3 and what speaks its language (R2, MinIO, Ceph): AWS_ENDPOINT_URL names it
    gs://bucket/some/prefix        Google Cloud Storage
    az://container/some/prefix     Azure Blob Storage

Whatever else a URL may hold (users, queries, fragments, a second URL) is refused: secrets come from
the environment or a profile, and a name leads to one place only.

Enough room before the work begins, rather than a full disk after hours.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any

from tokenmill import arguments, records
from tokenmill.errors import DiskFullError, RecipeError
from tokenmill.sizes import format_bytes
from tokenmill.storage.local import Folder

HUB_SCHEME = "hf://"
_PREFIX = "hf://datasets/"


def is_hub(place: str) -> bool:
    return place.startswith(HUB_SCHEME)


CACHE = "TOKENMILL_CACHE"


def open_folder(
    path: str | os.PathLike[str], *, spool: str | os.PathLike[str] | None = None, name: str = "path"
) -> Folder:
    """The folder at a path or a URL. What is written to a URL grows below `spool` first. Errors say its `name`."""
    text = arguments.place(name, path)
    if not is_url(text):
        return Folder(os.path.abspath(text))
    url = str(parse_url(text))
    # Only here: a trainer that reads a local dataset needs no object stores.
    from tokenmill.storage.object_folder import ObjectFolder

    base = local_folder(spool).path if spool is not None else os.path.join(cache_path(), "spool")
    return ObjectFolder(url, spool=os.path.join(base, f"tokenmill-{records.digest(url)[:12]}"))


def local_folder(path: str | os.PathLike[str], *, name: str = "path") -> Folder:
    """The folder at a path of this machine."""
    text = arguments.place(name, path)
    if is_url(text):
        raise RecipeError(f"{text.partition(':')[0]}:// is no place on this machine", hint="give a local folder")
    return Folder(os.path.abspath(text))


def cache_path() -> str:
    """Where copies of remote files are kept on this machine: TOKENMILL_CACHE, or a folder of the user's."""
    found = os.environ.get(CACHE) or os.path.join(os.path.expanduser("~"), ".cache", "tokenmill")
    return local_folder(found, name=CACHE).path


def to_record(folder: Folder) -> dict[str, Any]:
    """A folder as plain data, for another process of this machine."""
    names = [field.name for field in dataclasses.fields(folder)]
    return {name: getattr(folder, name) for name in names if name != "fs"}


def from_record(record: dict[str, Any]) -> Folder:
    """The folder that `to_record` wrote down."""
    if "spool" not in record:
        return Folder(**record)
    from tokenmill.storage.object_folder import ObjectFolder

    return ObjectFolder(**record)


def ready(folder: Folder) -> tuple[Folder, str]:
    """The folder as a writer needs it, and what its user should know: not every store keeps two writers apart."""
    if folder.is_local:
        return folder, ""
    from tokenmill.storage.object_folder import ObjectFolder

    assert isinstance(folder, ObjectFolder), "there are no others"
    probed = folder.probed()
    note = f"{folder.path}: this store ignores conditional puts, so nothing but this one build may write there"
    return probed, "" if probed.conditional else note


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
    """Whether a place is a URL of any kind, or several chained. A slash is enough: pathlib takes the other one away."""
    return _ANY_SCHEME.match(place) is not None


def parse_url(place: str) -> Url:
    """The parts of a URL that tokenmill goes to; any other one is a `RecipeError` that shows nothing of it."""
    scheme = place.partition(":")[0]
    if scheme not in SCHEMES:
        raise RecipeError(
            f"{scheme}:// is neither read nor written by this version",
            hint=f"give a local path, or a URL of {', '.join(f'{known}://' for known in SCHEMES)}",
        )
    if not place.startswith(f"{scheme}://"):
        raise RecipeError(f"{scheme}: is not followed by //", hint="give a URL as a string: a Path changes it")
    found = _URL.fullmatch(place)
    if "@" in place.removeprefix(f"{scheme}://").partition("/")[0]:
        raise RecipeError(
            f"a {scheme}:// URL holds a user or a secret",
            hint="give credentials in the environment, or in a profile (AWS_PROFILE)",
        )
    if found is None:
        raise RecipeError(f"a {scheme}:// URL names no bucket", hint=f"write it like {scheme}://bucket/prefix")
    key = (found["key"] or "").rstrip("/")
    if what := wrong_key(key):
        raise RecipeError(f"a {scheme}:// URL holds {what}", hint=f"write it like {scheme}://bucket/prefix")
    return Url(scheme, found["bucket"], key)


def wrong_key(key: str) -> str:
    """What a key must not hold, if it does; else ""."""
    wrong = {
        "a second URL": "://" in key or "::" in key,
        "a query or a fragment": "#" in key or re.search(r"\?[\w.~-]+=", key) is not None,
        "a control character": not key.isprintable(),
        "an empty or a relative part": bool(key) and any(part in ("", ".", "..") for part in key.split("/")),
    }
    return next((what for what, is_there in wrong.items() if is_there), "")


MARGIN_BYTES = 64_000_000


def same_disk(one: Folder, other: Folder) -> bool:
    """Whether two folders of this machine, made already or not, are on the same file system."""
    return _device(one.path) == _device(other.path)


def _device(path: str) -> int:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def has_space(folder: Folder, need: int) -> bool:
    """Whether so many bytes, and a margin, are free, as far as anybody knows."""
    return _fits(need, folder.free_bytes())


def require_space(folder: Folder, need: int, *, hint: str = "free some space, or choose another output") -> None:
    """Raise `DiskFullError` unless so many bytes, and a margin, are free."""
    free = folder.free_bytes()
    if free is not None and not _fits(need, free):
        raise DiskFullError(
            f"{folder.path} needs about {format_bytes(need + MARGIN_BYTES)} and has {format_bytes(free)} free: "
            f"{format_bytes(need + MARGIN_BYTES - free)} are missing",
            hint=hint,
        )


def _fits(need: int, free: int | None) -> bool:
    return free is None or need <= 0 or need + MARGIN_BYTES <= free
