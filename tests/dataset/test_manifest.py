from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from tokenmill import records
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import Manifest, Shard, SourceTotal, Split
from tokenmill.errors import DatasetError
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest
from tokenmill.tokenizers.spec import resolve

Body = dict[str, Any]
OUT_OF_RANGE = [-1, -2, -(1 << 63), 1 << 62, 1 << 63, 1 << 200, 10**1000]
BAD_PATHS = [
    "/", "/etc/passwd", "../x", "train/../../x", "./train/00000", "train//00000", "train\\00000", "train/000 00",
    "train/\x00", "train/00000\n", "trän/00000", "~/x", "C:x", "a" * 300,
]  # fmt: skip
BAD_NAMES = [*BAD_PATHS, "..", ".", "", "train/..", "train/"]  # plain ones, had they an ending


def digest(size: int, digit: str) -> Digest:
    return Digest(bytes=size, sha256=digit * 64)


def shard(name: str, tokens: int, documents: int, digit: str) -> Shard:
    idx_bytes = 42 + 20 * documents
    return Shard(
        name=name, tokens=tokens, documents=documents, bin=digest(2 * tokens, digit), idx=digest(idx_bytes, digit)
    )


def example() -> Manifest:
    return Manifest(
        format=1,
        fingerprint="f" * 64,
        identity={"eot": "append", "split": {"val": 0.3}, "seed": 0, "max_tokens": None},
        tokenizer=resolve("byte").describe(),
        parity={"reference": "python", "documents": 3},
        dtype="uint16",
        splits={
            "train": Split(
                tokens=30, documents=5, shards=(shard("train/00000", 20, 3, "1"), shard("train/00001", 10, 2, "2"))
            ),
            "val": Split(tokens=7, documents=1, shards=(shard("val/00000", 7, 1, "3"),)),
        },
        documents_read=8,
        dropped={"empty": 1, "invalid_json": 1},
        text_sum="0" * 32,
        sources=(SourceTotal(name="a.txt", bytes=100, documents=8, text_sum="0" * 32),),
        files={"provenance/00000.parquet": digest(9, "4")},
    )


def body_of(found: Manifest) -> Body:
    """The manifest as plain JSON, to be changed and sealed again."""
    body: Body = json.loads(records.seal(found))
    del body["seal"]
    return body


def seal_text(text: bytes) -> bytes:
    """A hostile text that no value is written as, with the right seal."""
    return text[:-1] + b',"seal":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()


def reseal(body: Body) -> bytes:
    """A hostile manifest whose seal is right, so that the seal is not what gives it away."""
    return records.seal(body)


def sealed_after(change: Callable[[Body], Any]) -> bytes:
    body = body_of(example())
    change(body)
    return reseal(body)


def assert_refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(DatasetError, match=match) as caught:
        manifest.unseal_manifest(data)
    assert caught.value.message.startswith(manifest.MANIFEST)
    assert caught.value.hint


def first_shard(body: Body) -> Body:
    found: Body = body["splits"]["val"]["shards"][0]
    return found


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    data = manifest.seal_manifest(example())
    assert manifest.unseal_manifest(data) == example()
    assert manifest.seal_manifest(manifest.unseal_manifest(data)) == data


def test_resealing_alone_does_not_make_a_manifest_hostile() -> None:
    assert manifest.unseal_manifest(sealed_after(lambda body: None)) == example()


def test_the_order_of_keys_does_not_change_the_bytes() -> None:
    body = body_of(example())
    assert reseal(dict(reversed(body.items()))) == manifest.seal_manifest(example())


def test_a_manifest_knows_its_totals_and_its_files() -> None:
    found = example()
    assert (found.tokens, found.documents, found.quarantined) == (37, 6, 1)
    pairs = ("train/00000", "train/00001", "val/00000")
    assert sorted(found.all_files()) == sorted(
        ["provenance/00000.parquet", *(f"{name}{ending}" for name in pairs for ending in (".bin", ".idx"))]
    )


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_manifest_with_changed_bytes_is_refused(data: st.DataObject) -> None:
    whole = manifest.seal_manifest(example())
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = manifest.unseal_manifest(bytes(changed))
    except DatasetError:
        return
    assert found == example()


def test_every_truncated_manifest_is_refused() -> None:
    whole = manifest.seal_manifest(example())
    for size in range(len(whole) - 1):
        assert_refused(whole[:size])


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"{}", b"7", b'"dataset"', b"\x00" * 100, b"\xff\xfe", b"{'a': 1}", b'{"seal": 1}',
        b'{"seal": null}', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    assert_refused(data)


def test_a_broken_seal_is_refused() -> None:
    assert_refused(manifest.seal_manifest(example()).replace(b'"seal":"', b'"seal":"0'), match="seal")


def test_a_manifest_without_a_seal_is_refused() -> None:
    assert_refused(records.canonical(body_of(example())), match="sealed")


def test_a_key_that_stands_twice_is_refused() -> None:
    body = records.canonical(example())
    twice = body.replace(b'"dtype":"uint16"', b'"dtype":"uint16","dtype":"uint16"')
    assert twice != body
    assert_refused(seal_text(twice), match="duplicate key")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    text = records.canonical(example()).replace(b'"val":0.3', b'"val":' + number.encode())
    assert number.encode() in text
    with pytest.raises(DatasetError, match=r"not valid JSON|number out of range"):
        manifest.unseal_manifest(seal_text(text), where="dataset.json")


def test_a_text_that_is_not_unicode_is_refused() -> None:
    text = records.canonical(example()).replace(b'"reference":"python"', b'"reference":"\\ud800"')
    assert b"ud800" in text
    assert_refused(seal_text(text), match="not valid JSON")


@pytest.mark.parametrize("depth", [20, 500])
@pytest.mark.parametrize("kind", ["lists", "objects"])
def test_deep_nesting_is_refused(depth: int, kind: str) -> None:
    deep: Any = 0
    for _ in range(depth):
        deep = [deep] if kind == "lists" else {"a": deep}
    assert_refused(sealed_after(lambda body: body["identity"].update(deep=deep)), match="nested")


@pytest.mark.parametrize("name", BAD_PATHS, ids=range(len(BAD_PATHS)))
def test_a_shard_with_a_name_that_is_not_plain_is_refused(name: str) -> None:
    assert_refused(sealed_after(lambda body: first_shard(body).update(name=name)), match="name")


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_a_file_with_a_name_that_is_not_plain_is_refused(name: str) -> None:
    entry = {"bytes": 9, "sha256": "4" * 64}
    assert_refused(sealed_after(lambda body: body["files"].update({name: entry})), match="name")


@pytest.mark.parametrize("name", ["..", ".", "", "/", "/etc", "../x", "train/..", "train/val", "\x00"])
def test_a_split_with_a_name_that_is_not_plain_is_refused(name: str) -> None:
    empty = {"tokens": 0, "documents": 0, "shards": []}
    assert_refused(sealed_after(lambda body: body["splits"].update({name: empty})))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", 7])
def test_a_tokenizer_file_that_is_no_file_of_the_dataset_is_refused(name: Any) -> None:
    assert_refused(sealed_after(lambda body: body["tokenizer"].update(file=name)))


@pytest.mark.parametrize("field", ["name", "kind", "scheme", "file", "fingerprint", "vocab_size", "eot_id", "engine"])
def test_a_tokenizer_that_is_not_described_in_full_is_refused(field: str) -> None:
    assert_refused(sealed_after(lambda body: body["tokenizer"].pop(field)))
    assert_refused(sealed_after(lambda body: body["tokenizer"].update({field: [1]})))


def test_a_kind_of_tokenizer_that_is_not_known_is_refused() -> None:
    assert_refused(sealed_after(lambda body: body["tokenizer"].update(kind="pickle")), "unknown kind of tokenizer")


@pytest.mark.parametrize("name", ["train/00000", "train/00001"])
def test_a_shard_that_stands_twice_is_refused(name: str) -> None:
    assert_refused(sealed_after(lambda body: first_shard(body).update(name=name)), match="twice")


def test_a_file_that_is_a_shards_file_too_is_refused() -> None:
    entry = {"bytes": 14, "sha256": "3" * 64}
    assert_refused(sealed_after(lambda body: body["files"].update({"val/00000.idx": entry})), match="twice")


def test_shards_in_any_order_and_any_folder_are_taken_if_none_stands_twice() -> None:
    def change(body: Body) -> None:
        body["splits"]["train"]["shards"].reverse()
        first_shard(body)["name"] = "train/00002"

    found = manifest.unseal_manifest(sealed_after(change))
    names = [shard.name for split in found.splits.values() for shard in split.shards]
    assert names == ["train/00001", "train/00000", "train/00002"]


@pytest.mark.parametrize("number", OUT_OF_RANGE, ids=range(len(OUT_OF_RANGE)))
@pytest.mark.parametrize("file", ["bin", "idx"])
def test_a_size_out_of_range_is_refused(number: int, file: str) -> None:
    assert_refused(sealed_after(lambda body: first_shard(body)[file].update(bytes=number)))


@pytest.mark.parametrize("number", OUT_OF_RANGE, ids=range(len(OUT_OF_RANGE)))
@pytest.mark.parametrize("what", ["tokens", "documents"])
def test_a_count_out_of_range_is_refused_though_the_sums_are_right(number: int, what: str) -> None:
    def change(body: Body) -> None:
        first_shard(body)[what] = number
        body["splits"]["val"][what] = number
        if what == "documents":
            body["documents_read"] = 7 + number

    assert_refused(sealed_after(change))


def test_a_negative_number_of_dropped_documents_is_refused() -> None:
    def change(body: Body) -> None:
        body["dropped"]["empty"] = -1
        body["documents_read"] = 6

    assert_refused(sealed_after(change))


@pytest.mark.parametrize("what", ["tokens", "documents"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_whose_shards_do_not_sum_up_is_refused(what: str, split: str) -> None:
    def change(body: Body) -> None:
        body["splits"][split][what] += 1

    assert_refused(sealed_after(change), match=f"{what} of a split do not add up")


@pytest.mark.parametrize("number", [7, 9])
def test_documents_that_were_read_but_neither_kept_nor_dropped_are_refused(number: int) -> None:
    assert_refused(sealed_after(lambda body: body.update(documents_read=number)))


@pytest.mark.parametrize("sha256", ["", "0" * 63, "0" * 65, "G" * 64, "F" * 64, "0" * 63 + "\n", "é" * 64])
def test_a_digest_that_is_none_is_refused(sha256: str) -> None:
    assert_refused(sealed_after(lambda body: first_shard(body)["bin"].update(sha256=sha256)), match="digest")


UNKNOWN: dict[str, Callable[[Body], Any]] = {
    "manifest": lambda body: body.update(extra=1),
    "split": lambda body: body["splits"]["val"].update(extra=1),
    "shard": lambda body: first_shard(body).update(extra=1),
    "digest": lambda body: first_shard(body)["bin"].update(extra=1),
    "source": lambda body: body["sources"][0].update(extra=1),
}


@pytest.mark.parametrize("place", sorted(UNKNOWN))
def test_an_unknown_field_is_refused(place: str) -> None:
    assert_refused(sealed_after(UNKNOWN[place]), match="unknown field extra")


@pytest.mark.parametrize("field", sorted(body_of(example())))
def test_a_missing_field_is_refused(field: str) -> None:
    assert_refused(sealed_after(lambda body: body.pop(field)), match=f"missing required field {field}")


@pytest.mark.parametrize("field", sorted(body_of(example())))
def test_a_field_of_another_type_is_refused(field: str) -> None:
    right = body_of(example())[field]
    for value in (None, True, 7, 1.5, "x", [], ["x"], {}, {"x": "x"}):
        if type(value) is not type(right):
            assert_refused(sealed_after(lambda body, value=value: body.update({field: value})))


@pytest.mark.parametrize("number", [0, 2, 99])
def test_another_format_is_refused_and_both_are_named(number: int) -> None:
    assert_refused(sealed_after(lambda body: body.update(format=number)), match=f"format {number}, .* reads 1")


@pytest.mark.parametrize("dtype", ["", "uint32", "object", "<u2"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    assert_refused(sealed_after(lambda body: body.update(dtype=dtype)), match="dtype")


def test_a_manifest_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_bytes(manifest.seal_manifest(example()))
    (tmp_path / "out").mkdir()
    os.symlink("../elsewhere.json", tmp_path / "out/dataset.json")
    with pytest.raises(DatasetError):
        manifest.load_manifest(Folder(str(tmp_path / "out")))


def test_a_manifest_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset.json")
    script = "import sys, tokenmill; tokenmill.open(sys.argv[1])"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail("the reader waits for the other end of the pipe")
    assert "DatasetError" in done.stderr


def test_a_manifest_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").mkdir()
    with pytest.raises(DatasetError):
        manifest.load_manifest(Folder(str(tmp_path)))


def test_a_split_that_leads_out_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\0" * 14)
    (tmp_path / "out/dataset.json").write_bytes(sealed_after(lambda body: first_shard(body).update(name="../secret")))
    with pytest.raises(DatasetError, match=r"\.\./secret"):
        tokenmill.open(tmp_path / "out")


def test_absurd_sizes_are_refused_before_anything_is_mapped(tmp_path: Path) -> None:
    def change(body: Body) -> None:
        found = first_shard(body)
        for what in ("tokens", "documents"):
            found[what] = body["splits"]["val"][what] = 1 << 56
        found["bin"]["bytes"] = 1 << 57
        found["idx"]["bytes"] = 42 + 20 * (1 << 56)
        body["documents_read"] = (1 << 56) + 7

    (tmp_path / "val").mkdir()
    (tmp_path / "val/00000.bin").write_bytes(b"\0" * 14)
    (tmp_path / "val/00000.idx").write_bytes(b"\0" * 62)
    (tmp_path / "dataset.json").write_bytes(sealed_after(change))
    with pytest.raises(DatasetError, match="00000"):
        tokenmill.open(tmp_path)["val"].document(0)


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not a dataset") as caught:
        manifest.load_manifest(Folder(str(tmp_path)))
    assert "prepare" in caught.value.hint
    (tmp_path / ".build").mkdir()
    (tmp_path / ".build/events.jsonl").write_text("")
    with pytest.raises(DatasetError, match=r"no dataset\.json; it is a build that has not finished") as caught:
        manifest.load_manifest(Folder(str(tmp_path)))
    assert "run the same tokenmill prepare command again" in caught.value.hint
