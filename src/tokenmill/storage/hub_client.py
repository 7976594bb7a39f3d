"""Requests to the Hugging Face hub, through `huggingface_hub`, and listings of commits for offline work.

The client honours HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. We wrap it because some of its calls have no timeout, do
not read ranges, or retry for many minutes: here each request waits HF_HUB_DOWNLOAD_TIMEOUT at most and is repeated a
few times, so a silent hub is an error after about a minute. Only this module and the tokenizers import the client.

The files of a commit never change, so its listing is stored:

    HF_HOME/assets/tokenmill/org--name/trees/COMMIT.json    ours, sealed
            hub/datasets--org--name/trees/COMMIT.json       that of the client, from snapshot_download

The cached files themselves are not a listing: they are only those that were needed before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from tokenmill import records
from tokenmill.errors import (
    DatasetError,
    SilentStoreError,
    SourceError,
    StorageError,
    TokenmillError,
    is_failure,
    is_panic,
)
from tokenmill.records import Int
from tokenmill.storage.local import Folder

T = TypeVar("T")

# Seconds before a request is repeated. Longer than for an object store, whose client has retried by itself already.
_WAITS = (1, 2, 4)
_BLOCK = 1 << 16
# What the client and Python raise about an answer, or about this machine. Other errors come from the client's http
# library, have no public name, and mean that there was no complete answer.
_NOT_OF_THE_NETWORK = (OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset at a commit. `etag` is the hash of its bytes."""

    key: str
    size: Int
    etag: str


def is_offline() -> bool:
    from huggingface_hub import constants

    if not hasattr(constants, "is_offline_mode"):  # a client before 1.2
        return bool(constants.HF_HUB_OFFLINE)
    return bool(constants.is_offline_mode())


def cache_folder(repo: str) -> str:
    """Where the client keeps copies of a dataset's files."""
    from huggingface_hub import constants

    return os.path.join(constants.HF_HUB_CACHE, f"datasets--{repo.replace('/', '--')}")


def assets_folder(repo: str) -> str:
    """Our folder among those in which programs store data about a dataset of the hub."""
    from huggingface_hub import constants

    return os.path.join(constants.HF_ASSETS_CACHE, "tokenmill", repo.replace("/", "--"))


def commit_of(repo: str, revision: str) -> str:
    """The current commit of a branch or tag."""
    from huggingface_hub import HfApi

    with _explained(repo, revision):
        return str(_retried(partial(HfApi().dataset_info, repo, revision=revision, timeout=_timeout())).sha)


def list_files(repo: str, commit: str) -> list[HubFile]:
    """All files of a commit."""
    from huggingface_hub import constants

    url = f"{constants.ENDPOINT}/api/datasets/{repo}/tree/{commit}"
    with _explained(repo, commit):
        return [_file(entry) for entry in _paginate(url) if entry["type"] == "file"]


def _paginate(url: str) -> Iterator[dict[str, Any]]:
    """The entries of all pages of a listing. The client's own list_repo_tree has no timeout."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # they are documented there
        build_hf_headers,
        get_session,
        hf_raise_for_status,
        paginate,
    )

    headers = build_hf_headers()
    if _takes(paginate, "timeout"):
        yield from paginate(url, params={"recursive": True}, headers=headers, timeout=_timeout())
        return
    next_url: str | None = f"{url}?recursive=true"
    while next_url is not None:  # a client before 1.21: its own paginate has no timeout
        answer = _retried(partial(get_session().get, next_url, headers=headers, timeout=_timeout()))
        hf_raise_for_status(answer)
        yield from answer.json()
        next_url = answer.links.get("next", {}).get("url")


def _file(entry: dict[str, Any]) -> HubFile:
    return HubFile(entry["path"], entry["size"], entry["lfs"]["oid"] if entry.get("lfs") else entry["oid"])


def download(repo: str, commit: str, key: str) -> str:
    """The path of a copy of a file, which is downloaded unless it is in the cache."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # as above

    disable_progress_bars()
    there = find_copy(repo, commit, key)
    if there is not None:
        return there
    url = hf_hub_url(repo, key, revision=commit, repo_type="dataset")
    with _explained(repo, commit):
        # The download would wait six minutes for a silent hub, whatever the settings are.
        with contextlib.suppress(HfHubHTTPError):
            retry: dict[str, Any] = {}
            if _takes(get_hf_file_metadata, "retry_on_errors"):  # a client since 1.2
                retry = {"retry_on_errors": True}
            get_hf_file_metadata(url, timeout=_timeout(), **retry)
        return str(hf_hub_download(repo, key, revision=commit, repo_type="dataset"))


def find_copy(repo: str, commit: str, key: str) -> str | None:
    """The path of the copy of a file; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, key, revision=commit, repo_type="dataset")
    return found if isinstance(found, str) else None


def fetch_range(repo: str, commit: str, key: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file."""
    with _explained(repo, commit):
        return _retried(partial(_fetch_range, repo, commit, key, start, stop))


def read_card(repo: str, commit: str, path: str) -> dict[str, Any]:
    """The metadata at the beginning of a dataset's card."""
    from huggingface_hub import DatasetCard

    with _explained(repo, commit):
        return dict(DatasetCard.load(path, ignore_metadata_errors=True).data.to_dict())


def _fetch_range(repo: str, commit: str, key: str, start: int, stop: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # as above
        build_hf_headers,
        hf_raise_for_status,
    )

    url = hf_hub_url(repo, key, revision=commit, repo_type="dataset")
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with _stream(url, headers) as answer:
        hf_raise_for_status(answer)
        # A server that ignores ranges sends all of the file.
        skip = 0 if answer.status_code == HTTPStatus.PARTIAL_CONTENT else start
        blocks = answer.iter_bytes(_BLOCK) if hasattr(answer, "iter_bytes") else answer.iter_content(_BLOCK)
        data = _cut(blocks, skip, stop - start)
    if len(data) != stop - start:
        raise StorageError(f"hf://datasets/{repo}@{commit}/{key}: {len(data)} bytes came for [{start}, {stop})")
    return data


def _stream(url: str, headers: dict[str, str]) -> contextlib.AbstractContextManager[Any]:
    """An answer whose body is still to be read. Leaving the block stops the transfer.

    The client must not retry a transfer that broke off: it would repeat the body from its beginning.
    """
    utils: Any = importlib.import_module("huggingface_hub.utils")
    options = {"headers": headers, "timeout": _timeout(), "retry_on_exceptions": ()}
    if not hasattr(utils, "http_stream_backoff"):  # a client before 1.0, which uses requests
        return contextlib.closing(utils.http_backoff("GET", url, stream=True, **options))
    stream: contextlib.AbstractContextManager[Any] = utils.http_stream_backoff("GET", url, **options)
    return stream


def _takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function of this version of the client has the argument."""
    return argument in inspect.signature(function).parameters


def _cut(blocks: Iterable[bytes], skip: int, size: int) -> bytes:
    """`size` bytes after the first `skip` ones. No block is requested after the last of them."""
    data = bytearray()
    for block in blocks:
        data += block[skip : skip + size - len(data)]
        skip = max(0, skip - len(block))
        if len(data) == size:
            break
    return bytes(data)


def _retried(ask: Callable[[], T]) -> T:
    """The answer to a request, which is repeated a few times if none arrives."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for wait in _WAITS:
        try:
            return ask()
        except (HfHubHTTPError, OfflineModeIsEnabled):
            raise
        except Exception:  # most have no public name
            time.sleep(wait)
    return ask()


def _timeout() -> float:
    """Seconds to wait for an answer."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


@contextlib.contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    """Turn the client's errors into ours."""
    try:
        yield
    except TokenmillError:
        raise
    except BaseException as error:  # errors of the client, its http library and the system share no class
        if not is_failure(error):
            raise
        raise _judged(error, repo, revision) from None


def _judged(error: BaseException, repo: str, revision: str) -> TokenmillError:
    """A `StorageError` if another try may help, a `SourceError` if the hub has answered."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    name, hub = f"hf://datasets/{repo}", constants.ENDPOINT
    if isinstance(error, RevisionNotFoundError):
        return SourceError(f"{name} has no revision {revision}", hint="check its branches and tags")
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return SourceError(
            f"{name} is not on {hub}, or is private", hint="check the name; a private one needs HF_TOKEN"
        )
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return StorageError(
            f"{name}@{revision}: {hub} is overloaded or limits requests: {_message(error)}", hint="run again later"
        )
    if is_panic(error):
        return StorageError(
            f"{name}@{revision}: a library of the hub's client crashed: {_message(error)}",
            hint="run the same command again; HF_HUB_DISABLE_XET=1 disables its Rust library",
        )
    if not isinstance(error, _NOT_OF_THE_NETWORK) or _is_of_requests(error):
        return SilentStoreError(
            f"{name}@{revision}: {hub} does not answer: {_message(error)}",
            hint="check the network, and HF_ENDPOINT if it is set; then run the same command again",
        )
    return SourceError(
        f"{name}@{revision}: {_message(error)}",
        hint="check the name, the revision and the network; a gated dataset needs HF_TOKEN",
    )


def _is_of_requests(error: BaseException) -> bool:
    """Whether there was no answer, for a client before 1.0, whose library `requests` raises OSErrors."""
    from huggingface_hub.errors import HfHubHTTPError

    return type(error).__module__.startswith("requests.") and not isinstance(error, HfHubHTTPError)


def _message(error: BaseException) -> str:
    """The message of an error in one line, without the token, which an answer may repeat."""
    from huggingface_hub import get_token

    text = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    return (text.replace(token, "***") if token else text)[:300]


_TREES = "trees"
# The version of the client's own listings.
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All files of a commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]


@functools.lru_cache(maxsize=16)
def files_at(repo: str, commit: str) -> dict[str, HubFile]:
    """The files of a commit, by key. Offline, they come from a stored listing."""
    if is_offline():
        found = _load(repo, commit) or _load_of_client(repo, commit)
        if found is None:
            raise SourceError(
                f"the files of hf://datasets/{repo}@{commit} are unknown: they were never listed on this machine, "
                "and HF_HUB_OFFLINE is set",
                hint="unset it, or fetch the dataset with snapshot_download of huggingface_hub first",
            )
    else:
        found = Tree(repo=repo, commit=commit, files=tuple(list_files(repo, commit)))
        _keep(found)
    return {file.key: file for file in found.files}


def _folder(repo: str) -> Folder:
    return Folder(os.path.join(assets_folder(repo), _TREES))


def _keep(tree: Tree) -> None:
    folder = _folder(tree.repo)
    with contextlib.suppress(StorageError):  # a read-only cache only means no listing for offline work
        if _load(tree.repo, tree.commit) != tree:
            folder.make()
            folder.replace(f"{tree.commit}.json", records.seal(tree))


def _load(repo: str, commit: str) -> Tree | None:
    folder, name = _folder(repo), f"{commit}.json"
    try:
        tree = records.unseal(Tree, folder.read(name), where=folder.at(name))
    except (DatasetError, StorageError):
        return None
    return tree if (tree.repo, tree.commit) == (repo, commit) else None


def _load_of_client(repo: str, commit: str) -> Tree | None:
    """The listing that the client has stored. Its own function for it omits the hashes of large files."""
    folder, name = Folder(os.path.join(cache_folder(repo), _TREES)), f"{commit}.json"
    try:
        found = json.loads(folder.read(name))
        if found["format_version"] != _FORMAT:
            return None
        files = tuple(_file_of_client(key, entry) for key, entry in found["files"].items())
    except (DatasetError, StorageError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return Tree(repo=repo, commit=commit, files=files)


def _file_of_client(key: str, entry: dict[str, Any]) -> HubFile:
    return HubFile(key, int(entry["size"]), str(entry.get("lfs_sha256") or entry["blob_id"]))
