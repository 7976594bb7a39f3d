"""Traces equal what every batch has: tokens, documents and rows of sources, found by reading everything."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenmill as api
from conftest import make_texts, write_jsonl, write_parquet
from tokenmill import RecipeError, trace
from tokenmill.build import commit
from tokenmill.dataset import provenance

SEQ_LEN, BATCH, WORLD = 16, 3, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of three sources, two splits, some dropped documents and several shards; and another one."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "c").mkdir()
    write_parquet(folder / "c/a.parquet", make_texts(60, seed=1, words=9), rows=7)
    write_jsonl(folder / "c/b.jsonl", make_texts(50, seed=2, words=9))
    (folder / "c/c.txt").write_text("".join(f"line {i} {'x ' * (i % 7)}\n" for i in range(40)))
    options: dict[str, Any] = {"tokenizer": "byte", "split": "val=0.2", "min_chars": 12, "workers": 1}
    with pytest.MonkeyPatch.context() as patch:  # row groups and files as large datasets have them
        patch.setattr(provenance, "GROUP_ROWS", 8)
        patch.setattr(commit, "PROVENANCE_ROWS", 50)
        api.prepare(folder / "c", folder / "out", unit_bytes=500, **options)
    assert len(list((folder / "out/provenance").iterdir())) > 2
    write_jsonl(folder / "other.jsonl", make_texts(30, seed=3, words=5))
    api.prepare(folder / "other.jsonl", folder / "other", tokenizer="byte", workers=1)
    return folder


class Seen(NamedTuple):
    """A run of inputs of one document in a batch that was read."""

    position: int
    step: int
    rank: int
    row: int
    sample: int
    component: int
    document: int
    column: int
    num_tokens: int


def read_everything(data: Any, steps: int, **options: Any) -> Iterator[Seen]:
    """What the batches of all ranks have, by the fields that they have themselves."""
    is_mixture = isinstance(data, api.Mixture)
    fields = ("document_ids", "positions", "sample_index", *(("component",) if is_mixture else ()))
    for rank in range(WORLD):
        loader = api.DataLoader(data, SEQ_LEN, BATCH, rank=rank, world_size=WORLD, fields=fields, prefetch=0, **options)
        for step, batch in zip(range(steps), loader, strict=False):
            for row, sample in enumerate(batch["sample_index"].tolist()):
                component = int(batch["component"][row]) if is_mixture else 0
                documents, within = batch["document_ids"][row], batch["positions"][row]
                cuts = [0, *(np.flatnonzero(within[1:] == 0) + 1).tolist(), SEQ_LEN]
                position = (step * WORLD + rank) * BATCH + row
                for begin, end in itertools.pairwise(cuts):
                    if (document := int(documents[begin])) >= 0:
                        yield Seen(position, step, rank, row, sample, component, document, begin, end - begin)


def parts_of(found: api.Trace, names: list[str | None]) -> Iterator[Seen]:
    for one in found.samples:
        for part in one.parts:
            assert part.document.document is not None
            assert one.position is not None
            assert one.step is not None
            assert one.rank is not None
            assert one.row is not None
            yield Seen(
                one.position, one.step, one.rank, one.row, one.sample, names.index(one.component),
                part.document.document, part.column, part.num_tokens,
            )  # fmt: skip


STREAMS: list[dict[str, Any]] = [
    {"order": "sequential"},
    {"order": "shuffled", "seed": 5},
    {"order": "random"},
    {"order": "shuffled", "max_seq_len": 64},
    {"packing": "best_fit"},
    {"packing": "padded", "order": "sequential"},
    {"packing": "truncated", "seed": 3},
    {"packing": "document_start"},
]


@pytest.mark.parametrize("options", STREAMS, ids=str)
def test_steps_and_documents_are_traced_to_what_the_batches_have(root: Path, options: dict[str, Any]) -> None:
    path, split = root / "out", api.open(root / "out")["train"]
    loader = api.DataLoader(path, SEQ_LEN, BATCH, world_size=WORLD, **options)
    steps = -(-loader.num_samples // (BATCH * WORLD))
    seen = sorted(read_everything(path, steps + 2, **options))
    traced = [part for step in range(steps + 2) for part in parts_of(loader.trace(step), [None])]
    assert sorted(traced) == seen
    one_rank = loader.trace(1, rank=1)
    assert sorted(parts_of(one_rank, [None])) == sorted(part for part in traced if (part.step, part.rank) == (1, 1))
    in_epoch = [part for part in sorted(traced) if part.position < loader.num_samples]
    known = {"seq_len": SEQ_LEN, "batch_size": BATCH, "world_size": WORLD, **options}
    for document in range(0, split.num_documents, 7):
        found = trace(path, document=document, **known)
        assert sorted(parts_of(found, [None])) == [part for part in in_epoch if part.document == document]
    for sample in sorted({part.sample for part in in_epoch})[::11]:
        found = trace(path, sample=sample, **known)
        assert sorted(parts_of(found, [None])) == [part for part in in_epoch if part.sample == sample]


def test_the_tokens_of_parts_are_those_of_the_rows(root: Path) -> None:
    split = api.open(root / "out")["train"]
    for options in STREAMS:
        loader = api.DataLoader(root / "out", SEQ_LEN, BATCH, prefetch=0, **options)
        for step, batch in zip(range(10), loader, strict=False):
            for ids, one in zip(batch["input_ids"], loader.trace(step).samples, strict=True):
                for part in one.parts:
                    document = part.document
                    assert document.document is not None
                    tokens = split.document(document.document)[part.offset : part.offset + part.num_tokens]
                    assert np.array_equal(ids[part.column : part.column + part.num_tokens], tokens)
                    shard = np.fromfile(root / "out" / str(document.file), split.dtype)
                    begin = document.file_token or 0
                    assert np.array_equal(shard[begin : begin + document.num_tokens], split.document(document.document))


def test_a_mixture_is_traced_with_its_components(root: Path) -> None:
    mixture = api.Mixture(
        {"web": (root / "out", 0.7), "new": (root / "other", 0.3)}, schedule={40: {"web": 1, "new": 1}}
    )
    splits = [mixture.datasets[name]["train"] for name in mixture.names]
    loader = api.DataLoader(mixture, SEQ_LEN, BATCH, world_size=WORLD)
    steps = 60
    seen = sorted(read_everything(mixture, steps))
    names: list[str | None] = list(mixture.names)
    traced = sorted(part for step in range(steps) for part in parts_of(loader.trace(step), names))
    assert traced == seen
    known: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": BATCH, "world_size": WORLD}
    for document in range(0, splits[1].num_documents, 9):
        found = [
            part
            for epoch in range(9)
            for part in parts_of(trace(mixture, document=document, component="new", epoch=epoch, **known), names)
        ]
        expected = [part for part in traced if (part.component, part.document) == (1, document)]
        assert sorted(found)[: len(expected)] == expected
    with pytest.raises(RecipeError, match="component is None"):
        trace(mixture, document=0)


def test_skipped_and_dropped_samples_have_no_step(root: Path) -> None:
    for options in ({"skip": [(2, 4)]}, {"skip": [(2, 4)], "epochs": 1}, {"epochs": 2, "drop_last": False}):
        known: dict[str, Any] = {"world_size": 1, "fields": ("sample_index",), "prefetch": 0, **options}
        loader = api.DataLoader(root / "out", SEQ_LEN, 50, **known)
        batches = []
        for _ in range(3):  # passes, or the begin of a run that does not end
            batches += [batch["sample_index"].tolist() for _, batch in zip(range(8), loader, strict=False)]
        taken = set()
        for step, samples in enumerate(batches):
            found = loader.trace(step).samples
            assert [one.sample for one in found] == samples
            assert {(one.step, one.rank) for one in found} == {(step, 0)}
            taken |= {one.position for one in found}
        for position in sorted(set(range(loader.num_samples)) - taken):
            assert loader.step_at(position) is None or (loader.step_at(position) or (0,))[0] >= len(batches)


def read_sources(folder: Path) -> Iterator[tuple[str, int, str]]:
    """File, position and text of every document, read in the plainest way."""
    import pyarrow.parquet as pq

    for row, text in enumerate(pq.read_table(folder / "a.parquet")["text"].to_pylist()):
        yield "a.parquet", row, text
    for name in ("b.jsonl", "c.txt"):
        offset = 0
        for line in (folder / name).read_bytes().splitlines(keepends=True):
            yield name, offset, json.loads(line)["text"] if name == "b.jsonl" else line.decode().rstrip("\n")
            offset += len(line)


def test_rows_of_sources_and_documents_lead_to_each_other(root: Path) -> None:
    dataset = api.open(root / "out")
    dropped = 0
    for name, position, text in read_sources(root / "c"):
        row = dataset.find(name, position)
        assert (row.source.rpartition("/")[2], row.position) == (name, position)
        assert row.unit == ("row" if name == "a.parquet" else "byte")
        if row.split is None or row.document is None:
            assert (len(text) < 12, row.dropped) == (True, "too_short")
            found = trace(dataset, source=f"{name}:{position}", seq_len=SEQ_LEN)
            assert (found.samples, found.documents[0].document) == ((), None)
            dropped += 1
            continue
        assert dataset[row.split].text(row.document) == text
        assert dataset[row.split].source(row.document) == row
        if row.unit == "byte":  # any byte of the document finds it
            assert dataset.find(name, position + 5) == row
        (document,) = trace(dataset, source=f"c/{name}:{position}").documents
        assert (document.split, document.document, document.source) == (row.split, row.document, row)
        assert document.num_tokens == row.num_tokens == len(dataset[row.split].document(row.document))
    assert dropped


def test_a_document_of_another_split_has_samples_of_that_split(root: Path) -> None:
    dataset = api.open(root / "out")
    row = dataset["val"].source(3)
    found = trace(dataset, source=f"{row.source}:{row.position}", seq_len=8, order="sequential")
    assert found.documents[0].split == "val"
    assert found.samples
    assert found.samples[0].step is None, "the batch size is not known"
    with pytest.raises(RecipeError, match="is in split val, not in train"):
        trace(dataset, source=f"{row.source}:{row.position}", split="train")


def test_files_of_a_layout_have_documents_and_no_sources(root: Path) -> None:
    api.export(root / "out", root / "megatron", to="megatron")
    found = trace(root / "megatron", document=2, seq_len=SEQ_LEN)
    known = trace(root / "out", document=2, seq_len=SEQ_LEN, order="sequential")
    assert found.documents[0].source is None
    assert found.documents[0].num_tokens == known.documents[0].num_tokens
    assert found.sources == ()
    with pytest.raises(api.DatasetError, match="no provenance"):
        api.open(root / "megatron").find("a.parquet", 1)
