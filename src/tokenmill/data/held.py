"""A stretch of a split in memory. Its tokens and documents keep the numbers that they have in the whole.

split     ........[ 7 | 8    | 9 ][ 10 | 11 ].......
                  held            a part that came
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.shards.layout import Tokens

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Tokens from `first_token` on, and where their documents begin, from `first_document` on.

    The first document may begin before the first token that is held.
    """

    eot: str
    eot_id: int | None
    tokens: Tokens
    first_token: int
    starts: Numbers
    first_document: int

    @property
    def end(self) -> int:
        """The number of the first token that is not here yet."""
        return self.first_token + len(self.tokens)

    def document_at(self, tokens: Numbers) -> Numbers:
        """The documents in which these tokens lie."""
        return np.searchsorted(self.starts, tokens, side="right") - 1 + self.first_document

    def document_starts(self, documents: Numbers) -> Numbers:
        """The first tokens of these documents."""
        found: Numbers = self.starts[documents - self.first_document]
        return found

    def gather(self, starts: Numbers, width: int) -> Tokens:
        """A row of `width` tokens for each of these starts."""
        rows: Any = np.lib.stride_tricks.sliding_window_view(self.tokens, width)
        found: Tokens = rows[starts - self.first_token]
        return found

    def extend(self, parts: Sequence[tuple[Tokens, Numbers]]) -> Held:
        """The same with more documents behind: their tokens end to end, and how many each has."""
        lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths in parts)])
        begins = self.end + np.cumsum(lengths) - lengths
        tokens = np.concatenate([self.tokens, *(tokens for tokens, _ in parts)])
        return replace(self, tokens=tokens, starts=np.concatenate((self.starts, begins)))

    def since(self, token: int) -> Held:
        """The same without what lies before a token. It may be one that is not here yet: then nothing is left."""
        gone = min(max(0, token - self.first_token), len(self.tokens))
        if not gone:
            return self
        first_token = self.first_token + gone
        # The document that goes on at the first token stays.
        documents = len(self.starts)
        if gone < len(self.tokens):
            documents = int(np.searchsorted(self.starts, first_token, side="right")) - 1
        return replace(
            self,
            tokens=self.tokens[gone:],
            first_token=first_token,
            starts=self.starts[documents:],
            first_document=self.first_document + documents,
        )
