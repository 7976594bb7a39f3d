from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.text_stream import TokenBuffer

LENGTHS = st.lists(st.integers(1, 9), max_size=6)


def nothing(first_token: int = 0, first_document: int = 0) -> TokenBuffer:
    return TokenBuffer(
        eot="none",
        eot_id=None,
        parts=(),
        begins=(),
        end=first_token,
        starts=np.zeros(0, np.int64),
        first_document=first_document,
    )


def part(begin: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents whose tokens are their own numbers in the split."""
    return np.arange(begin, begin + sum(lengths), dtype=np.uint16), np.array(lengths, np.int64)


@settings(deadline=None, database=None)
@given(st.integers(0, 50), st.lists(st.tuples(LENGTHS, st.integers(0, 40)), max_size=6), st.booleans())
def test_whatever_comes_and_goes_tokens_and_documents_keep_their_numbers(
    first: int, history: list[tuple[list[int], int]], joins: bool
) -> None:
    buffer, begin, owners = nothing(first, 7), first, []
    for lengths, gone in history:
        buffer = buffer.extend([part(buffer.end, lengths)])
        for length in lengths:
            owners += [owners[-1] + 1 if owners else 7] * length
        begin = min(buffer.end, max(begin, first + gone))
        buffer = buffer.since(first + gone)
        buffer = buffer.joined(begin) if joins and begin < buffer.end else buffer
        numbers = np.arange(begin, buffer.end)
        assert buffer.end == first + len(owners)
        assert len(buffer.parts) <= (1 if joins and len(numbers) else len(history))
        assert buffer.document_at(numbers).tolist() == owners[begin - first :]
        if len(numbers):
            assert buffer.tokens(begin, buffer.end).tolist() == numbers.tolist()
            documents = np.unique(buffer.document_at(numbers))
            assert buffer.document_starts(documents).tolist() == [
                first + owners.index(one) for one in documents.tolist()
            ]


def test_rows_begin_at_any_token_that_is_held() -> None:
    buffer = nothing(100).extend([part(100, [5, 9]), part(114, [6])]).since(103)
    assert buffer.gather(np.array([103, 110, 115]), 5).tolist() == [
        [103, 104, 105, 106, 107],
        [110, 111, 112, 113, 114],
        [115, 116, 117, 118, 119],
    ]


def test_windows_are_views_of_a_part_and_joined_across_parts() -> None:
    parts = part(100, [5, 9]), part(114, [6])
    buffer = nothing(100).extend(parts)
    inside, across = buffer.windows(101, 3, 4), buffer.windows(105, 3, 4)
    assert inside.tolist() == [[101 + 4 * row + column for column in range(5)] for row in range(3)]
    assert across.tolist() == [[105 + 4 * row + column for column in range(5)] for row in range(3)]
    assert np.shares_memory(inside, parts[0][0])
    assert not np.shares_memory(across, parts[1][0])
