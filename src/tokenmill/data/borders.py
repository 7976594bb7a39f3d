"""Where documents begin inside the rows of a batch: what positions, document ids and masks are made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.shards.layout import Tokens

Numbers = npt.NDArray[np.int64]

RUN_FIELDS = frozenset({"positions", "document_ids", "cu_seqlens"})


class DocumentIndex(Protocol):
    """Where the documents of a split lie among its tokens."""

    @property
    def eot(self) -> str: ...

    @property
    def eot_id(self) -> int | None: ...

    def document_at(self, tokens: Numbers) -> Numbers:
        """The documents in which these tokens lie."""

    def document_starts(self, documents: Numbers) -> Numbers:
        """The first tokens of these documents."""


def find_borders(split: DocumentIndex, rows: Tokens, starts: Numbers) -> Numbers:
    """Where documents begin in rows of tokens that begin at `starts` of the split, counted through all rows.

    The first column is left out: there, a row begins anyway. Where documents have an end of text, there are as
    many of these as documents, so the tokens themselves tell. Where they have none, the index does.
    """
    width = rows.shape[1]
    if split.eot != "none":
        (places,) = (rows.reshape(-1) == split.eot_id).nonzero()
        places += split.eot == "append"  # it stands before the border, or is the first token behind it
        inside: Numbers = places[places % width > 0]
        return inside
    first, last = split.document_at(starts), split.document_at(starts + width - 1)
    counts = last - first
    found = np.repeat(np.arange(len(starts)), counts)
    # The numbers of all documents that begin inside, row after row.
    documents = np.repeat(first + 1 - (np.cumsum(counts) - counts), counts) + np.arange(len(found))
    borders: Numbers = split.document_starts(documents) + found * width - starts[found]
    return borders


@dataclass(frozen=True, slots=True)
class Runs:
    """Inputs of the same document, through all rows of a batch: run i is from `edges[i]` up to the next edge."""

    edges: Numbers
    documents: Numbers


def find_runs(borders: Numbers, first_documents: Numbers, seq_len: int) -> Runs:
    """The runs between borders, in rows that begin in these documents. Each row begins one."""
    num_rows = len(first_documents)
    found, columns = np.divmod(borders, seq_len + 1)
    begins = (borders - found)[columns < seq_len]  # a border at the last target concerns no input
    edges = np.sort(np.concatenate((np.arange(num_rows + 1) * seq_len, begins)))
    owners = edges[:-1] // seq_len
    before = np.arange(len(owners)) - owners.searchsorted(np.arange(num_rows))[owners]
    return Runs(edges, first_documents[owners] + before)


def fill_fields(batch: dict[str, npt.NDArray[Any]], wanted: Collection[str], runs: Runs) -> None:
    """Put into a batch what follows from its runs: positions in documents, document numbers, lengths."""
    edges, lengths = runs.edges, np.diff(runs.edges)
    shape = batch["labels"].shape
    seq_len = shape[1]
    if "positions" in wanted:
        columns = np.repeat((edges[:-1] % seq_len).astype(np.int32), lengths)
        np.subtract(np.arange(seq_len, dtype=np.int32), columns.reshape(shape), out=batch["positions"])
    if "document_ids" in wanted:
        batch["document_ids"].reshape(-1)[:] = np.repeat(runs.documents, lengths)
    if "cu_seqlens" in wanted:
        batch["cu_seqlens"] = edges.astype(np.int32)
