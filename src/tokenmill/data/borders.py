"""Where documents begin inside the rows of a batch: what positions, document ids and masks are made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import TokenSplit
from tokenmill.shards.layout import Tokens

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Borders:
    """Documents begin at `columns[i]` of `rows[i]`. Column 0 is not listed: there, a row begins anyway."""

    rows: Numbers
    columns: Numbers


def find_borders(split: TokenSplit, rows: Tokens, starts: Numbers) -> Borders:
    """The borders in rows of tokens that begin at `starts` of the split.

    Where documents have an end of text, there are as many of these as documents, so the tokens
    themselves tell. Where they have none, the index does.
    """
    width = rows.shape[1]
    if split.eot != "none":
        # An end of text stands before the border, or is the first token behind it.
        near = rows[:, :-1] if split.eot == "append" else rows[:, 1:]
        found, columns = np.divmod(np.flatnonzero(near == split.eot_id), width - 1)
        return Borders(found, columns + 1)
    first, last = split.document_at(starts), split.document_at(starts + width - 1)
    counts = last - first
    found = np.repeat(np.arange(len(starts)), counts)
    # The numbers of all documents that begin inside, row after row.
    documents = np.repeat(first + 1 - (np.cumsum(counts) - counts), counts) + np.arange(len(found))
    return Borders(found, split.document_starts(documents) - starts[found])


def as_fields(borders: Borders, wanted: Collection[str], shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """The fields of a batch that follow from the borders: positions, document numbers in a row, lengths."""
    count, seq_len = shape
    inside = borders.columns < seq_len  # a border at the last target concerns no input
    rows, columns = borders.rows[inside], borders.columns[inside]
    fields: dict[str, npt.NDArray[Any]] = {}
    if "positions" in wanted:
        begun = np.zeros(shape, np.int64)
        begun[rows, columns] = columns
        fields["positions"] = np.arange(seq_len) - np.maximum.accumulate(begun, axis=1)
    if "document_ids" in wanted:
        begun = np.zeros(shape, np.int64)
        begun[rows, columns] = 1
        fields["document_ids"] = np.cumsum(begun, axis=1)
    if "cu_seqlens" in wanted:
        edges = np.concatenate((np.arange(count + 1) * seq_len, rows * seq_len + columns))
        fields["cu_seqlens"] = np.sort(edges).astype(np.int32)
    return fields
