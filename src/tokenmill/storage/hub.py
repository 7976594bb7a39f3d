"""Datasets on the hub: which files one has, and copies of them on this machine.

    hf://datasets/org/name                    all of it, as its main branch is now
    hf://datasets/org/name@revision:config    as it was at a branch, tag or commit; the files of one config
    hf://datasets/org/name@commit/some/file   what these become: a file that cannot change any more

Copies are in the hub's own cache (HF_HOME), where its other programs find them too; HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE are honoured because its own client makes the requests. What a copy must hash to stands in the
listing: SHA-256 for large files, git's hash for small ones. Only this module and the tokenizers import the client.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tokenmill.errors import RecipeError, SourceError
from tokenmill.redaction import redact

T = TypeVar("T")

SCHEME = "hf://"
_PREFIX = "hf://datasets/"
_NAME = r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*"
_PLAIN = re.compile(rf"(?P<repo>{_NAME})(?:@(?P<revision>[\w./-]+?))?(?::(?P<config>[\w.-]+))?", re.ASCII)
_URL = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME})(?:@(?P<revision>[^/:@?#]+))?(?::(?P<config>[\w.-]+))?(?:/(?P<key>[^?]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOCK = 1 << 20
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


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset at a commit. `etag` is what its bytes hash to."""

    key: str
    size: int
    etag: str


def is_hub(place: str) -> bool:
    return place.startswith(SCHEME)


def plain_name(place: str) -> HubPlace | None:
    """The dataset that `org/name` names, if a text looks like that at all."""
    found = _PLAIN.fullmatch(place)
    return HubPlace(found["repo"], found["revision"] or "", found["config"] or "", "") if found else None


def parse(place: str) -> HubPlace:
    """The parts of a hub URL; any other one is a `RecipeError` that shows nothing of it."""
    found = _URL.fullmatch(place)
    parts = (found["key"] or "").rstrip("/").split("/") if found else []
    if found is None or not place.isprintable() or (parts != [""] and {"", ".", ".."} & set(parts)):
        raise RecipeError(
            "a hf:// URL does not name a dataset", hint="write it like hf://datasets/org/name@revision:config"
        )
    return HubPlace(found["repo"], found["revision"] or "", found["config"] or "", "/".join(parts))


def pinned(place: HubPlace) -> HubPlace:
    """The same place at the commit that its revision means now."""
    revision = place.revision or "main"
    if _COMMIT.fullmatch(revision):
        commit = revision
    elif _is_offline():
        commit = _cached_ref(place.repo, revision)
    else:
        with _explained(place.repo):
            commit = str(_api().dataset_info(place.repo, revision=revision).sha)
    return HubPlace(place.repo, commit, place.config, place.key)


def at_commit(argument: str, root: str) -> str:
    """A dataset, as it was named, at the commit of `root`; unless that is of another one, or a commit was named."""
    place, before = parse(argument) if is_hub(argument) else plain_name(argument), parse(root)
    if place is None or place.repo != before.repo or _COMMIT.fullmatch(place.revision):
        return argument
    return str(replace(place, revision=before.revision))


def files(place: HubPlace) -> list[HubFile]:
    """The files of a pinned place: those of its config, or below its key, or those that its key matches."""
    found = _tree(place.repo, place.revision)
    keys = list(found)
    if place.config:
        keys = _of_config(place, keys)
    if place.key:
        keys = [key for key in keys if key == place.key or key.startswith(f"{place.key}/") or _matches(key, place.key)]
    return [found[key] for key in keys]


def find(path: str) -> HubFile:
    """A file at a commit, as the listing has it."""
    place = parse(path)
    found = _tree(place.repo, place.revision).get(place.key)
    if found is None:
        raise SourceError(f"cannot read {path}: it is not there", hint="check the revision")
    return found


def fetch(path: str) -> str:
    """A copy of a file on this machine, which hashes to what the hub says."""
    place, wanted = parse(path), find(path)
    for _ in range(2):
        local = _download(place)
        found = os.stat(local)
        if _is_right(local, wanted, found.st_size, found.st_mtime_ns):
            return local
        remove(path)  # bytes were changed on their way, or on the disk: once more
    raise SourceError(
        f"{path}: what came does not hash to {wanted.etag}",
        hint="check the network and the disk; the same command tries it again and keeps what is done",
    )


class HubStore:
    """The hub as a store that is read in ranges: for a look at a file that need not come as a whole."""

    def __init__(self, place: HubPlace) -> None:
        self._place = place

    def begin(self, ask: Callable[..., T], *given: Any) -> Future[T]:
        """Have something asked while the caller does other things."""
        return _pool(os.getpid()).submit(ask, *given)

    def fetch(self, key: str, start: int, stop: int, etag: str) -> bytes:
        """Bytes [start, stop) of a file. At a commit it cannot be another one."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # they are documented there
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        if _is_offline():
            raise SourceError(
                f"{_PREFIX}{self._place.repo}: {key} was never fetched, and HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE",
            )
        with _explained(self._place.repo):
            url = hf_hub_url(self._place.repo, key, revision=self._place.revision, repo_type="dataset")
            wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            answer = http_backoff("GET", url, headers={**build_hf_headers(), **wanted})
            hf_raise_for_status(answer)
            data = bytes(answer.content)
            data = data if answer.status_code == 206 else data[start:stop]
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes of {key} came for [{start}, {stop})")
        return data


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked one has none of its parent's."""
    return ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="tokenmill-hub")


def cached(path: str) -> str | None:
    """The copy of a file if there is one."""
    from huggingface_hub import try_to_load_from_cache

    place = parse(path)
    found = try_to_load_from_cache(place.repo, place.key, revision=place.revision, repo_type="dataset")
    return found if isinstance(found, str) else None


def is_here(path: str) -> bool:
    """Whether a file's bytes are on this machine, be it as a file of another name or revision."""
    blob = os.path.join(_cache(parse(path).repo), "blobs", find(path).etag)
    return cached(path) is not None or os.path.exists(blob)


def remove(path: str) -> None:
    """Give the room of a copy back. Who reads it now may read on."""
    local = cached(path)
    if local is not None:
        for name in (os.path.realpath(local), local):
            with contextlib.suppress(OSError):
                os.unlink(name)


def _download(place: HubPlace) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # as above

    disable_progress_bars()
    with _explained(place.repo):
        return str(hf_hub_download(place.repo, place.key, revision=place.revision, repo_type="dataset"))


@functools.lru_cache(maxsize=4096)
def _is_right(local: str, wanted: HubFile, size: int, modified: int) -> bool:
    """Whether a copy has the bytes that the hub listed. A copy that did not change since is not hashed again."""
    if size != wanted.size:
        return False
    is_large = len(wanted.etag) == 64
    sha = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(local, "rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest() == wanted.etag


@functools.lru_cache(maxsize=16)
def _tree(repo: str, commit: str) -> dict[str, HubFile]:
    """All files of a commit, which never change; offline, those that have been copied."""
    if _is_offline():
        return dict(_cached_tree(repo, commit))
    from huggingface_hub.hf_api import RepoFile

    with _explained(repo):
        listed = list(_api().list_repo_tree(repo, recursive=True, revision=commit, repo_type="dataset"))
    return {
        item.path: HubFile(item.path, item.size, item.lfs.sha256 if item.lfs else item.blob_id)
        for item in listed
        if isinstance(item, RepoFile)
    }


def _cached_tree(repo: str, commit: str) -> Iterator[tuple[str, HubFile]]:
    root = os.path.join(_cache(repo), "snapshots", commit)
    for parent, _, names in os.walk(root):
        for name in names:
            local = os.path.join(parent, name)
            key = os.path.relpath(local, root)
            with contextlib.suppress(FileNotFoundError):  # the copy was removed, its name was not
                yield key, HubFile(key, os.stat(local).st_size, os.path.basename(os.path.realpath(local)))


def _cached_ref(repo: str, revision: str) -> str:
    try:
        with open(os.path.join(_cache(repo), "refs", revision), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        raise SourceError(
            f"hf://datasets/{repo}: its revision {revision} was never fetched, and HF_HUB_OFFLINE is set",
            hint="unset HF_HUB_OFFLINE, or name the commit",
        ) from None


def _of_config(place: HubPlace, keys: list[str]) -> list[str]:
    """The files of a config: what the dataset's card says, else the folder of that name."""
    patterns = [pattern for entry in _card_configs(place) for pattern in _patterns(entry.get("data_files"))]
    found = [key for key in keys if any(_matches(key, pattern) for pattern in patterns)]
    found = found or [key for key in keys if key.startswith((f"{place.config}/", f"data/{place.config}/"))]
    if not found:
        raise RecipeError(f"hf://datasets/{place.repo} has no config {place.config!r}", hint="check its page")
    return found


def _card_configs(place: HubPlace) -> list[dict[str, Any]]:
    if "README.md" not in _tree(place.repo, place.revision):
        return []
    from huggingface_hub import DatasetCard

    card = DatasetCard.load(
        fetch(str(HubPlace(place.repo, place.revision, "", "README.md"))), ignore_metadata_errors=True
    )
    configs = card.data.to_dict().get("configs")
    entries = configs if isinstance(configs, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and entry.get("config_name") == place.config]


def _patterns(data_files: Any) -> Iterator[str]:
    """Patterns of a config: a text, a list of them, or one entry a split."""
    if isinstance(data_files, str):
        yield data_files
    elif isinstance(data_files, list):
        for item in data_files:
            yield from _patterns(item.get("path") if isinstance(item, dict) else item)


def _matches(key: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(key, pattern)


def _cache(repo: str) -> str:
    from huggingface_hub import constants

    return os.path.join(constants.HF_HUB_CACHE, f"datasets--{repo.replace('/', '--')}")


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


@contextlib.contextmanager
def _explained(repo: str) -> Iterator[None]:
    """The client's many errors as one of ours."""
    try:
        yield
    except Exception as error:  # they share no class: those of the client, of its http library, of the system
        said = redact(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        raise SourceError(
            f"hf://datasets/{repo}: {said[:300]}",
            hint="check the name, the revision and the network; a private or gated dataset needs HF_TOKEN",
        ) from None
