"""The fingerprint of documents and tokens, whatever layout they stand in and whatever dtype they have.

    splits, in order of name -> ranges of whole documents, of about 2^27 tokens each
    a range -> SHA-256 over its tokens as 32-bit numbers, the end of text last, then its documents' lengths

It is the fingerprint of an imported dataset, so that the same documents have the same one from wherever they
were imported, and the loader gives them in the same order. A prepared dataset has another, that of its recipe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from tokenmill import records
from tokenmill.data.dataset import Dataset, Starts
from tokenmill.layouts.stream import TokenStream, cut_at_documents, document_lengths
from tokenmill.shards.layout import Tokens

FORMAT = 1
RANGE_TOKENS = 1 << 27


class ContentHash:
    """The digest of one range, fed block by block."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, tokens: Tokens) -> None:
        self._sha.update(tokens.astype("<u4", copy=False).data.cast("B"))

    def digest(self, lengths: Starts) -> str:
        self._sha.update(lengths.astype("<i8").data.cast("B"))
        return self._sha.hexdigest()


def combine(splits: Mapping[str, Sequence[str]]) -> str:
    """One fingerprint from the digests of all ranges."""
    return records.digest({"content": FORMAT, "splits": {name: list(found) for name, found in splits.items()}})


def content_fingerprint(dataset: Dataset) -> str:
    """The fingerprint that the dataset's documents and tokens have, read from beginning to end."""
    found: dict[str, list[str]] = {}
    for name in dataset.splits:
        split = dataset[name]
        stream = TokenStream(split, "append" if split.eot != "none" else "")
        for start, stop in cut_at_documents(split, RANGE_TOKENS):
            content = ContentHash()
            for tokens in stream.blocks(start, stop):
                content.add(tokens)
            lengths = document_lengths(split, start, stop)
            found.setdefault(name, []).append(content.digest(lengths[lengths > 0]))
    return combine(found)


def max_id(tokens: Tokens) -> int:
    """The largest id, where a 32-bit number that looks negative is one beyond all vocabularies."""
    return int(tokens.view(np.uint32 if tokens.itemsize == 4 else np.uint16).max())
