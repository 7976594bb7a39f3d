"""Datasets on the Hugging Face hub: the files of a commit or config, and verified copies on this machine.

    hf://datasets/org/name                    all of it, at the current commit of the main branch
    hf://datasets/org/name@revision:config    at a branch, tag or commit; the files of one config
    hf://datasets/org/name/data/*.parquet     the files that match a pattern
    hf://datasets/org/name@commit/some/file   what these resolve to: a file that cannot change

Copies are stored in the cache of the hub's client (HF_HOME), where other programs find them too. The listing of a
commit has the hash of each file: SHA-256 for large files, git's hash for small ones.

The card of a dataset says which files a config has, by the rules of Hugging Face's `datasets` package:

configs:
- config_name: small
  data_dir: data              where the patterns begin; without patterns, all files below it
  data_files:                 a pattern, a list of patterns, or one entry per split
  - split: train
    path: en/*.jsonl
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tokenmill.errors import RecipeError, SourceError
from tokenmill.storage import hub_client
from tokenmill.storage.base import _PREFIX, is_hub, wrong_key
from tokenmill.storage.globs import is_pattern, matcher
from tokenmill.storage.hub_client import HubFile, files_at

T = TypeVar("T")


_NAME = r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*"
_PLAIN = re.compile(rf"(?P<repo>{_NAME})(?:@(?P<revision>[\w./-]+?))?(?::(?P<config>[\w.-]+))?", re.ASCII)
_URL = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME})(?:@(?P<revision>[^/:@?#]+))?(?::(?P<config>[\w.-]+))?(?:/(?P<key>.+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CARD = "README.md"
_FORM = "write it like hf://datasets/org/name@revision:config"
_BLOCK = 1 << 20
_SHOWN = 3
_SHA256_CHARS = 64
_REQUESTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A dataset on the hub, or a file in it."""

    repo: str
    revision: str
    config: str
    key: str

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        return (
            f"{_PREFIX}{self.repo}{f'@{self.revision}' if self.revision else ''}{config}{self.key and f'/{self.key}'}"
        )


def plain_name(place: str) -> HubPlace | None:
    """The dataset that `org/name` names; None if the text does not look like that."""
    found = _PLAIN.fullmatch(place)
    return HubPlace(found["repo"], found["revision"] or "", found["config"] or "", "") if found else None


def parse(place: str) -> HubPlace:
    """The parts of a hub URL. Any other URL is a `RecipeError` that does not show it."""
    found = _URL.fullmatch(place)
    if found is None:
        raise RecipeError("a hf:// URL does not name a dataset", hint=_FORM)
    key = (found["key"] or "").rstrip("/")
    if what := wrong_key(key.replace("#", "")):  # a file of C# texts may have it in its name
        raise RecipeError(f"a hf:// URL contains {what}", hint=_FORM)
    return HubPlace(found["repo"], found["revision"] or "", found["config"] or "", key)


def pinned(place: HubPlace) -> HubPlace:
    """The same place at the current commit of its revision."""
    revision = place.revision or "main"
    if _COMMIT.fullmatch(revision):
        commit = revision
    elif hub_client.is_offline():
        commit = _cached_ref(place.repo, revision)
    else:
        commit = hub_client.commit_of(place.repo, revision)
    return HubPlace(place.repo, commit, place.config, place.key)


def at_commit(argument: str, root: str) -> str:
    """The argument at the commit of `root`, unless `root` is of another dataset, or the argument names a commit."""
    place, before = parse(argument) if is_hub(argument) else plain_name(argument), parse(root)
    if place is None or place.repo != before.repo or _COMMIT.fullmatch(place.revision):
        return argument
    return str(replace(place, revision=before.revision))


def files(place: HubPlace) -> list[HubFile]:
    """The files of a pinned place: those of its config, below its key, or matched by its key."""
    found = files_at(place.repo, place.revision)
    keys = _of_config(place, list(found)) if place.config else list(found)
    if place.key in found:
        keys = [key for key in keys if key == place.key]
    elif is_pattern(place.key):
        keys = list(filter(matcher(place.key), keys))
    elif place.key:
        keys = [key for key in keys if key.startswith(f"{place.key}/")]
    return [found[key] for key in keys]


def find(path: str) -> HubFile:
    """A file at a commit, from the listing."""
    place = parse(path)
    found = files_at(place.repo, place.revision).get(place.key)
    if found is None:
        raise SourceError(f"cannot read {path}: it does not exist", hint="check the revision")
    return found


def ask(path: str) -> None:
    """Raise `SilentStoreError` if the hub does not answer."""
    if not hub_client.is_offline():
        place = parse(path)
        hub_client.commit_of(place.repo, place.revision)


def require(paths: Iterable[str]) -> None:
    """Raise `SourceError` if some of these files are not in the cache and cannot be fetched."""
    if not hub_client.is_offline():
        return
    wanted = list(paths)
    copies = {path: cached(path) for path in wanted}
    gone = [parse(path).key for path in wanted if copies[path] is None]
    if gone:
        more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
        root = replace(parse(wanted[0]), key="")
        raise SourceError(
            f"{root}: {len(gone)} of {len(wanted)} files are not in the cache, and HF_HUB_OFFLINE is set: "
            f"{', '.join(gone[:3])}{more}",
            hint="unset it, or fetch them with snapshot_download of huggingface_hub first",
        )
    for path, local in copies.items():
        if local is not None and os.path.getsize(local) != find(path).size:
            raise _damaged(path)


def fetch(path: str) -> str:
    """A copy of a file on this machine, verified against the hash that the hub lists."""
    require([path])
    place, wanted = parse(path), find(path)
    for _ in range(2):
        local = hub_client.download(place.repo, place.revision, place.key)
        found = os.stat(local)
        if _is_right(local, wanted, found.st_size, found.st_mtime_ns):
            return local
        if hub_client.is_offline():
            raise _damaged(path)
        remove(path)  # the bytes changed in transit or on disk; one more download decides
    raise SourceError(
        f"{path}: the downloaded bytes do not hash to {wanted.etag}",
        hint="check the network and the disk, then run the same command to resume",
    )


def _damaged(path: str) -> SourceError:
    """The error for a damaged copy while offline. The copy stays, because it cannot be replaced."""
    return SourceError(
        f"{path}: the copy in the cache does not hash to {find(path).etag}, as the hub listed it, "
        "and HF_HUB_OFFLINE is set",
        hint="unset it, and the file is fetched again",
    )


class HubStore:
    """The hub as a store that is read in ranges: for a probe, which does not need the whole file."""

    def __init__(self, place: HubPlace) -> None:
        self._place = place

    def begin(self, ask: Callable[..., T], *given: Any) -> Future[T]:
        """Make a request in a thread."""
        return _pool(os.getpid()).submit(ask, *given)

    def fetch(self, key: str, start: int, stop: int, etag: str) -> bytes:
        """Bytes [start, stop) of a file. At a commit it cannot change, so the etag is not compared."""
        return hub_client.fetch_range(self._place.repo, self._place.revision, key, start, stop)


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process. A forked process does not inherit them."""
    return ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="tokenmill-hub")


def cached(path: str) -> str | None:
    """The path of the copy of a file; None if there is none."""
    place = parse(path)
    return hub_client.find_copy(place.repo, place.revision, place.key)


def is_here(path: str) -> bool:
    """Whether the bytes of a file are on this machine, also under another name or revision."""
    blob = os.path.join(hub_client.cache_folder(parse(path).repo), "blobs", find(path).etag)
    return cached(path) is not None or os.path.exists(blob)


def remove(path: str) -> None:
    """Remove a copy. A process that has it open can still read it."""
    local = cached(path)
    if local is not None:
        for name in (os.path.realpath(local), local):
            with contextlib.suppress(OSError):
                os.unlink(name)


@functools.lru_cache(maxsize=4096)
def _is_right(local: str, wanted: HubFile, size: int, modified: int) -> bool:
    """Whether a copy has the bytes that the hub listed. An unchanged copy is not hashed again."""
    if size != wanted.size:
        return False
    is_large = len(wanted.etag) == _SHA256_CHARS
    sha = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(local, "rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest() == wanted.etag


def _cached_ref(repo: str, revision: str) -> str:
    try:
        with open(os.path.join(hub_client.cache_folder(repo), "refs", revision), encoding="ascii") as file:
            commit = file.read(1000).strip()
    except (OSError, ValueError):
        commit = ""
    if not _COMMIT.fullmatch(commit):
        raise SourceError(
            f"hf://datasets/{repo}: its revision {revision} was never fetched, and HF_HUB_OFFLINE is set",
            hint="unset it, or name the commit",
        )
    return commit


def _of_config(place: HubPlace, keys: list[str]) -> list[str]:
    """The files of a config: those of the dataset's card, else those of the folder with its name."""
    config = find_config(_card(place), place.config)
    if config is not None:
        return files_of(config, keys, where=str(replace(place, key="")))
    found = [key for key in keys if key.startswith((f"{place.config}/", f"data/{place.config}/"))]
    if not found:
        raise RecipeError(f"hf://datasets/{place.repo} has no config {place.config!r}", hint="check its page")
    return found


def _card(place: HubPlace) -> dict[str, Any]:
    if _CARD not in files_at(place.repo, place.revision):
        return {}
    local = fetch(str(replace(place, config="", key=_CARD)))
    return hub_client.read_card(place.repo, place.revision, local)


_EVERYTHING = "**"
# Files that describe a dataset are not data, unless they are named.
_ABOUT = (
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
)
_CHECK = "check the card, or name the files with a glob"


def find_config(card: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of a config in a card; None if there is none."""
    entries = card.get("configs")
    found = [
        entry
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and entry.get("config_name") == name
    ]
    return found[-1] if found else None


def files_of(config: Mapping[str, Any], keys: Iterable[str], *, where: str) -> list[str]:
    """The files of a config, in the order of `keys`. A named file that does not exist is a `RecipeError`."""
    keys = list(keys)
    wanted = config.get("data_files")
    found: set[str] = set()
    for pattern in [_EVERYTHING] if wanted is None else _patterns(wanted, where):
        if "://" in pattern or pattern.startswith("/"):
            raise RecipeError(f"{where} names files elsewhere: {pattern}", hint="name them yourself")
        some = select(keys, posixpath.join(str(config.get("data_dir") or ""), pattern))
        if not some and not is_pattern(pattern):
            raise RecipeError(f"{where} names {pattern}, which does not exist", hint=_CHECK)
        found.update(some)
    if not found:
        raise RecipeError(f"{where} matches no files", hint=_CHECK)
    return [key for key in keys if key in found]


def select(keys: Iterable[str], pattern: str) -> list[str]:
    """The keys that a pattern of a card matches. Folders that begin with two underscores must be named."""
    pattern = "/".join(part for part in pattern.split("/") if part != ".")
    matches = matcher(pattern)
    named, num_special = posixpath.basename(pattern), _num_special(pattern)
    return [
        key
        for key in keys
        if matches(key)
        and _num_special(key) == num_special
        and (posixpath.basename(key) not in _ABOUT or posixpath.basename(key) == named)
    ]


def _num_special(key: str) -> int:
    return sum(part.startswith("__") for part in key.split("/")[:-1])


def _patterns(data_files: Any, where: str) -> Iterator[str]:
    if isinstance(data_files, str):
        yield data_files
    elif isinstance(data_files, list):
        for item in data_files:
            yield from _patterns(item.get("path") if isinstance(item, dict) else item, where)
    else:
        raise RecipeError(f"{where}: its data_files are neither patterns nor a list of them", hint=_CHECK)
