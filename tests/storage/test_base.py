"""Which URLs are accepted, and what every kind of folder can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import RecipeError
from tokenmill.storage import base
from tokenmill.storage.base import Storage, Url, is_url, parse_url
from tokenmill.storage.local import Folder
from tokenmill.storage.object_folder import ObjectFolder
from tokenmill.storage.shard_cache import CachedFolder


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket", Url("s3", "bucket", "")),
        ("s3://bucket/", Url("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b c/d.parquet", Url("s3", "my.bucket-1", "a/b c/d.parquet")),
        ("gs://bucket/a/*.jsonl", Url("gs", "bucket", "a/*.jsonl")),
        ("az://container/a/part-?.jsonl", Url("az", "container", "a/part-?.jsonl")),
    ],
)
def test_a_url_names_a_bucket_and_a_key(text: str, url: Url) -> None:
    assert is_url(text)
    assert parse_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "s3://KEY:SECRET@bucket/a",
        "s3://SECRET@bucket",
        "s3://bucket/a?token=SECRET",
        "s3://bucket/a#SECRET",
        "s3://bucket/s3://SECRET/a",
        "simplecache::s3://SECRET/a",
        "s3::https://SECRET/a",
        "s3:/bucket/SECRET",
        "s3:///SECRET",
        "s3://bucket//SECRET",
        "s3://bucket/../SECRET",
        "s3://bucket/a\nSECRET",
        "https://bucket/SECRET",
        "file:///SECRET",
        "memory://SECRET",
        "S3://bucket/SECRET",
    ],
)
def test_any_other_url_is_refused_without_showing_it(text: str) -> None:
    assert is_url(text)
    with pytest.raises(RecipeError) as refused:
        parse_url(text)
    assert "SECRET" not in f"{refused.value} {refused.value.hint}"


def test_local_paths_are_no_urls() -> None:
    assert not any(is_url(path) for path in ("a/b", "/a", "C:/x", "./s3", "a:b", "x.y/s3://"))


@pytest.mark.parametrize(
    ("kind", "is_disk"),
    [(Folder, True), (CachedFolder, True), (ObjectFolder, False)],
)
def test_a_disk_is_quick_and_mapped_and_a_store_is_neither(kind: type[Storage], is_disk: bool) -> None:
    assert kind.can_map == kind.links_are_free == kind.stat_is_cheap == kind.writes_are_fast == is_disk
    assert kind.has_spool != is_disk


def test_callers_ask_what_a_folder_can_do_and_never_what_it_is() -> None:
    sources = Path(base.__file__).parents[1].rglob("*.py")
    assert [str(path) for path in sources if "is_local" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("kind", [Folder, CachedFolder, ObjectFolder])
def test_every_kind_of_folder_can_do_all_that_the_protocol_lists(kind: type[Storage]) -> None:
    names = {name for name in (*vars(Storage), *Storage.__annotations__) if not name.startswith("_")}
    assert [name for name in sorted(names - {"path", "fs"}) if not hasattr(kind, name)] == []
