"""The fixed texts on which every engine is compared with its reference."""

from __future__ import annotations

import unicodedata

import pytest

from tokenmill.sources.base import text_array
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.hard_texts import HARD_TEXTS, texts_around
from tokenmill.tokenizers.spec import resolve


def test_hard_texts_are_many_different_ones_that_are_valid_utf8() -> None:
    assert len(set(HARD_TEXTS)) > 100
    assert [text.encode().decode() for text in HARD_TEXTS] == list(HARD_TEXTS)


def test_they_have_what_tokenizers_go_wrong_on() -> None:
    whole = "".join(HARD_TEXTS)
    assert {"", " ", "\n", "\r\n"} <= set(HARD_TEXTS)
    assert {unicodedata.category(char) for char in whole} >= {
        "Lu",
        "Lo",
        "Mn",
        "Nd",
        "No",
        "So",
        "Zs",
        "Cf",
        "Co",
        "Cn",
    }
    assert any(not unicodedata.is_normalized("NFC", text) for text in HARD_TEXTS)
    assert any(not unicodedata.is_normalized("NFD", text) for text in HARD_TEXTS)
    assert "<|endoftext|>" in HARD_TEXTS


def test_gpt2_gives_all_of_them_back() -> None:
    engine = open_engine(resolve("gpt2"))
    assert [engine.decode(engine.encode(text_array([text])).ids) for text in HARD_TEXTS] == list(HARD_TEXTS)


@pytest.mark.parametrize("tokens", [["<tool>"], ["<a>", "bé", "<c>"]])
def test_added_tokens_are_tried_alone_inside_of_words_and_beside_each_other(tokens: list[str]) -> None:
    found = list(texts_around(tokens))
    for number, token in enumerate(tokens):
        assert token in found
        assert any(f"a{token}b" in text for text in found)
        after = tokens[(number + 1) % len(tokens)]
        assert any(token + after in text for text in found)
