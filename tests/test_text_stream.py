"""Straight from text: what a stream gives is what a loader gives on the prepared dataset."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill
from conftest import make_texts, tree, write_jsonl, write_parquet
from tokenmill.errors import BadDocumentError, RecipeError, SourceError, StateError
from tokenmill.text_stream import TextStream

FIELDS = ("positions", "document_ids", "cu_seqlens", "sample_index")
RECIPES: list[dict[str, Any]] = [
    {"unit_bytes": 1500, "split": {"val": 0.2}},
    {"unit_bytes": 4000, "eot": "prepend", "min_chars": 40, "seed": 5, "split": {"val": 0.3, "test": 0.1}},
    {"unit_bytes": 2500, "eot": "none"},
    {"unit_bytes": 2000, "max_tokens": 9000, "split": {"val": 0.2}},
    {"unit_bytes": 1000, "sample": 0.5, "documents": "separator:mill", "max_document_bytes": 200},
    {"tokenizer": "gpt2", "split": {"val": 0.2}, "seed": 9},
    {"unit_bytes": 1500, "split": "nanogpt"},
]


@dataclass(frozen=True)
class Corpus:
    """Some sources, a recipe, and the dataset that prepare makes of both."""

    sources: str
    recipe: dict[str, Any]
    dataset: str

    def splits(self, seq_len: int) -> list[str]:
        """The splits that have a sample."""
        dataset = tokenmill.open(self.dataset)
        return [name for name in dataset.splits if dataset[name].num_tokens > seq_len]

    def loader(self, *sizes: int, **options: Any) -> tokenmill.DataLoader:
        return tokenmill.DataLoader(self.dataset, *sizes, order="sequential", **options)

    def stream(self, *sizes: int, **options: Any) -> TextStream:
        recipe = {name: value for name, value in self.recipe.items() if name not in ("split", "tokenizer")}
        held_out = self.recipe.get("split")
        return TextStream(
            self.sources, self.recipe.get("tokenizer", "byte"), *sizes, held_out=held_out, **{**recipe, **options}
        )


def make_corpus(path: Path, seed: int) -> Corpus:
    """Sources of several kinds with bad documents among them, and random numbers and sizes of texts."""
    chance = random.Random(seed)
    folder = path / "corpus"
    folder.mkdir()
    write_parquet(folder / "a.parquet", [*make_texts(chance.randint(20, 90), seed=seed, words=20), None, ""], rows=9)
    write_jsonl(folder / "b.jsonl", make_texts(chance.randint(20, 90), seed=seed + 50, words=chance.randint(5, 40)))
    with (folder / "b.jsonl").open("a") as file:
        file.write("{not json\n")
    (folder / "c.txt").write_text("\n\n".join(make_texts(chance.randint(5, 30), seed=seed + 90, words=9)))
    recipe = {"tokenizer": "byte", **RECIPES[seed]}
    tokenmill.prepare(str(folder), path / "out", workers=1, **recipe)
    return Corpus(str(folder), recipe, str(path / "out"))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Corpus]:
    return [make_corpus(tmp_path_factory.mktemp(f"corpus{seed}"), seed) for seed in range(len(RECIPES))]


@pytest.fixture
def corpus(corpora: list[Corpus]) -> Corpus:
    return corpora[0]


def takes_long(corpus: Corpus) -> bool:
    """Every stream loads its tokenizer, and that of GPT-2 is large."""
    return bool(corpus.recipe["tokenizer"] == "gpt2")


def plain(batches: Iterator[Any] | Any, steps: int | None = None) -> list[dict[str, Any]]:
    return [
        {name: (str(rows.dtype), rows.tolist()) for name, rows in batch.items()}
        for batch in itertools.islice(batches, steps)
    ]


@pytest.mark.parametrize("number", range(len(RECIPES)))
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_are_those_of_the_loader_on_the_prepared_dataset(
    corpora: list[Corpus], number: int, drop_last: bool
) -> None:
    warnings.simplefilter("ignore")  # some have no batch
    corpus = corpora[number]
    for split in corpus.splits(40):
        for ranks, batch_size in ((1, 3),) if takes_long(corpus) else ((1, 3), (2, 60)):
            for rank in range(ranks):
                options: dict[str, Any] = {"split": split, "epochs": 2, "drop_last": drop_last, "fields": FIELDS}
                options |= {"rank": rank, "world_size": ranks, "mask_boundaries": True}
                options |= {"labels": "aligned" if rank else "shifted"}
                expected = plain(corpus.loader(40, batch_size, **options))
                assert plain(corpus.stream(40, batch_size, **options)) == expected


def global_stream(corpus: Corpus, history: list[tuple[int, int, int, int]], **options: Any) -> list[list[int]]:
    """Inputs of all ranks, over runs of (ranks, batch size, steps, prefetch), each resumed from the one before."""
    rows: list[list[int]] = []
    state: dict[str, Any] | None = None
    for ranks, batch_size, steps, prefetch in history:
        parts, states = [], []
        for rank in range(ranks):
            stream = corpus.stream(30, batch_size, rank=rank, world_size=ranks, prefetch=prefetch, **options)
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
            batches = iter(stream)
            parts.append([batch["input_ids"].tolist() for batch in itertools.islice(batches, steps)])
            states.append(stream.state_dict())
        assert all(found == states[0] for found in states)
        state = states[0]
        for step in range(steps):
            for part in parts:
                rows += part[step]
    return rows


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_histories_of_ranks_batch_sizes_and_stops_are_the_one_stream_of_the_loader(
    corpora: list[Corpus], number: int
) -> None:
    corpus, chance = corpora[number], random.Random(number)
    loader = corpus.loader(30, 1)
    expected = [row for batch in itertools.islice(loader, 600) for row in batch["input_ids"].tolist()]
    assert loader.num_samples < 600, "histories run over epochs"
    for _ in range(1 if takes_long(corpus) else 5):
        history = [
            (chance.randint(1, 3), chance.randint(1, 9), chance.randint(0, 7), chance.choice([0, 0, 2]))
            for _ in range(chance.randint(2, 4))
        ]
        history.insert(chance.randrange(len(history)), (1, chance.randint(1, 120), 1, 0))
        rows = global_stream(corpus, history)
        assert rows == expected[: len(rows)], history


def test_a_run_begins_from_text_and_goes_on_with_the_prepared_dataset_and_back(corpus: Corpus) -> None:
    expected = plain(corpus.loader(30, 4), 90)
    stream = corpus.stream(30, 4)
    begun = plain(stream, 50)
    loader = corpus.loader(30, 4)
    loader.load_state_dict(stream.state_dict())
    begun += plain(loader, 20)
    again = corpus.stream(30, 4)
    again.load_state_dict(loader.state_dict())
    assert begun + plain(again, 20) == expected
    assert again.samples_seen == 360
    assert again.epoch == loader.epoch == 1


def test_a_resume_reads_no_unit_that_lies_before_it(tmp_path: Path) -> None:
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", make_texts(20, seed=number))
    options: dict[str, Any] = {"unit_bytes": 6000, "fields": ("document_ids", "sample_index")}
    first = tokenmill.stream(str(tmp_path), "byte", 50, 2, **options)
    plain(first, 90)
    state = first.state_dict()
    expected = plain(first, 4)
    assert state["cursor"]["mark"]["unit"] > 0

    second, fresh = (tokenmill.stream(str(tmp_path), "byte", 50, 2, **options) for _ in range(2))
    (tmp_path / "0.jsonl").unlink()
    second.load_state_dict(state)
    assert plain(second, 4) == expected
    fresh.load_state_dict({**state, "cursor": None})
    with pytest.raises(SourceError, match=r"0\.jsonl"):
        next(iter(fresh))


@pytest.mark.parametrize("buffer", [2, 7, 50, 10_000])
def test_a_shuffled_epoch_has_the_same_samples_in_another_order(corpus: Corpus, buffer: int) -> None:
    loader = corpus.loader(30, 1, epochs=1, fields=FIELDS)
    rows = {int(batch["sample_index"][0]): batch["input_ids"][0].tolist() for batch in loader}
    found: list[int] = []
    for batch in corpus.stream(30, 4, epochs=2, drop_last=False, shuffle=buffer, fields=FIELDS):
        for sample, row in zip(batch["sample_index"].tolist(), batch["input_ids"].tolist(), strict=True):
            assert row == rows[sample]
            found.append(sample)
    count = len(rows)
    one, other = found[:count], found[count:]
    assert sorted(one) == sorted(other) == list(range(count))
    assert one != other and one != sorted(one)
    for begin in range(0, count, buffer):  # no further than among its neighbours
        assert sorted(one[begin : begin + buffer]) == list(range(begin, min(begin + buffer, count)))


@pytest.mark.parametrize("buffer", [5, 64])
def test_a_shuffled_stream_resumes_as_exactly(corpora: list[Corpus], buffer: int) -> None:
    chance = random.Random(buffer)
    corpus = corpora[1]
    whole = global_stream(corpus, [(1, 400, 1, 0)], shuffle=buffer)
    for _ in range(8):
        history = [(chance.randint(1, 3), chance.randint(1, 9), chance.randint(0, 9), 0) for _ in range(4)]
        rows = global_stream(corpus, history, shuffle=buffer)
        assert rows == whole[: len(rows)], history


def test_nothing_is_written_anywhere(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(corpus.sources)
    assert plain(corpus.stream(30, 4), 5)
    assert tree(corpus.sources) == before
    assert not list(tmp_path.rglob("*"))


def test_bad_documents_are_dropped_and_counted_or_fatal(corpus: Corpus) -> None:
    stream = corpus.stream(30, 4, epochs=1)
    assert not stream.dropped
    plain(stream)
    assert dict(stream.dropped) == dict(tokenmill.open(corpus.dataset).manifest.dropped)
    assert stream.dropped["invalid_json"] == stream.dropped["null_text"] == 1
    with pytest.raises(BadDocumentError, match=r"a\.parquet at \d+: null text"):
        plain(corpus.stream(30, 4, epochs=1, on_bad="fail"))


def test_validation_sources_are_a_split(corpus: Corpus, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "val.jsonl", make_texts(30, seed=8))
    options: dict[str, Any] = {"tokenizer": "byte", "val_sources": (str(tmp_path / "val.jsonl"),)}
    tokenmill.prepare(corpus.sources, tmp_path / "out", workers=1, **options)
    for split in ("train", "val"):
        sizes: dict[str, Any] = {"seq_len": 30, "batch_size": 4, "split": split, "epochs": 1}
        loader = tokenmill.DataLoader(tmp_path / "out", order="sequential", **sizes)
        assert plain(tokenmill.stream(corpus.sources, **options, **sizes)) == plain(loader)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 7}, "fingerprint: the state has '"),
        ({"eot": "none"}, "fingerprint: the state has '"),
        ({"split": "val"}, "split: the state has 'train', this loader 'val'"),
        ({"shuffle": 9}, "order: the state has 'sequential', this loader 'shuffled'"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_both_values(
    corpus: Corpus, change: dict[str, Any], told: str
) -> None:
    state = corpus.stream(30, 4).state_dict()
    with pytest.raises(StateError, match=told):
        corpus.stream(30, 4, **change).load_state_dict(state)


def test_a_state_that_skips_is_refused(corpus: Corpus) -> None:
    state = corpus.loader(30, 4, skip=[(2, 3)]).state_dict()
    with pytest.raises(StateError, match="a stream from text skips none"):
        corpus.stream(30, 4).load_state_dict(state)


def test_a_state_of_other_text_or_another_tokenizer_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    state = tokenmill.stream(str(path), "byte", 30, 4).state_dict()
    with pytest.raises(StateError, match="fingerprint"):
        tokenmill.stream(str(path), "gpt2", 30, 4).load_state_dict(state)
    write_jsonl(path, make_texts(31))
    with pytest.raises(StateError, match="fingerprint"):
        tokenmill.stream(str(path), "byte", 30, 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("cursor", "told"),
    [
        (7, "expected object"),
        ({"epoch": 0}, "object missing"),
        (
            {"epoch": 0, "samples_before": 0, "mark": {"unit": 1, "documents": 9, "all_tokens": 9}},
            "object missing",
        ),
        ({"epoch": 0, "samples_before": 1, "mark": {"unit": 0, "tokens": 0, "documents": 0, "all_tokens": 0}}, "lead"),
        ({"epoch": 0, "samples_before": 0, "mark": {"unit": 1, "tokens": 9, "documents": 1, "all_tokens": 9}}, "lead"),
        ({"epoch": 0, "samples_before": 0, "mark": {"unit": -1, "tokens": 0, "documents": 0, "all_tokens": 0}}, "lead"),
        (
            {"epoch": 0, "samples_before": 0, "mark": {"unit": 9**9, "tokens": 0, "documents": 0, "all_tokens": 0}},
            "lead",
        ),
    ],
)
def test_a_damaged_cursor_is_refused(corpus: Corpus, cursor: Any, told: str) -> None:
    stream = corpus.stream(30, 4)
    with pytest.raises(StateError, match=told):
        stream.load_state_dict({**stream.state_dict(), "cursor": cursor})


def test_a_cursor_that_counts_epochs_wrongly_is_noticed_at_the_end_of_one(corpus: Corpus) -> None:
    stream = corpus.stream(30, 4, epochs=5)
    state = stream.state_dict()
    stream.load_state_dict(
        {**state, "samples_seen": 33, "cursor": {**state["cursor"], "epoch": 3, "samples_before": 30}}
    )
    with pytest.raises(StateError, match="30 samples before epoch 3, but an epoch has"):
        plain(stream)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"shuffle": 1}, "shuffle is 1"),
        ({"split": "test"}, "no split 'test'; there are train, val"),
        ({"fields": ("colour",)}, "colour"),
        ({"fields": ("component",)}, "field 'component'"),
        ({"dtype": np.int16}, "do not fit"),
        ({"colour": "red"}, "colour: unknown option"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(corpus: Corpus, options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        corpus.stream(**{"seq_len": 30, "batch_size": 4, **options})


def test_too_little_text_for_a_sample_is_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["short"])
    with pytest.raises(RecipeError, match="6 tokens make no sample of seq_len 6"):
        next(iter(tokenmill.stream(str(path), "byte", 6, 1)))


def test_a_thread_runs_ahead_unless_processes_do_or_the_caller_decides(corpus: Corpus) -> None:
    assert [corpus.stream(30, 4, workers=workers).prefetch for workers in (None, 0, 1)] == [2, 2, 0]
    assert corpus.stream(30, 4, workers=1, prefetch=3).prefetch == 3


def test_ids_as_they_are_stored_are_a_copy_of_their_own(corpus: Corpus) -> None:
    batch = next(iter(corpus.stream(30, 4, dtype=None, prefetch=0)))
    before = batch["labels"].copy()
    assert batch["input_ids"].dtype == np.uint16
    batch["input_ids"][:] = 0  # which a view of memory that ranks share would refuse
    assert (next(iter(corpus.stream(30, 4, dtype=None)))["labels"] == before).all()


def test_a_repr_tells_sources_tokenizer_shape_and_progress(corpus: Corpus) -> None:
    stream = corpus.stream(30, 4, prefetch=0)
    found = repr(stream)
    assert (
        found.startswith("TextStream(") and "'byte', 'train', seq_len=30, batch_size=4, rank=0, world_size=1" in found
    )
    next(iter(stream))
    assert repr(stream).endswith(", 4 samples seen)")


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_iteration_is_one_pass_and_the_next_one_the_next_pass(corpus: Corpus, drop_last: bool, epochs: int) -> None:
    options: dict[str, Any] = {"epochs": epochs, "drop_last": drop_last, "fields": FIELDS}
    stream, loader = corpus.stream(30, 4, **options), corpus.loader(30, 4, **options)
    for number in range(3):
        stream.set_epoch(number)
        found = plain(stream)
        assert found == plain(loader)
        assert found
        assert stream.state_dict()["samples_seen"] == loader.state_dict()["samples_seen"]
        assert stream.epoch == loader.epoch == epochs * (number + 1)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batch_size", [2, 4, 7])
def test_a_pass_resumes_at_any_batch_and_the_next_one_follows(corpus: Corpus, drop_last: bool, batch_size: int) -> None:
    options: dict[str, Any] = {"epochs": 2, "drop_last": drop_last}
    whole = corpus.stream(30, batch_size, **options)
    passes = [plain(whole), plain(whole)]
    count = len(passes[0])
    for stop in (1, count // 2, count - 1, count):
        stream = corpus.stream(30, batch_size, **options)
        begun = plain(stream, stop)
        state = json.loads(json.dumps(stream.state_dict()))
        loader = corpus.loader(30, batch_size, **options)
        assert plain(loader, stop) == begun
        ours, its = (
            {key: one.get(key) for key in ("samples_seen", "at_pass_end")} for one in (state, loader.state_dict())
        )
        assert ours == its
        for source in (state, {**state, "cursor": None}):  # the state of a loader has no cursor
            again = corpus.stream(30, batch_size, **options)
            again.load_state_dict(source)
            if stop == count and (drop_last or source.get("at_pass_end")):
                with pytest.warns(UserWarning, match="this iteration has no batch"):
                    assert not plain(again)
            else:
                assert begun + plain(again) == passes[0]
            assert plain(again, 3) == passes[1][:3]


def test_the_start_of_an_epoch_is_known_behind_the_first(corpus: Corpus) -> None:
    stream = corpus.stream(30, 4, epochs=1, shuffle=9)
    with pytest.raises(StateError, match="the position of epoch 2 is not known"):
        stream.set_epoch(2)
    passes = [plain(stream) for _ in range(3)]
    assert passes[0] != passes[2]
    stream.set_epoch(2)
    assert plain(stream) == passes[2]
    stream.set_epoch(0)
    assert plain(stream, 3) == passes[0][:3]
    stream.set_epoch(0)
    assert plain(stream) == passes[0][3:]
