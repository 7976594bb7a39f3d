from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.errors import BuildError, RecipeError, TokenizerError
from tokenmill.tokenizers.base import Encoded
from tokenmill.units.encode import cut_to, place_eot, select

EOT = 99
Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, EOT - 1), max_size=6), max_size=12)


def encoded(documents: Documents, dtype: type[np.unsignedinteger] = np.uint32) -> Encoded:
    ids = np.array([token for document in documents for token in document], dtype)
    return Encoded(ids, np.array([len(document) for document in documents], np.int64))


def documents_of(found: Encoded) -> Documents:
    ends = np.cumsum(found.lengths).tolist()
    assert (ends[-1] if ends else 0) == len(found.ids)
    return [found.ids[end - length : end].tolist() for end, length in zip(ends, found.lengths.tolist(), strict=True)]


@given(
    documents=DOCUMENTS,
    eot=st.sampled_from(["append", "prepend", "none"]),
    dtype=st.sampled_from(["uint16", "int32"]),
    engine=st.sampled_from([np.uint8, np.uint16, np.uint32]),
)
@settings(deadline=None)
def test_the_end_of_text_stands_where_a_plain_loop_puts_it(
    documents: Documents, eot: str, dtype: str, engine: type[np.unsignedinteger]
) -> None:
    expected = []
    for document in documents:
        expected += {"append": [*document, EOT], "prepend": [EOT, *document], "none": document}[eot]
    found = place_eot(encoded(documents, engine), eot=eot, eot_id=EOT, vocab_size=EOT + 1, dtype=dtype)
    assert found.tolist() == expected
    assert found.dtype == np.dtype(dtype)


def test_an_end_of_text_that_only_fits_the_token_type_is_kept_whole() -> None:
    found = place_eot(encoded([[255], []], np.uint8), eot="append", eot_id=256, vocab_size=257, dtype="uint16")
    assert found.tolist() == [255, 256, 256]


@pytest.mark.parametrize("eot", ["append", "prepend", "none"])
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "bad"),
    [
        (257, "uint16", 257),
        (257, "uint16", 65536),  # would be 0 if it were narrowed first
        (65536, "uint16", 65536),
        (65537, "int32", 65537),
        (1 << 31, "int32", 1 << 31),  # would be negative
        (1 << 31, "int32", (1 << 32) - 1),
    ],
)
def test_an_id_beyond_the_vocabulary_raises_before_it_is_narrowed(
    vocab_size: int, dtype: str, bad: int, eot: str
) -> None:
    with pytest.raises(BuildError, match=f"id {bad}, beyond its vocabulary of {vocab_size}"):
        place_eot(encoded([[1, 2], [3, bad], [4]]), eot=eot, eot_id=0, vocab_size=vocab_size, dtype=dtype)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (1 << 31, "int32")])
def test_the_largest_id_of_a_vocabulary_is_kept(vocab_size: int, dtype: str) -> None:
    last = vocab_size - 1
    found = place_eot(encoded([[last]]), eot="append", eot_id=0, vocab_size=vocab_size, dtype=dtype)
    assert found.tolist() == [last, 0]


@given(documents=DOCUMENTS, eot=st.booleans(), data=st.data())
@settings(deadline=None)
def test_a_cut_keeps_exactly_the_room_there_is(documents: Documents, eot: bool, data: st.DataObject) -> None:
    total = sum(len(document) + eot for document in documents)
    if not total:
        return
    room = data.draw(st.integers(1, total))
    expected: Documents = []
    left = room
    for document in documents:
        if left == 0:
            break
        take = min(len(document), left - eot)
        expected.append(document[:take])
        left -= take + eot
    found = cut_to(encoded(documents), tokens_left=room, eot=eot)
    assert documents_of(found) == expected
    assert sum(len(document) + eot for document in documents_of(found)) == room


def test_a_cut_leaves_what_it_was_given_as_it_was() -> None:
    given_documents = encoded([[1, 2, 3], [4, 5, 6]])
    cut_to(given_documents, tokens_left=5, eot=True)
    assert documents_of(given_documents) == [[1, 2, 3], [4, 5, 6]]


@given(documents=DOCUMENTS, data=st.data())
@settings(deadline=None)
def test_a_selection_is_that_of_a_plain_loop(documents: Documents, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    expected = [document for document, wanted in zip(documents, chosen, strict=True) if wanted]
    assert documents_of(select(encoded(documents), np.array(chosen, np.bool_))) == expected


@given(documents=DOCUMENTS, data=st.data())
@settings(deadline=None)
def test_a_selection_and_its_complement_are_the_whole(documents: Documents, data: st.DataObject) -> None:
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))), np.bool_)
    parts = [documents_of(select(encoded(documents), mask)) for mask in (chosen, ~chosen)]
    assert sorted(parts[0] + parts[1]) == sorted(documents)


def test_a_text_that_gives_the_end_of_text_id_is_refused() -> None:
    encoded = Encoded(np.array([1, 9, 2], np.uint32), np.array([3]))
    with pytest.raises(TokenizerError, match="end-of-text id 9"):
        place_eot(encoded, eot="append", eot_id=9, vocab_size=10, dtype="uint16")


def sampled(folder: Path, share: str, **options: Any) -> list[str]:
    """The texts of train and val that a sample of documents has."""
    out = folder / f"out-{share.partition(':')[2]}-{len(list(folder.iterdir()))}"
    tokenmill.prepare(folder / "a.jsonl", out, sample=share, tokenizer="byte", workers=1, **options)
    assert tokenmill.verify(out, source="all", workers=1).ok
    dataset = tokenmill.open(out)
    return sorted(dataset[name].text(i) for name in dataset for i in range(dataset[name].num_documents))


def test_a_sample_of_documents_is_that_of_their_hashes(tmp_path: Path) -> None:
    texts = make_texts(400, seed=5)
    write_jsonl(tmp_path / "a.jsonl", texts)
    mixed = xxhash.xxh3_64_intdigest((9).to_bytes(8, "little"))
    chosen = sorted(
        text for text in texts if (xxhash.xxh3_128_intdigest(text.encode()) % 2**64 ^ mixed) < int(0.25 * 2**64)
    )
    assert 60 < len(chosen) < 150
    assert sampled(tmp_path, "documents:25%", seed=9) == chosen
    assert sampled(tmp_path, "documents:25%", seed=9, unit_bytes=4000, split="val=0.3") == chosen
    assert set(sampled(tmp_path, "documents:0.1", seed=9)) < set(chosen)
    assert sampled(tmp_path, "documents:25%", seed=8) != chosen


def test_what_a_sample_leaves_out_is_counted_and_listed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["", *make_texts(100, seed=5)])
    done = tokenmill.prepare(
        tmp_path / "a.jsonl", tmp_path / "out", sample="documents:10%", tokenizer="byte", workers=1
    )
    assert done.manifest.dropped == {"empty": 1, "not_sampled": 105 - done.documents}
    listed = pq.read_table(tmp_path / "out/provenance/00000.parquet").column("dropped").to_pylist()
    assert listed.count("not_sampled") == 105 - done.documents
    plan = tokenmill.plan(tmp_path / "a.jsonl", sample="documents:10%", tokenizer="byte", workers=1)
    whole = tokenmill.plan(tmp_path / "a.jsonl", tokenizer="byte", workers=1)
    assert plan.estimate.tokens == pytest.approx(whole.estimate.tokens / 10, rel=0.01)


@pytest.mark.parametrize("sample", ["documents:", "documents:0", "documents:2", "units:1%", "lines:1%"])
def test_a_sample_must_be_a_share_of_units_or_documents(tmp_path: Path, sample: str) -> None:
    with pytest.raises(RecipeError, match="sample: "):
        tokenmill.plan(write_jsonl(tmp_path / "a.jsonl", ["x"]), sample=sample)


def test_a_sample_of_documents_does_not_go_with_nanogpts_split(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs all documents"):
        tokenmill.plan(write_jsonl(tmp_path / "a.jsonl", ["x"]), sample="documents:1%", split="nanogpt")
