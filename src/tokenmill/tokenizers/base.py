"""The protocol of engines: Arrow text in, ids and the number of ids of each document out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ids = npt.NDArray[np.unsignedinteger[Any]]

# Smaller documents need no more memory than every worker has.
LARGE_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a batch of documents end to end, and how many each document has."""

    ids: Ids
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memory:
    """What encoding takes at most, as times the bytes of the text, and of its longest run without a space."""

    times_text: int
    times_run: int = 0


class Engine(Protocol):
    def encode(self, text: pa.Array) -> Encoded:
        """Encode valid UTF-8 documents, none of them null."""

    def memory(self, text: pa.Array) -> Memory:
        """What encoding these documents takes."""

    def decode(self, ids: Ids) -> str:
        """The text of ids, without any special token."""
