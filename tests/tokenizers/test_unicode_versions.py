"""Characters that gigatoken and the references class by other versions of Unicode are for the reference.

The vocabularies here have a token of every two characters that stand beside each other in a text,
so that any other cut or composition shows in the ids.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiktoken

import tokenizers
from tokenmill.sources.base import text_array
from tokenmill.tokenizers import unicode_versions
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.parity import PATTERNS, choose_engine, unproven
from tokenmill.tokenizers.spec import TokenizerSpec, resolve
from tokenmill.tokenizers.unicode_versions import NEW_IN_NFC, NEW_IN_WORDS, NEW_SYMBOLS, Characters, classed_differently

NEW = "\u088f\u0c5c\ua7ce\U00010940\U00011db0\U00016ea0\U0001e6c0\U0002b73a\U000323b0"
OLD = "aé漢🙂\u0c5b\u0c5d"
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]


def around(characters: Iterable[str]) -> list[str]:
    return [
        form.replace("{}", char) for char in characters for form in ("a{}", ".{}", "1{}", "{}{}", "{}\n", "{}.", " {}")
    ]


def pairs_of(texts: list[str]) -> list[tuple[bytes, bytes]]:
    """Merges that join the bytes of every character, then every two characters."""
    chars = sorted({char for text in texts for char in text})
    inner = [
        (char.encode()[:end], char.encode()[end : end + 1]) for char in chars for end in range(1, len(char.encode()))
    ]
    return list(dict.fromkeys([*inner, *((text[0].encode(), text[1].encode()) for text in texts)]))


def rank_file(texts: list[str], scheme: str) -> tuple[TokenizerSpec, tiktoken.Encoding]:
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *(a + b for a, b in pairs_of(texts))])
    ranks = {token: number for number, token in enumerate(tokens)}
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    spec = replace(resolve("gpt2"), name="x.tiktoken", scheme=scheme, content=content, vocab_size=len(ranks))
    own = tiktoken.Encoding("x", pat_str=PATTERNS[scheme], mergeable_ranks=ranks, special_tokens={})
    return replace(spec, eot_id=None), own


def byte_chars() -> dict[int, str]:
    """How byte-level tokenizers write bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


def tokenizer_json(texts: list[str], pre_tokenizer: object, normalizer: object = None, **model: object) -> str:
    chars = byte_chars()
    vocab = {chars[byte]: byte for byte in range(256)}
    merges = []
    for pair in pairs_of(texts):
        left, right = ("".join(chars[byte] for byte in part) for part in pair)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    parsed = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **model},
    }
    return json.dumps(parsed)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(*patterns: str) -> dict[str, object]:
    cuts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return {"type": "Sequence", "pretokenizers": [*cuts, {**BYTE_LEVEL, "use_regex": False}]}


def chosen(folder: Path, content: str) -> tuple[TokenizerSpec, Engine]:
    (folder / "tokenizer.json").write_text(content)
    spec, engine, _ = choose_engine(resolve(str(folder)))
    return spec, engine


def rows_of(engine: Engine, texts: list[str]) -> list[list[int]]:
    found = engine.encode(text_array(texts))
    return [part.tolist() for part in np.split(found.ids, np.cumsum(found.lengths)[:-1])]


@pytest.mark.parametrize("scheme", list(PATTERNS))
def test_new_letters_have_the_ids_of_tiktoken_under_every_scheme(scheme: str) -> None:
    texts = around(NEW + OLD)
    spec, own = rank_file(texts, scheme)
    spec, engine, note = choose_engine(spec)
    assert (spec.engine, note) == ("gigatoken", "")
    expected = [own.encode_ordinary(text) for text in texts]
    assert rows_of(engine, texts) == expected
    assert rows_of(engine._engine, texts) != expected, "gigatoken and tiktoken have the same letters: no need to look"


ENDS = [f"a{newline}{space}" for newline in "\r\n" for space in "\t \x0b\x0c\u00a0\u3000"]


def test_llama3_and_tekken_end_texts_as_tiktoken_does_without_its_help() -> None:
    """As gigatoken's gpt4 they would differ: there, white space at the end of a text is one word."""
    for scheme in ("llama3", "tekken"):
        spec, own = rank_file([text[1:] for text in ENDS], scheme)
        spec, engine, note = choose_engine(spec)
        assert (spec.engine, note) == ("gigatoken", "")
        assert rows_of(engine, ENDS) == [own.encode_ordinary(text) for text in ENDS]


@pytest.mark.parametrize(
    ("pre_tokenizer", "new"),
    [
        (BYTE_LEVEL, NEW),
        (split(PATTERNS["llama3"]), NEW),
        (split(PATTERNS["o200k"]), NEW + "\u1acf\U00010efa"),
        (split(*DEEPSEEK), NEW + "\u20c1\U0001fac8\U0001f6d8"),
    ],
    ids=["gpt2", "llama3", "o200k", "deepseek"],
)
def test_new_letters_have_the_ids_of_tokenizers(tmp_path: Path, pre_tokenizer: object, new: str) -> None:
    texts = around(new + OLD)
    content = tokenizer_json(texts, pre_tokenizer)
    spec, engine = chosen(tmp_path, content)
    assert spec.engine == "gigatoken"
    own = tokenizers.Tokenizer.from_str(content)
    assert rows_of(engine, texts) == [own.encode(text).ids for text in texts]
    assert any(row != own.encode(text).ids for row, text in zip(rows_of(engine._engine, texts), texts, strict=True))


def test_marks_are_composed_as_tokenizers_composes_them(tmp_path: Path) -> None:
    """Telugu's nukta, Arabic and Vedic marks, and letters that Unicode joins since version 13."""
    texts = [
        "\u0301\u0c3c",
        "\u0301\u1abf",
        "\u0301\u08d3",
        "\U00011935\U00011930",
        "\u0301\U00011d45",
        "\U000105d2\u0307",
    ]
    content = tokenizer_json(around(OLD), BYTE_LEVEL, {"type": "NFC"})
    spec, engine = chosen(tmp_path, content)
    assert spec.engine == "gigatoken"
    own = tokenizers.Tokenizer.from_str(content)
    expected = [own.encode(text).ids for text in texts]
    assert rows_of(engine, texts) == expected
    assert all(row != right for row, right in zip(rows_of(engine._engine, texts), expected, strict=True))


def test_one_text_with_a_new_letter_leaves_the_others_as_they_are() -> None:
    texts = ["one", "", NEW, "two", "", *NEW, "three", ""]
    spec, own = rank_file(around(NEW), "gpt2")
    engine = open_engine(spec)
    assert rows_of(engine, texts) == [own.encode_ordinary(text) for text in texts]
    array = text_array(texts)
    for start in range(len(texts)):
        found = engine.encode(array[start:])
        assert found.lengths.tolist() == [len(own.encode_ordinary(text)) for text in texts[start:]]


def test_a_large_text_with_a_new_letter_asks_for_the_memory_of_the_reference() -> None:
    engine = open_engine(resolve("gpt2"))
    plain, new = engine.memory(text_array(["a"])), engine.memory(text_array(["a\u0c5c"]))
    assert (plain.times_text, new.times_text) == (4, 40)
    assert plain.times_run == new.times_run == 24


def points(lists: str) -> list[int]:
    bounds = [item.partition("-") for item in lists.split()]
    return [point for begin, _, end in bounds for point in range(int(begin, 16), int(end or begin, 16) + 1)]


@pytest.mark.parametrize("lists", [NEW_IN_WORDS, NEW_IN_WORDS + NEW_IN_NFC, NEW_SYMBOLS, "e9 7fd"])
def test_characters_are_found_and_no_others(lists: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = set(points(lists))
    beside = {point + step for point in listed for step in (-1, 0, 1)} | {*range(0x20, 0x3000), *range(0xA000, 0xB000)}
    every = sorted(point for point in beside if not 0xD800 <= point < 0xE000)
    finder = Characters((point, point) for point in listed)
    texts = [chr(point) for point in every]
    random.Random(1).shuffle(texts)
    expected = [row for row, text in enumerate(texts) if ord(text) in listed]
    for block_bytes in (unicode_versions._BLOCK_BYTES, 64, 7):
        monkeypatch.setattr(unicode_versions, "_BLOCK_BYTES", block_bytes)
        assert finder.rows(pa.array(texts, pa.large_string())).tolist() == expected
        assert finder.rows(pa.array([*texts, "x"], pa.string())[3:]).tolist() == [
            row - 3 for row in expected if row > 2
        ]


def test_scripts_that_begin_with_the_same_byte_are_found_too() -> None:
    """So many first bytes that the next ones are compared as well."""
    finder = Characters([(0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC)])
    telugu = "తెలుగు భాష"
    texts = [telugu * 500, telugu * 100 + "\u0c5c" + telugu, "\u0cdc", telugu * 900]
    assert finder.rows(text_array(texts)).tolist() == [1, 2]
    assert finder.rows(text_array([])).tolist() == []


def test_tokenizers_without_classes_of_characters_have_nothing_to_look_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json([], None))
    assert classed_differently(resolve(str(tmp_path))).count == 0


@pytest.mark.parametrize(
    ("pre_tokenizer", "what"),
    [
        ({"type": "Split", "pattern": {"String": "the"}, "behavior": "Isolated", "invert": False}, "Split"),
        ({"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Removed", "invert": False}, "Split"),
        ({"type": "Digits", "individual_digits": True}, "Digits"),
    ],
)
def test_a_cut_beside_a_known_pattern_is_for_tokenizers(tmp_path: Path, pre_tokenizer: object, what: str) -> None:
    """gigatoken knows the pattern and passes over what is beside it; no fixed text need show that."""
    sequence = split(PATTERNS["llama3"])
    sequence["pretokenizers"] = [pre_tokenizer, *sequence["pretokenizers"]]  # type: ignore[misc]
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(["th", "he"], sequence))
    assert f"the pre-tokeniser {what}" in unproven(resolve(str(tmp_path)))
    assert choose_engine(resolve(str(tmp_path)))[0].engine == "tokenizers"


def test_ids_that_two_tokens_share_are_for_tokenizers(tmp_path: Path) -> None:
    """Which of the two gigatoken takes changes from process to process."""
    parsed = json.loads(tokenizer_json(["th"], BYTE_LEVEL))
    parsed["model"]["vocab"]["zz"] = 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    assert "the same id" in unproven(resolve(str(tmp_path)))
    assert choose_engine(resolve(str(tmp_path)))[0].engine == "tokenizers"


def added(content: str, *tokens: tuple[str, bool]) -> str:
    parsed = json.loads(content)
    size = len(parsed["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parsed["added_tokens"] = [
        {"id": size + number, "content": name, **flags, "special": special}
        for number, (name, special) in enumerate(tokens)
    ]
    return json.dumps(parsed)


def test_added_tokens_that_overlap_special_ones_have_the_ids_of_tokenizers(tmp_path: Path) -> None:
    content = added(tokenizer_json([], BYTE_LEVEL), ("<a>", True), ("<a", False), ("<a><b>", False))
    own = tokenizers.Tokenizer.from_str(content)
    own.encode_special_tokens = True
    texts = ["<a>", "x<a> <a", "<a><b>", "<a"]
    _, engine = chosen(tmp_path, content)
    assert rows_of(engine, texts) == [own.encode(text).ids for text in texts]


def test_a_special_token_is_text_for_a_model_that_looks_whole_words_up(tmp_path: Path) -> None:
    """Of a model that ignores merges, the reference would give its id for a text that is its name."""
    content = json.loads(tokenizer_json([], BYTE_LEVEL, ignore_merges=True))
    content["model"]["vocab"]["EOS"] = len(content["model"]["vocab"])
    content["added_tokens"] = json.loads(added(json.dumps(content), ("EOS", True)))["added_tokens"]
    content["added_tokens"][0]["id"] = content["model"]["vocab"]["EOS"]
    spec, _ = chosen(tmp_path, json.dumps(content))
    for engine in (open_engine(spec), open_engine(replace(spec, engine="tokenizers"))):
        assert rows_of(engine, ["EOS"]) == [[ord(char) for char in "EOS"]]
