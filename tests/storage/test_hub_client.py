"""The hub, as it is asked: what a URL names, what does for work offline, silence, and what its errors say."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, snapshot_download

import tokenmill
from hub import COMMIT, LATER, Repository, go_offline, lead_to, serve
from tokenmill.errors import RecipeError, SilentStoreError, SourceError, TokenmillError
from tokenmill.recipe import make_recipe
from tokenmill.sources.discover import list_sources
from tokenmill.storage import hub, hub_client

CARD = b"""---
configs:
- config_name: small
  data_dir: data
  data_files:
  - split: train
    path: en/*.jsonl
---
A dataset.
"""


def jsonl(start: int) -> bytes:
    return b"".join(json.dumps({"text": f"line {number} of the hub"}).encode() + b"\n" for number in range(start, 500))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    names = ("a.jsonl", "data/b.jsonl", "data/en/c.jsonl", "data/en/deep/d.jsonl", "data/C#.jsonl")
    made = Repository({"README.md": CARD, **{name: jsonl(number) for number, name in enumerate(names)}})
    with serve(made) as endpoint:
        lead_to(endpoint, tmp_path, monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def names(*sources: str) -> list[str]:
    return [source.name for source in list_sources(make_recipe({"sources": sources})).sources]


def path_of(name: str, commit: str = COMMIT) -> str:
    return f"hf://datasets/org/name@{commit}/{name}"


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/*.jsonl", ["a.jsonl"]),
        ("/data/*.jsonl", ["data/C#.jsonl", "data/b.jsonl"]),
        ("/data/?.jsonl", ["data/b.jsonl"]),
        ("/data/**/[cd].jsonl", ["data/en/c.jsonl", "data/en/deep/d.jsonl"]),
        ("/data/en", ["data/en/c.jsonl", "data/en/deep/d.jsonl"]),
        (":small", ["data/en/c.jsonl"]),
        ("@v1:small", ["data/en/c.jsonl"]),
    ],
)
def test_a_url_names_files_by_the_rules_of_the_hub(repository: Repository, place: str, expected: list[str]) -> None:
    assert names(f"hf://datasets/org/name{place}") == expected


def test_a_file_that_no_url_can_name_is_named_in_the_error(repository: Repository) -> None:
    repository.files["data/a::b.jsonl"] = jsonl(0)
    with pytest.raises(
        RecipeError, match=r"data/a::b\.jsonl is an object that cannot be read: a second URL in its name"
    ):
        names("hf://datasets/org/name/data")


def test_a_tag_is_what_it_was_and_a_branch_what_it_is(repository: Repository) -> None:
    repository.later = {"new.jsonl": jsonl(0)}
    assert names("hf://datasets/org/name@v1/*.jsonl") == ["a.jsonl"]
    assert names("org/name") == ["new.jsonl"]


def test_offline_a_commit_that_was_never_listed_is_an_error(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of some files are there, which a listing of the cache would take for all."""
    hub_client.download("org/name", COMMIT, "a.jsonl")
    go_offline(monkeypatch)
    with pytest.raises(SourceError, match="never listed on this machine, and HF_HUB_OFFLINE is set") as caught:
        names(f"hf://datasets/org/name@{COMMIT}")
    assert "snapshot_download" in caught.value.hint


def test_offline_files_that_are_not_here_are_named_before_the_work(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenmill.plan(f"hf://datasets/org/name@{COMMIT}", tokenizer="byte")  # which has listed them
    hub.fetch(path_of("a.jsonl"))
    go_offline(monkeypatch)
    asked = len(repository.requests)
    with pytest.raises(SourceError, match=r"4 of 5 files are not in the cache.*: data/C#\.jsonl, .* and 1 more"):
        tokenmill.prepare(f"hf://datasets/org/name@{COMMIT}", tmp_path / "out", tokenizer="byte")
    assert not (tmp_path / "out").exists()
    assert names(path_of("a.jsonl")) == ["a.jsonl"], "what is here can be used"
    assert len(repository.requests) == asked


# `snapshot_download` of older clients keeps no listing that could be read offline.
keeps_listings = pytest.mark.skipif(
    tuple(map(int, huggingface_hub.__version__.split(".")[:2])) < (1, 26), reason="this client keeps no listings"
)


@keeps_listings
def test_offline_the_clients_own_listing_tells_what_is_not_here(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_download("org/name", repo_type="dataset", allow_patterns=["README.md", "data/*"])
    go_offline(monkeypatch)
    with pytest.raises(SourceError, match=r"1 of 5 files are not in the cache, .*: a\.jsonl(\nhint: .*)?$"):
        names("org/name")
    assert names("org/name:small") == ["data/en/c.jsonl"]


@keeps_listings
@pytest.mark.parametrize("damage", [b"x", b""])
def test_offline_a_damaged_copy_is_told_and_kept(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    snapshot_download("org/name", repo_type="dataset")
    copy = Path(hub_client.find_copy("org/name", COMMIT, "a.jsonl") or "").resolve()
    damaged = damage + copy.read_bytes()[1:]
    copy.write_bytes(damaged)
    go_offline(monkeypatch)
    with pytest.raises(TokenmillError, match=r"a\.jsonl: the copy in the cache does not hash to .* HF_HUB_OFFLINE"):
        tokenmill.prepare("org/name", tmp_path / "out", tokenizer="byte", workers=1)
    assert copy.read_bytes() == damaged
    assert not (tmp_path / "out/dataset.json").exists()


@pytest.mark.parametrize(
    ("silent", "place"),
    [
        ("/revision/", "org/name"),
        ("/tree/", "org/name"),
        ("README.md", "org/name:small"),
        ("GET /datasets/org/name/resolve/" + COMMIT + "/README.md", "org/name:small"),
        ("bytes=", "org/name"),
    ],
)
def test_a_hub_that_accepts_and_says_nothing_ends_in_an_error_that_names_it(
    repository: Repository, impatient: None, silent: str, place: str
) -> None:
    repository.silent = (silent,)
    with pytest.raises(SilentStoreError, match=f"{re.escape(constants.ENDPOINT)} does not answer: .*timed out"):
        names(place)


def test_a_hub_that_falls_silent_ends_the_build_and_the_same_command_goes_on(
    repository: Repository, tmp_path: Path, impatient: None
) -> None:
    """All units would be tried three times otherwise, each for a minute."""
    recipe: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": 5_000, "workers": 1}
    repository.silent = ("HEAD /datasets/", f"/revision/{COMMIT}")
    with pytest.raises(SilentStoreError, match="does not answer"):
        tokenmill.prepare("org/name", tmp_path / "out", **recipe)
    repository.silent = ()
    tokenmill.prepare("org/name", tmp_path / "out", **recipe)
    assert tokenmill.verify(tmp_path / "out").ok


@pytest.mark.parametrize("revision", ["gone", LATER])
def test_a_revision_that_is_not_there_is_named(repository: Repository, revision: str) -> None:
    with pytest.raises(SourceError, match=f"hf://datasets/org/name has no revision {revision}"):
        names(f"hf://datasets/org/name@{revision}")


def test_a_name_that_is_neither_here_nor_on_the_hub_is_told_so(repository: Repository) -> None:
    with pytest.raises(
        SourceError, match=r"'org/nme' is not a local path; .*hf://datasets/org/nme is not on http://127"
    ):
        names("org/nme")


def test_no_token_is_repeated_of_an_answer(repository: Repository, tmp_path: Path) -> None:
    repository.token = "hf_rightright"
    (tmp_path / "token").write_text("hf_secretsecret")
    with pytest.raises(SourceError, match=r"Bearer \*\*\* is nobody here"):
        names("org/name")


def test_a_server_that_ignores_ranges_gives_the_right_bytes_and_no_more_of_them(repository: Repository) -> None:
    data = bytes(range(251)) * 100_000
    repository.files["large.parquet"] = data
    repository.ignores_ranges = True
    store = hub.HubStore(hub.parse(path_of("large.parquet")))
    tracemalloc.start()
    try:
        found = [store.fetch("large.parquet", start, start + 300, "") for start in (0, 7_000_001, len(data) - 300)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [data[start : start + 300] for start in (0, 7_000_001, len(data) - 300)]
    assert peak < 4_000_000
