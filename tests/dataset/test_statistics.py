"""Statistics are what a plain count of the texts, the provenance and the shards gives."""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import tokenmill
from tokenmill import records
from tokenmill.dataset import statistics
from tokenmill.dataset.manifest import load_manifest, seal_manifest
from tokenmill.dataset.statistics import LENGTH_EDGES, STATISTICS, DatasetStatistics, load_statistics
from tokenmill.errors import DatasetError
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest

HOSTILE = ("<script>alert(1)</script>", "‮txet‬", "]]>\x00\x1b[31m", "數千の文書 🙂 naïve", "w" * 5000)
RECIPE: dict[str, Any] = {"tokenizer": "byte", "split": "val=0.2", "min_chars": 3, "workers": 1}


def lines(number: int) -> list[str]:
    texts = [*HOSTILE, *(f"{number} слово " * (one % 40 + 1) for one in range(120)), "", "", "x", "é", "yy"]
    return [*(json.dumps({"text": text}) for text in texts), "not JSON", '{"text": null}']


def write_sources(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in lines(number)))
    for number in range(40):  # many sources in one unit
        (folder / f"small-{number:02d}.jsonl").write_text(json.dumps({"text": f"file {number} ñ"}) + "\n")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("statistics")
    write_sources(folder / "in")
    tokenmill.prepare(folder / "in", folder / "out", unit_bytes=9000, **RECIPE)
    return folder / "out"


def load(dataset: Path) -> DatasetStatistics:
    folder = Folder(str(dataset))
    found = load_statistics(folder, load_manifest(folder))
    assert found is not None
    return found


def test_each_source_and_split_has_the_counts_of_its_texts(dataset: Path) -> None:
    sources = [source.name for source in load_manifest(Folder(str(dataset))).sources]
    expected: Counter[tuple[str, str, str]] = Counter()
    lengths: dict[str, Counter[int]] = {"train": Counter(), "val": Counter()}
    for row in pq.read_table(dataset / "provenance").to_pylist():
        if row["split"] is None:
            continue
        with (dataset.parent / "in" / row["source"]).open("rb") as file:
            file.seek(row["position"])
            text = json.loads(file.readline())["text"]
        found = {"documents": 1, "tokens": row["tokens"], "bytes": len(text.encode()), "characters": len(text)}
        for what, count in found.items():
            expected[row["split"], row["source"], what] += count
        lengths[row["split"]][row["tokens"]] += 1
    counted = load(dataset)
    assert len(sources) == 43
    for name, split in counted.splits.items():
        for what in ("documents", "tokens", "bytes", "characters"):
            assert list(getattr(split, what)) == [expected[name, source, what] for source in sources]
        assert (split.shortest, split.longest) == (min(lengths[name]), max(lengths[name]))
        bins: Counter[int] = Counter()
        for length, count in lengths[name].items():
            bins[bisect_right(LENGTH_EDGES.tolist(), length) - 1] += count
        assert dict(enumerate(split.lengths)) == {number: bins[number] for number in range(len(split.lengths))}
        assert split.lengths[-1]


def test_drops_have_their_counts_and_their_first_examples(dataset: Path) -> None:
    found = load(dataset).dropped
    manifest = load_manifest(Folder(str(dataset)))
    assert {reason: drop.documents for reason, drop in found.items()} == manifest.dropped
    assert [(example.source, example.text) for example in found["too_short"].examples] == [
        ("0.jsonl", "x"),
        ("0.jsonl", "é"),
        ("0.jsonl", "yy"),
    ]
    assert [example.source for example in found["invalid_json"].examples] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert {example.text for example in found["invalid_json"].examples} == {""}
    line = (dataset.parent / "in" / "0.jsonl").read_bytes()[found["too_short"].examples[1].position :]
    assert json.loads(line.splitlines()[0])["text"] == "é"


def test_frequencies_are_exact_for_a_small_dataset(dataset: Path) -> None:
    found = load(dataset).frequencies
    counts: Counter[int] = Counter()
    for path in dataset.glob("*/*.bin"):
        counts.update(np.fromfile(path, np.uint16).tolist())
    assert found.is_exact
    assert found.vocab_size == 257
    assert list(zip(found.ids, found.counts, strict=True)) == sorted(counts.items(), key=lambda one: (-one[1], one[0]))


def test_the_file_does_not_depend_on_workers_units_or_interruptions(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "done" and event["unit"] == 1:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(tokenmill.Interrupted):
        tokenmill.prepare(dataset.parent / "in", out, unit_bytes=9000, watch=stop, **RECIPE)
    assert not (out / STATISTICS).exists()
    tokenmill.prepare(dataset.parent / "in", out, unit_bytes=9000, **RECIPE)
    assert (out / STATISTICS).read_bytes() == (dataset / STATISTICS).read_bytes()
    whole = tmp_path / "whole"
    tokenmill.prepare(dataset.parent / "in", whole, **RECIPE)
    assert (whole / STATISTICS).read_bytes() == (dataset / STATISTICS).read_bytes()


def test_a_filter_shows_positions_and_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_filter.py").write_text("def keep(text): return 'secret' not in text\n")
    (tmp_path / "a.jsonl").write_text('{"text": "plain"}\n{"text": "a secret"}\n')
    tokenmill.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", filter="own_filter:keep", workers=1)
    (example,) = load(tmp_path / "out").dropped["filtered"].examples
    assert (example.source, example.position, example.text) == ("a.jsonl", 18, "")
    assert b"secret" not in (tmp_path / "out" / STATISTICS).read_bytes()


def test_a_budget_counts_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\n")
    tokenmill.prepare(
        tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", documents="lines", max_tokens=7, workers=1
    )
    found = load(tmp_path / "out")
    assert found.splits["train"].tokens == (7,)
    assert found.dropped["over_budget"].examples[0].text == "three"


def test_a_large_dataset_is_sampled_at_equal_distances(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(statistics, "MIN_BLOCKS", 4)
    monkeypatch.setattr(statistics, "BLOCK_TOKENS", 10)
    assert statistics.sampled_ranges(40) == [(0, 40)]
    assert statistics.sampled_ranges(100) == [(0, 10), (30, 40), (60, 70), (90, 100)]
    assert len(statistics.sampled_ranges(10 * 64 * 9)) == 9
    assert len(statistics.sampled_ranges(10**9)) == statistics.MAX_BLOCKS
    for name, text in (("a", "abcdefg" * 5), ("b", "hij" * 13), ("c", "klm" * 11)):
        (tmp_path / f"{name}.txt").write_text(text)
    tokenmill.prepare(
        tmp_path / "*.txt", tmp_path / "out", tokenizer="byte", documents="files", unit_bytes=20,
        workers=1,
    )  # fmt: skip
    shards = sorted((tmp_path / "out" / "train").glob("*.bin"))
    assert len(shards) > 1
    tokens = np.concatenate([np.fromfile(path, np.uint16) for path in shards]).tolist()
    expected: Counter[int] = Counter()
    for start, stop in statistics.sampled_ranges(len(tokens)):
        expected.update(tokens[start:stop])
    found = load(tmp_path / "out").frequencies
    assert not found.is_exact
    assert (found.counted, found.all_tokens) == (40, len(tokens))
    assert dict(zip(found.ids, found.counts, strict=True)) == expected


def test_repair_writes_the_same_file_again(dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "out"
    shutil.copytree(dataset, copy)
    data = bytearray((copy / STATISTICS).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / STATISTICS).write_bytes(data)
    with pytest.raises(DatasetError, match="not what the manifest says"):
        load(copy)
    assert [problem.file for problem in tokenmill.verify(copy, workers=1).problems] == [STATISTICS]
    os.unlink(copy / STATISTICS)
    tokenmill.repair(copy, workers=1)
    assert (copy / STATISTICS).read_bytes() == (dataset / STATISTICS).read_bytes()
    assert tokenmill.verify(copy, workers=1).ok


def _negative(found: DatasetStatistics) -> DatasetStatistics:
    return replace(found, splits={"train": replace(found.splits["train"], documents=(-1,))})


@pytest.mark.parametrize(
    "change",
    [
        _negative,
        lambda found: replace(found, format=2),
        lambda found: replace(found, frequencies=replace(found.frequencies, ids=(999,), counts=(1,))),
        lambda found: replace(found, frequencies=replace(found.frequencies, counts=())),
        lambda found: replace(found, frequencies=replace(found.frequencies, counted=0)),
        lambda found: replace(found, splits={"train": replace(found.splits["train"], lengths=(1, 1, 1))}),
    ],
)
def test_impossible_statistics_are_refused(dataset: Path, tmp_path: Path, change: Any) -> None:
    folder = Folder(str(tmp_path))
    manifest = load_manifest(Folder(str(dataset)))
    data = records.seal(change(load(dataset)))
    digest = folder.write(STATISTICS, data)
    folder.write("dataset.json", seal_manifest(replace(manifest, files={**manifest.files, STATISTICS: digest})))
    with pytest.raises(DatasetError):
        load_statistics(folder, load_manifest(folder))


def test_a_dataset_without_the_file_has_no_statistics(dataset: Path) -> None:
    folder = Folder(str(dataset))
    manifest = load_manifest(folder)
    files: dict[str, Digest] = {name: digest for name, digest in manifest.files.items() if name != STATISTICS}
    assert load_statistics(folder, replace(manifest, files=files)) is None


def test_bins_are_whole_numbers_and_four_to_each_doubling() -> None:
    assert LENGTH_EDGES[:16].tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16, 19, 22, 26, 32]
    assert (np.diff(LENGTH_EDGES) > 0).all()
