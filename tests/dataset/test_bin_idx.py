from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.dataset.bin_idx import (
    MAX_DOCUMENT_TOKENS,
    dtype_for,
    index_blocks,
    index_bytes,
    numpy_dtype,
    parse_header,
    parse_index,
)
from tokenmill.errors import DatasetError, RecipeError

CODES = {"uint16": (8, 2), "int32": (4, 4)}
DTYPES = st.sampled_from(sorted(CODES))
LENGTHS = st.lists(st.integers(0, MAX_DOCUMENT_TOKENS) | st.integers(0, 5), max_size=40)


def independent_index(dtype: str, lengths: list[int]) -> bytes:
    """An .idx as FORMATS.md describes it, one number at a time."""
    code, itemsize = CODES[dtype]
    out = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code)
    out += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(lengths) + 1)
    offsets = []
    offset = 0
    for length in lengths:
        offsets.append(offset)
        offset += length * itemsize
    out += b"".join(struct.pack("<i", length) for length in lengths)
    out += b"".join(struct.pack("<q", start) for start in offsets)
    out += b"".join(struct.pack("<q", document) for document in range(len(lengths) + 1))
    return out


def bin_bytes(dtype: str, lengths: list[int]) -> int:
    return sum(lengths) * CODES[dtype][1]


def write_index(dtype: str, lengths: list[int]) -> bytes:
    return b"".join(index_blocks(dtype, lambda: [np.array(lengths, np.int32)]))


@given(dtype=DTYPES, lengths=LENGTHS)
@settings(deadline=None)
def test_an_index_has_the_bytes_of_the_format(dtype: str, lengths: list[int]) -> None:
    written = write_index(dtype, lengths)
    assert written == independent_index(dtype, lengths)
    assert len(written) == index_bytes(len(lengths)) == 34 + 12 * len(lengths) + 8 * (len(lengths) + 1)


@pytest.mark.parametrize("count", [1 << 18, (1 << 18) + 3])
def test_an_index_of_many_blocks_has_the_bytes_of_the_format(count: int) -> None:
    lengths = (np.arange(count) * 7919 % 100_000).tolist()
    assert write_index("int32", lengths) == independent_index("int32", lengths)


@given(dtype=DTYPES, lengths=LENGTHS)
@settings(deadline=None)
def test_a_written_index_is_read_back(dtype: str, lengths: list[int]) -> None:
    data = independent_index(dtype, lengths)
    header, found = parse_index(memoryview(data), bin_bytes=bin_bytes(dtype, lengths), where="x.idx")
    assert (header.dtype, header.num_sequences, found.tolist()) == (dtype, len(lengths), lengths)
    assert parse_header(data[:34], where="x.idx") == header


@given(dtype=DTYPES, lengths=LENGTHS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_an_index_with_changed_bytes_is_rejected_or_says_the_same(
    dtype: str, lengths: list[int], data: st.DataObject
) -> None:
    changed = bytearray(independent_index(dtype, lengths))
    for place in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=3)):
        changed[place] = data.draw(st.integers(0, 255))
    try:
        _, found = parse_index(memoryview(changed), bin_bytes=bin_bytes(dtype, lengths), where="x.idx")
    except DatasetError as error:
        assert error.message.startswith("x.idx: ")
        assert error.hint
    else:
        assert found.tolist() == lengths


def test_every_single_flipped_bit_of_an_index_is_rejected() -> None:
    lengths = [3, 1, 0, 7]
    whole = independent_index("uint16", lengths)
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DatasetError):
            parse_index(memoryview(changed), bin_bytes=bin_bytes("uint16", lengths), where="x.idx")


def test_every_truncation_and_extension_of_an_index_is_rejected() -> None:
    lengths = [3, 1, 0, 7]
    whole = independent_index("uint16", lengths)
    for changed in [*(whole[:size] for size in range(len(whole))), whole + b"\0", whole + b"\0" * 20]:
        with pytest.raises(DatasetError):
            parse_index(memoryview(changed), bin_bytes=bin_bytes("uint16", lengths), where="x.idx")


@given(dtype=DTYPES, lengths=LENGTHS, other=st.integers(0, 1 << 40))
@settings(deadline=None)
def test_an_index_fits_one_size_of_tokens_only(dtype: str, lengths: list[int], other: int) -> None:
    if other != bin_bytes(dtype, lengths):
        with pytest.raises(DatasetError):
            parse_index(memoryview(independent_index(dtype, lengths)), bin_bytes=other, where="x.idx")


@pytest.mark.parametrize("count", [1 << 40, (1 << 64) - 2, (1 << 64) - 1])
def test_an_absurd_number_of_documents_is_rejected_before_anything_is_allocated(count: int) -> None:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, (count + 1) % (1 << 64))
    with pytest.raises(DatasetError):
        parse_index(memoryview(header + b"\0" * 100), bin_bytes=0, where="x.idx")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 5, 6, 7, 9, 255])
def test_only_the_two_dtypes_of_ours_are_read(code: int) -> None:
    with pytest.raises(DatasetError, match=rf"dtype code {code}\b"):
        parse_header(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 0, 1), where="x.idx")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, "uint16"),
        (65535, "uint16"),
        (65536, "uint16"),
        (65537, "int32"),
        ((1 << 31) - 1, "int32"),
        (1 << 31, "int32"),
    ],
)
def test_the_dtype_is_the_smallest_that_holds_every_id(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == dtype
    assert vocab_size - 1 <= np.iinfo(numpy_dtype(dtype)).max


def test_a_vocabulary_that_the_format_cannot_hold_is_refused() -> None:
    with pytest.raises(RecipeError, match=str((1 << 31) + 1)):
        dtype_for((1 << 31) + 1)
