"""What an engine takes and gives: Arrow text in, ids end to end with their documents' lengths out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ids = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a batch of documents end to end, and how many each document has."""

    ids: Ids
    lengths: npt.NDArray[np.int64]


class Engine(Protocol):
    def encode(self, text: pa.Array) -> Encoded:
        """Encode valid UTF-8 documents, none of them null."""

    def decode(self, ids: Ids) -> str:
        """The text of ids, without any special token."""


def text_array(texts: Sequence[str]) -> pa.Array:
    """Texts as Arrow text, made of their bytes alone: `pa.array` would load pandas, if that is installed."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(data) for data in encoded], out=offsets[1:])
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def text_buffers(text: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets and bytes of an Arrow text array, without a copy of the text."""
    wide = pa.types.is_large_string(text.type) or pa.types.is_large_binary(text.type)
    _, offsets_buffer, data_buffer = text.buffers()
    stored = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32, len(text) + 1 + text.offset)
    offsets: npt.NDArray[np.int64] = stored[text.offset :].astype(np.int64)
    if data_buffer is None:
        return offsets, np.zeros(0, np.uint8)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], data
