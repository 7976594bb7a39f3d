from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from conftest import leftovers, make_texts, write_jsonl
from tokenmill import records
from tokenmill.dataset.bin_idx import HEADER
from tokenmill.dataset.dataset import Dataset, _last_up_to
from tokenmill.errors import DatasetError, RecipeError, StateError
from tokenmill.loader.batches import IGNORED
from tokenmill.loader.loader import DataLoader
from tokenmill.loader.packing import (
    DOCUMENT_PACKERS,
    PACKERS,
    DocumentStartStream,
    PackedRows,
    PackedStream,
    Packing,
    PackingRecord,
    best_fit,
    cut,
    document_start,
    open_packing,
    padded,
    truncated,
)
from tokenmill.storage.local import Folder

EOTS = ("append", "prepend", "none")
KINDS = tuple(PACKERS)
ALL_KINDS = (*PACKERS, *DOCUMENT_PACKERS)
BYTE_EOT = 256
ALL_FIELDS = ("positions", "document_ids", "cu_seqlens", "sample_index")

lengths_and_seq_len = st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=120).filter(any), st.integers(1, 40))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text with its end of text behind, before and nowhere; many small shards."""
    path = tmp_path_factory.mktemp("packing")
    write_jsonl(path / "a.jsonl", make_texts(100, seed=3, words=20))
    for eot in EOTS:
        tokenmill.prepare(
            str(path / "a.jsonl"), path / eot, tokenizer="byte", eot=eot, unit_bytes=1500, split={"val": 0.2}, workers=1
        )
    return path


@pytest.fixture(scope="module")
def datasets(built: Path) -> dict[str, Dataset]:
    return {eot: tokenmill.open(built / eot) for eot in EOTS}


@pytest.fixture
def dataset(datasets: dict[str, Dataset]) -> Dataset:
    return datasets["append"]


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """A dataset of one's own, which has no plans yet."""
    return Path(shutil.copytree(built / "append", tmp_path / "copy", ignore=shutil.ignore_patterns("packing")))


def naive_pieces(lengths: list[int], seq_len: int) -> list[tuple[int, int]]:
    """Start and span of every piece."""
    found, start = [], 0
    for length in lengths:
        for offset in range(0, length, seq_len):
            found.append((start + offset, min(length - offset, seq_len + 1)))
        start += length
    return found


def naive_best_fit(sizes: list[int], seq_len: int) -> list[int]:
    """The room that is left in each row."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= size
        else:
            rooms.append(seq_len - size)
    return rooms


def segments_of(rows: PackedRows) -> list[list[tuple[int, int]]]:
    pairs = list(zip(rows.starts.tolist(), rows.spans.tolist(), strict=True))
    return [pairs[begin:end] for begin, end in itertools.pairwise(rows.boundaries.tolist())]


def rooms_of(rows: PackedRows, seq_len: int) -> list[int]:
    return [seq_len - sum(min(span, seq_len) for _, span in row) for row in segments_of(rows)]


def pack_all(kind: str, lengths: list[int], seq_len: int) -> PackedRows:
    return PACKERS[kind](cut(np.array(lengths, np.int32), seq_len), seq_len)


@given(lengths_and_seq_len)
@settings(max_examples=300, deadline=None)
def test_every_piece_of_every_document_is_in_one_row(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    for kind in KINDS:
        rows = pack_all(kind, lengths, seq_len)
        found = [piece for row in segments_of(rows) for piece in row]
        assert sorted(found) == naive_pieces(lengths, seq_len)


@given(lengths_and_seq_len)
@settings(max_examples=300, deadline=None)
def test_best_fit_is_that_of_the_textbook(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    sizes = [min(span, seq_len) for _, span in naive_pieces(lengths, seq_len)]
    rooms = rooms_of(pack_all("best_fit", lengths, seq_len), seq_len)
    assert sorted(rooms) == sorted(naive_best_fit(sizes, seq_len))


def test_best_fit_of_many_documents_is_that_of_the_textbook() -> None:
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(4, 1.2, 3000), 1, 5000).astype(np.int32).tolist()
    for seq_len in (64, 256, 1000, 70_000):
        sizes = [min(span, seq_len) for _, span in naive_pieces(lengths, seq_len)]
        rooms = rooms_of(pack_all("best_fit", lengths, seq_len), seq_len)
        assert sorted(rooms) == sorted(naive_best_fit(sizes, seq_len))


@given(lengths_and_seq_len)
@settings(max_examples=200, deadline=None)
def test_no_two_rows_of_best_fit_have_room_for_each_other(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    rooms = sorted(rooms_of(pack_all("best_fit", lengths, seq_len), seq_len), reverse=True)
    assert min(rooms) >= 0
    assert len(rooms) == 1 or rooms[0] + rooms[1] < seq_len


def test_rows_stand_in_the_order_of_their_first_segments() -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 500).astype(np.int32)
    for kind in KINDS:
        firsts = [row[0][0] for row in segments_of(PACKERS[kind](cut(lengths, 128), 128))]
        assert firsts == sorted(firsts)


def test_padded_has_a_row_for_each_piece_in_order() -> None:
    rows = padded(cut(np.array([3, 0, 12, 5], np.int32), 5), 5)
    assert segments_of(rows) == [[(0, 3)], [(3, 6)], [(8, 6)], [(13, 2)], [(15, 5)]]


def test_what_is_cut_goes_on_with_other_documents() -> None:
    rows = best_fit(cut(np.array([4, 2, 7, 3, 1], np.int32), 5), 5)
    assert segments_of(rows) == [[(0, 4), (16, 1)], [(6, 6)], [(11, 2)], [(13, 3), (4, 2)]]


def document_of_token(dataset: Dataset, split: str = "train") -> list[tuple[int, int]]:
    """Number of the document of each token of a split, and the end of that document."""
    found: list[tuple[int, int]] = []
    for number, document in enumerate(dataset[split]):
        found += [(number, len(found) + len(document))] * len(document)
    return found


@pytest.mark.parametrize("eot", EOTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [1, 37, 64, 4000])
def test_rows_are_what_the_naive_reading_of_the_plan_says(
    datasets: dict[str, Dataset], eot: str, kind: Any, seq_len: int
) -> None:
    dataset = datasets[eot]
    tokens = [token for document in dataset["train"] for token in document.tolist()]
    owners = document_of_token(dataset)
    loader = DataLoader(
        dataset, seq_len, 5, packing=kind, epochs=1, drop_last=False, fields=ALL_FIELDS, prefetch=0, order="shuffled"
    )
    assert isinstance(loader.stream, PackedStream)
    plan = segments_of(loader.stream.packing.rows)
    padding = BYTE_EOT if dataset["train"].eot_id is not None else 0
    times_an_input = [0] * len(tokens)
    for batch in loader:
        runs: list[int] = []
        for row, number in enumerate(batch["sample_index"].tolist()):
            inputs: list[int] = []
            labels: list[int] = []
            positions: list[int] = []
            documents: list[int] = []
            for start, span in plan[number]:
                size = min(span, seq_len)
                document, end = owners[start]
                assert start + size <= end
                for place in range(start, start + size):
                    times_an_input[place] += 1
                    labels.append(tokens[place + 1] if place + 1 < end else IGNORED)
                inputs += tokens[start : start + size]
                positions += range(size)
                documents += [document] * size
                runs.append(size)
            rest = seq_len - len(inputs)
            runs += [rest] if rest else []
            assert batch["input_ids"][row].tolist() == inputs + [padding] * rest
            assert batch["labels"][row].tolist() == labels + [IGNORED] * rest
            assert batch["positions"][row].tolist() == [*positions, *range(rest)]
            assert batch["document_ids"][row].tolist() == documents + [-1] * rest
        assert batch["cu_seqlens"].tolist() == [0, *itertools.accumulate(runs)]
        assert batch["cu_seqlens"].dtype == np.int32
        assert batch["input_ids"].dtype == batch["labels"].dtype == np.int64
    assert times_an_input == [1] * len(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_no_target_is_lost_but_the_first_tokens_of_documents(dataset: Dataset, kind: Any) -> None:
    split = dataset["train"]
    loader = DataLoader(dataset, 16, 3, packing=kind, epochs=1, drop_last=False)
    labels = np.concatenate([batch["labels"].ravel() for batch in loader])
    targets = np.concatenate([document[1:] for document in split])
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(targets.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_waste_is_the_share_of_padding(dataset: Dataset, kind: Any) -> None:
    loader = DataLoader(dataset, 100, 3, packing=kind, epochs=1, drop_last=False, fields=("document_ids",))
    assert isinstance(loader.stream, PackedStream)
    packing = loader.stream.packing
    owners = np.concatenate([batch["document_ids"] for batch in loader])
    assert len(owners) == packing.num_rows == loader.num_samples
    assert packing.waste == pytest.approx((owners == -1).mean())
    assert packing.waste < (0.05 if kind == "best_fit" else 0.6)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_an_epoch_has_every_row_once_and_epochs_differ(dataset: Dataset, kind: Any, order: Any) -> None:
    loader = DataLoader(
        dataset, 32, 4, packing=kind, order=order, epochs=2, drop_last=False, fields=("sample_index",), prefetch=0
    )
    seen = np.concatenate([batch["sample_index"] for batch in loader]).tolist()
    count = loader.num_samples
    assert sorted(seen[:count]) == sorted(seen[count:]) == list(range(count))
    assert (seen[:count] == list(range(count))) == (order == "sequential")
    assert (seen[:count] == seen[count:]) == (order == "sequential")


def global_stream(dataset: Dataset, history: list[tuple[int, int, int, int]], kind: Any, order: Any) -> list[int]:
    """The rows of all ranks, over runs of (ranks, batch size, steps, prefetch), each resumed from the one before."""
    stream: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, batch_size, steps, prefetch in history:
        parts = []
        for rank in range(ranks):
            loader = DataLoader(
                dataset, 120, batch_size, packing=kind, order=order, rank=rank, world_size=ranks,
                fields=("sample_index",), prefetch=prefetch,
            )  # fmt: skip
            if state is not None:
                loader.load_state_dict(state)
            parts.append([batch["sample_index"].tolist() for batch in itertools.islice(iter(loader), steps)])
        state = json.loads(json.dumps(loader.state_dict()))
        for step in range(steps):
            for part in parts:
                stream += part[step]
    return stream


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_two_hundred_histories_of_ranks_and_batch_sizes_are_one_stream(dataset: Dataset, kind: Any) -> None:
    chance = random.Random(7)
    whole = {order: global_stream(dataset, [(1, 1, 500, 0)], kind, order) for order in ("sequential", "shuffled")}
    assert DataLoader(dataset, 120, 1, packing=kind).num_samples < 200  # so that histories run over epochs
    for _ in range(200):
        history = [
            (chance.randint(1, 4), chance.randint(1, 6), chance.randint(0, 5), chance.choice([0, 0, 0, 1, 3]))
            for _ in range(chance.randint(1, 4))
        ]
        order = chance.choice(list(whole))
        stream = global_stream(dataset, history, kind, order)
        assert stream == whole[order][: len(stream)], (history, order)


def documents_of(dataset: Dataset) -> list[list[int]]:
    return [document.tolist() for document in dataset["train"]]


def naive_truncated(documents: list[list[int]], seq_len: int, labels: str) -> list[dict[str, list[int]]]:
    """The rows as lists, from the documents alone; -2 stands for padding."""
    rows = []
    for number, document in enumerate(documents):
        if document:
            inputs = document[:seq_len]
            rest = seq_len - len(inputs)
            targets = document[1 : seq_len + 1] if labels == "shifted" else [IGNORED, *inputs[1:]]
            rows.append(
                {
                    "input_ids": inputs + [-2] * rest,
                    "labels": targets + [IGNORED] * (seq_len - len(targets)),
                    "positions": [*range(len(inputs)), *range(rest)],
                    "document_ids": [number] * len(inputs) + [-1] * rest,
                    "attention_mask": [1] * len(inputs) + [0] * rest,
                }
            )
    return rows


def naive_document_start(
    documents: list[list[int]], seq_len: int, labels: str, masked: bool
) -> list[dict[str, list[int]]]:
    """The same: documents are put into a row until it is full. What is left of the last one is dropped."""
    flat = [(token, number, place) for number, document in enumerate(documents) for place, token in enumerate(document)]
    rows = []
    at = 0
    while at + seq_len < len(flat):
        if flat[at][2]:
            at += 1
            continue
        row, target = flat[at : at + seq_len], flat[at + 1 : at + seq_len + 1]
        aligned = [(token, place) for token, _, place in (row if labels == "aligned" else target)]
        first = [labels == "aligned" and masked] + [False] * (seq_len - 1)  # each row begins a run
        positions = [0]
        for _, _, place in row[1:]:
            positions.append(positions[-1] + 1 if place else 0)
        rows.append(
            {
                "input_ids": [token for token, _, _ in row],
                "labels": [
                    IGNORED if (masked and not place) or begins else token
                    for (token, place), begins in zip(aligned, first, strict=True)
                ],
                "positions": positions,
                "document_ids": [number for _, number, _ in row],
                "attention_mask": [1] * seq_len,
            }
        )
        at += seq_len
    return rows


@pytest.mark.parametrize("eot", EOTS)
@pytest.mark.parametrize("kind", DOCUMENT_PACKERS)
@pytest.mark.parametrize("labels", ["shifted", "aligned"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seq_len", [1, 37, 200])
def test_rows_of_documents_are_those_of_plain_lists(
    datasets: dict[str, Dataset], eot: str, kind: Any, labels: Any, masked: bool, seq_len: int
) -> None:
    dataset = datasets[eot]
    documents = documents_of(dataset)
    padding = BYTE_EOT if dataset["train"].eot_id is not None else 0
    expected = (
        naive_truncated(documents, seq_len, labels)
        if kind == "truncated"
        else naive_document_start(documents, seq_len, labels, masked)
    )
    fields = ("positions", "document_ids", "attention_mask", "cu_seqlens", "sample_index")
    loader = DataLoader(
        dataset, seq_len, 5, packing=kind, labels=labels, mask_boundaries=masked, epochs=1, drop_last=False,
        fields=fields, prefetch=0,
    )  # fmt: skip
    assert loader.num_samples == len(expected)
    seen = []
    for batch in loader:
        edges = [0]
        for row, number in enumerate(batch["sample_index"].tolist()):
            wanted = expected[number]
            inputs = [padding if token == -2 else token for token in wanted["input_ids"]]
            assert batch["input_ids"][row].tolist() == inputs
            for name in ("labels", "positions", "document_ids", "attention_mask"):
                assert batch[name][row].tolist() == wanted[name], name
            starts = [at for at, position in enumerate(wanted["positions"]) if position == 0]
            edges += [row * seq_len + at for at in [*starts[1:], seq_len]]
            seen.append(number)
        assert batch["cu_seqlens"].tolist() == edges
    assert sorted(seen) == list(range(len(expected)))


@pytest.mark.parametrize("kind", DOCUMENT_PACKERS)
@pytest.mark.parametrize("seq_len", [16, 37, 60])
def test_dropped_tokens_are_counted(dataset: Dataset, kind: Any, seq_len: int) -> None:
    loader = DataLoader(dataset, seq_len, 3, packing=kind, epochs=1, drop_last=False, fields=("attention_mask",))
    assert isinstance(loader.stream, PackedStream | DocumentStartStream)
    packing = loader.stream.packing
    mask = np.concatenate([batch["attention_mask"] for batch in loader])
    assert packing.num_dropped == dataset["train"].num_tokens - int(mask.sum()) > 0
    assert packing.waste == pytest.approx(1 - mask.mean())
    assert f"{packing.num_dropped:,} of {dataset['train'].num_tokens:,} tokens dropped)" in repr(packing)


@given(lengths_and_seq_len)
@settings(max_examples=300, deadline=None)
def test_plans_of_documents_are_those_of_the_definition(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    starts = [0, *itertools.accumulate(lengths)][:-1]
    found = segments_of(truncated(np.array(lengths, np.int32), seq_len))
    wanted = [(start, min(length, seq_len + 1)) for start, length in zip(starts, lengths, strict=True) if length]
    assert found == [[piece] for piece in wanted]
    behind, rows = 0, []
    for start, length in zip(starts, lengths, strict=True):
        if length and start >= behind and start + seq_len < sum(lengths):
            rows.append([(start, seq_len + 1)])
            behind = start + seq_len
    assert segments_of(document_start(np.array(lengths, np.int32), seq_len)) == rows


@pytest.mark.parametrize("kind", DOCUMENT_PACKERS)
def test_streams_of_documents_go_to_another_process(dataset: Dataset, kind: Any) -> None:
    stream = DataLoader(dataset, 16, 4, packing=kind).stream
    located = stream.locate(np.arange(50))
    again = pickle.loads(pickle.dumps(stream))
    assert again.batch(located)["labels"].tolist() == stream.batch(located)["labels"].tolist()


def files_of(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (path / "packing").iterdir()}


def pack_and_list(path: Path, kind: str = "best_fit", seq_len: int = 50) -> tuple[Packing, dict[str, str]]:
    return open_packing(tokenmill.open(path), "train", kind, seq_len), files_of(path)


def same_rows(one: Packing, other: Packing) -> bool:
    pairs = zip(
        (one.rows.boundaries, one.rows.starts, one.rows.spans),
        (other.rows.boundaries, other.rows.starts, other.rows.spans),
        strict=True,
    )
    return one.digest == other.digest and all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_plan_is_stored_once_and_mapped_from_then_on(copy: Path, kind: str) -> None:
    first, files = pack_and_list(copy, kind)
    assert sorted(files) == [f"train-{kind}-50.bin", f"train-{kind}-50.json"]
    before = (copy / f"packing/train-{kind}-50.bin").stat()
    again, files_again = pack_and_list(copy, kind)
    assert same_rows(first, again) and files == files_again
    assert (copy / f"packing/train-{kind}-50.bin").stat().st_ino == before.st_ino
    for packing in (first, again):
        with pytest.raises(ValueError, match="read-only"):
            packing.rows.starts[0] = 0


def test_a_stored_plan_is_what_is_used(copy: Path) -> None:
    """A plan of other rows, put in the place of the stored one with a record that fits, gives those rows."""
    pack_and_list(copy, "best_fit")
    other, _ = pack_and_list(copy, "padded")
    folder = copy / "packing"
    found = records.unseal(PackingRecord, (folder / "train-padded-50.json").read_bytes(), where="")
    mine = records.unseal(PackingRecord, (folder / "train-best_fit-50.json").read_bytes(), where="")
    shutil.copy(folder / "train-padded-50.bin", folder / "train-best_fit-50.bin")
    swapped = PackingRecord(
        spec=mine.spec, num_rows=found.num_rows, num_segments=found.num_segments, digest=found.digest
    )  # fmt: skip
    (folder / "train-best_fit-50.json").write_bytes(records.seal(swapped))
    assert pack_and_list(copy, "best_fit")[0].num_rows == other.num_rows


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit of the plan": lambda folder: flip(folder / "train-best_fit-50.bin"),
    "a bit of the record": lambda folder: flip(folder / "train-best_fit-50.json"),
    "the end of the plan": lambda folder: os.truncate(folder / "train-best_fit-50.bin", 100),
    "all of the plan": lambda folder: os.truncate(folder / "train-best_fit-50.bin", 0),
    "all of the record": lambda folder: os.truncate(folder / "train-best_fit-50.json", 0),
    "the plan is gone": lambda folder: (folder / "train-best_fit-50.bin").unlink(),
    "the record is gone": lambda folder: (folder / "train-best_fit-50.json").unlink(),
    "the plan of another kind": lambda folder: shutil.copy(
        folder / "train-padded-50.bin", folder / "train-best_fit-50.bin"
    ),
    "the record of another kind": lambda folder: shutil.copy(
        folder / "train-padded-50.json", folder / "train-best_fit-50.json"
    ),
    "a folder in its place": lambda folder: [
        (folder / "train-best_fit-50.bin").unlink(),
        (folder / "train-best_fit-50.bin").mkdir(),
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_made_anew(copy: Path, damage: str) -> None:
    pack_and_list(copy, "padded")
    first, files = pack_and_list(copy)
    rows = PackedRows(*(np.array(array) for array in (first.rows.boundaries, first.rows.starts, first.rows.spans)))
    kept = Packing(first.spec, rows, first.digest)
    DAMAGE[damage](copy / "packing")
    again, files_again = pack_and_list(copy)
    assert same_rows(kept, again)
    assert files_again == files
    assert not leftovers(copy)


def test_a_plan_of_another_dataset_is_made_anew(built: Path, copy: Path) -> None:
    other = Path(shutil.copytree(built / "none", copy.parent / "other", ignore=shutil.ignore_patterns("packing")))
    theirs, _ = pack_and_list(other)
    shutil.copytree(other / "packing", copy / "packing")
    mine, _ = pack_and_list(copy)
    assert mine.spec.fingerprint == tokenmill.open(copy).manifest.fingerprint != theirs.spec.fingerprint
    assert mine.digest != theirs.digest


def test_where_nothing_can_be_written_the_plan_is_used_from_memory(copy: Path, dataset: Dataset) -> None:
    (copy / "packing").write_text("in the way")
    here, there = (DataLoader(path, 50, 4, packing="best_fit") for path in (copy, dataset))
    for one, other in itertools.islice(zip(here, there, strict=True), 10):
        assert (one["input_ids"] == other["input_ids"]).all()
    assert here.state_dict() == there.state_dict()
    assert (copy / "packing").read_text() == "in the way"


def test_a_split_may_bear_the_name_of_the_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(60, seed=1))
    out = tmp_path / "out"
    tokenmill.prepare(str(tmp_path / "a.jsonl"), out, tokenizer="byte", split={"packing": 0.5}, workers=1)
    for split in ("train", "packing"):
        next(iter(DataLoader(out, 50, 2, split=split, packing="best_fit")))
    assert tokenmill.verify(out, workers=1).ok


def test_plans_do_not_upset_the_dataset(copy: Path, built: Path) -> None:
    pack_and_list(copy)
    report = tokenmill.verify(copy, workers=1)
    assert report.ok, report.problems
    tokenmill.prepare(
        str(built / "a.jsonl"), copy, tokenizer="byte", eot="append", unit_bytes=1500, split={"val": 0.2}, workers=1
    )
    assert len(files_of(copy)) == 2


def test_another_seq_len_is_another_plan_of_the_same_tokens(copy: Path) -> None:
    pack_and_list(copy, seq_len=50)
    _, files = pack_and_list(copy, seq_len=51)
    assert sorted(files) == [f"train-best_fit-{seq_len}.{end}" for seq_len in (50, 51) for end in ("bin", "json")]


def test_processes_that_pack_at_once_make_the_same_plan(copy: Path) -> None:
    code = (
        "import sys, tokenmill; from tokenmill.loader.packing import open_packing; sys.stdin.readline();"
        f"print(open_packing(tokenmill.open({str(copy)!r}), 'train', 'best_fit', 50).digest.sha256)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": str(number)},
        )
        for number in range(4)
    ]  # fmt: skip
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    digests = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    packing, files = pack_and_list(copy)
    assert digests == {packing.digest.sha256} == {files["train-best_fit-50.bin"]}
    assert not leftovers(copy)


def test_the_plan_stands_on_disk_in_one_way(copy: Path) -> None:
    packing, _ = pack_and_list(copy)
    data = Folder(str(copy)).read("packing/train-best_fit-50.bin")
    rows = packing.num_rows
    count = (len(data) - 8 * (rows + 1)) // 12
    assert np.frombuffer(data, "<i8", rows + 1).tolist() == packing.rows.boundaries.tolist()
    assert np.frombuffer(data, "<i8", count, 8 * (rows + 1)).tolist() == packing.rows.starts.tolist()
    assert np.frombuffer(data, "<i4", count, 8 * (rows + 1 + count)).tolist() == packing.rows.spans.tolist()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"order": "random"}, "rows of packing 'best_fit' are fixed"),
        ({"order": "chaos"}, "chaos"),
        ({"dtype": None}, "labels of uint16 cannot be masked"),
        ({"dtype": np.uint32}, "labels of uint32 cannot be masked"),
        ({"packing": "tight"}, "unknown packing 'tight'"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 1 << 31}, "seq_len is 2147483648"),
        ({"fields": ("component",)}, "'component' of a single dataset"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_plan_is_made(copy: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        DataLoader(copy, **{"seq_len": 32, "batch_size": 4, "packing": "best_fit", **options})
    assert not (copy / "packing").exists()


def test_a_signed_dtype_of_another_width_will_do(dataset: Dataset) -> None:
    narrow, wide = (next(iter(DataLoader(dataset, 50, 4, packing="best_fit", dtype=t))) for t in (np.int32, np.int64))
    assert narrow["labels"].dtype == np.int32
    assert narrow["labels"].tolist() == wide["labels"].tolist()


@pytest.mark.parametrize(
    ("mine", "theirs"), [*itertools.permutations(["concat", "best_fit", "padded", "truncated", "document_start"], 2)]
)
def test_a_state_of_another_packing_is_refused(dataset: Dataset, mine: Any, theirs: Any) -> None:
    state = DataLoader(dataset, 50, 4, packing=theirs).state_dict()
    with pytest.raises(StateError, match=f"packing: the state has '{theirs}', this loader '{mine}'"):
        DataLoader(dataset, 50, 4, packing=mine).load_state_dict(state)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=70), st.lists(st.integers(0, 60), max_size=20))
def test_documents_are_found_as_numpy_would_find_them(starts: list[int], offsets: list[int]) -> None:
    ordered, wanted = np.array([0, *sorted(starts)]), np.array(offsets, np.int64)
    assert _last_up_to(ordered, wanted).tolist() == (np.searchsorted(ordered, wanted, side="right") - 1).tolist()


@pytest.mark.parametrize("eot", EOTS)
def test_the_index_tells_lengths_and_owners(datasets: dict[str, Dataset], eot: str) -> None:
    split = datasets[eot]["train"]
    assert np.concatenate([*split.document_lengths()]).tolist() == [len(document) for document in split]
    owners = [owner for owner, _ in document_of_token(datasets[eot])]
    assert split.document_at(np.arange(split.num_tokens)).tolist() == owners


def test_an_index_that_makes_no_sense_is_told(copy: Path) -> None:
    index = copy / "train" / "00000.idx"
    data = bytearray(index.read_bytes())
    count = int.from_bytes(data[18:26], "little")
    starts = np.frombuffer(data, "<i8", count, HEADER.size + 4 * count)
    starts[1] = 10**9
    index.write_bytes(data)
    with pytest.raises(DatasetError, match=r"00000\.idx: its documents are not contiguous"):
        DataLoader(copy, 32, 4, packing="best_fit")


@pytest.mark.parametrize("stored", [True, False])
def test_a_stream_goes_to_another_process_with_its_plan_or_the_way_to_it(copy: Path, stored: bool) -> None:
    if not stored:
        (copy / "packing").write_text("in the way")
    loader = DataLoader(copy, 16, 4, packing="best_fit")
    data = pickle.dumps(loader.stream)
    assert isinstance(loader.stream, PackedStream)
    assert (len(data) < loader.stream.packing.digest.bytes) == stored
    again = pickle.loads(data)
    located = loader.stream.locate(np.arange(50))
    assert again.batch(located)["labels"].tolist() == loader.stream.batch(located)["labels"].tolist()


def test_a_plan_of_other_content_is_made_again(tmp_path: Path) -> None:
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    for texts in (["a" * 30, "b" * 3], ["b" * 3, "a" * 30]):  # the same bytes in another order
        write_jsonl(source, texts)
        tokenmill.prepare(source, output, tokenizer="byte", workers=1, restart=True)
        (batch,) = DataLoader(output, 40, 2, packing="padded", order="sequential", epochs=1)
        assert [(row != IGNORED).sum() for row in batch["labels"]] == [len(text) for text in texts]


def test_a_plan_of_before_content_was_recorded_is_made_again(copy: Path) -> None:
    dataset = tokenmill.open(copy)
    made = open_packing(dataset, "train", "padded", 32)
    about = copy / "packing" / "train-padded-32.json"
    record = json.loads(about.read_bytes())
    del record["seal"], record["spec"]["content"]
    about.write_bytes(records.seal(record))
    assert open_packing(dataset, "train", "padded", 32).digest == made.digest
    assert json.loads(about.read_bytes())["spec"]["content"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eot", EOTS)
def test_aligned_labels_of_packed_rows_are_the_shifted_ones_under_the_inputs(
    datasets: dict[str, Dataset], kind: Any, eot: str
) -> None:
    options: dict[str, Any] = {"packing": kind, "epochs": 1, "fields": ("document_ids", "positions", "attention_mask")}
    shifted, aligned = (DataLoader(datasets[eot], 64, 5, labels=labels, **options) for labels in ("shifted", "aligned"))
    assert shifted.state_dict() == aligned.state_dict()
    padding = 0
    for one, other in zip(shifted, aligned, strict=True):
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        assert one["labels"][:, :-1].tolist() == other["labels"][:, 1:].tolist()
        assert (other["labels"][:, 0] == IGNORED).all()  # a row begins a run
        for batch in (one, other):
            is_token = batch["document_ids"] >= 0
            assert (batch["attention_mask"] == is_token).all() and (batch["labels"][~is_token] == IGNORED).all()
        allowed = is_token & (other["positions"] > 0)
        assert (other["labels"][allowed] == other["input_ids"][allowed]).all()
        padding += (~is_token).sum()
    assert padding, "no row has padding: this shows nothing"
