"""Texts and what an engine makes of them, for the tests of tokenizers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tokenmill.tokenizers.base import Engine

CORPUS = [f"The quick brown fox no. {i} jumps über the lazy dog, isn't it? {i * 37} déjà vu  ok" for i in range(300)]


any_text = st.text(st.characters(codec="utf-8"), max_size=60)


# Words, numbers, spaces and marks in which the cutting into words goes wrong if it can.
tricky_text = st.lists(
    st.sampled_from(
        [
            "The",
            " quick",
            "fox",
            "isn't",
            "IT'S",
            "'ll",
            "12345",
            "1",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\u00a0",
            "é",
            "e\u0301",
            "漢字",
            "😀",
            "👩\u200d👩\u200d👧",
            "!?",
            "...",
            "<|endoftext|>",
            "</s>",
            "<tool>",
            "▁",
            "ß",
            "\u200b",
            "\x00",
            "ﬁ",
            "½",
            "Ⅷ",
        ]
    ),
    max_size=12,
).map("".join)


def encode(engine: Engine, documents: list[str]) -> list[list[int]]:
    """The ids of each document, encoded in one batch."""
    found = engine.encode(pa.array(documents, pa.large_string()))
    assert len(found.ids) == found.lengths.sum()
    return [part.tolist() for part in np.split(found.ids, np.cumsum(found.lengths)[:-1])]
