"""What a file of a tokenizer is, is told by its content; any other file is an error that names it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.files import format_ranks, parse_ranks, parse_tekken, recognise
from tokenmill.tokenizers.parity import choose_engine
from tokenmill.tokenizers.spec import from_dataset, resolve


def ranks_with(*lines: bytes, gap: bool = False) -> bytes:
    """A rank file of all bytes and a pair, with an id left out if there is to be a gap."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 257 if gap else 256}
    return b"\n".join([*(base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()), *lines]) + b"\n"


TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tekken(pattern: str = TEKKEN_PATTERN) -> bytes:
    """As Mistral's file is: ids begin behind the special tokens, and rows beyond the vocabulary are not in use."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc"]
    rows = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    config = {"pattern": pattern, "num_vocab_tokens": len(rows), "version": "v3"}
    config |= {"default_vocab_size": 257 + 10, "default_num_special_tokens": 10}
    return json.dumps({"config": config, "vocab": rows}).encode()


def ids_of(spec: Any, text: str) -> list[int]:
    return choose_engine(spec)[1].encode(pa.array([text], pa.large_string())).ids.tolist()


def test_a_tekken_file_gives_ids_behind_its_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(tekken())
    spec = resolve(str(tmp_path))
    assert (spec.scheme, spec.eot_id, spec.vocab_size) == ("tekken", 2, 267)
    assert ids_of(spec, "abc 12") == [10 + 256, 10 + ord("c"), 10 + ord(" "), 10 + ord("1"), 10 + ord("2")]
    assert from_dataset(spec.describe(), spec.content) == spec
    (tmp_path / "tekken.json").write_bytes(tekken(pattern=r"\s+"))
    with pytest.raises(TokenizerError, match=r"tekken\.json cuts text into words by a pattern") as caught:
        resolve(str(tmp_path))
    assert caught.value.hint


def test_ranks_are_known_by_their_content_whatever_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(ranks_with())
    with pytest.raises(TokenizerError, match="does not say how text is cut") as caught:
        resolve(str(path))
    assert "llama3" in caught.value.hint
    assert ids_of(resolve(f"{path}:llama3"), "ab a") == [256, ord(" "), ord("a")]


def test_ranks_with_an_empty_token_or_a_gap_are_encoded(tmp_path: Path) -> None:
    for content, size in ((ranks_with(b"= 257", b""), 258), (ranks_with(gap=True), 258)):
        (tmp_path / "x.tiktoken").write_bytes(content)
        spec = resolve(f"{tmp_path}/x.tiktoken:gpt2")
        assert spec.vocab_size == size
        assert ids_of(spec, "ab a")[1:] == [ord(" "), ord("a")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b'{"a": 0, "b": 1}', "is a vocabulary without its merges"),
        (b'{"tokenizer_class": "X"}', "is a tokenizer's configuration"),
        (b"YQ== 0\n", "byte 0 has no rank"),
        (b"<html>", "is neither a tokenizer.json"),
    ],
)
def test_a_file_of_another_kind_is_named_in_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=said) as caught:
        resolve(f"{tmp_path}/x.json" + (":gpt2" if b"==" in content else ""))
    assert caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"not base64 !", b"YQ==\n", b"YQ== x\n", b"YQ== -1\n"),
        *(b"YQ== 0\nYQ== 1\n", b"\xff\xfe", b"YQ== " + b"9" * 5000),
    ],
)
def test_a_rank_file_of_something_else_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tiktoken").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"x\.tiktoken") as caught:
        choose_engine(resolve(f"{tmp_path}/x.tiktoken:gpt2"))
    assert caught.value.hint


def test_the_vocabulary_of_ranks_with_gaps_covers_the_largest_or_is_refused(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 300}
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / "x.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    try:
        spec, engine, _ = choose_engine(resolve(f"{tmp_path}/x.tiktoken:gpt2"))
    except TokenizerError:
        return
    assert engine.encode(pa.array(["ab"], pa.large_string())).ids.max() < spec.vocab_size


@given(tokens=st.dictionaries(st.binary(min_size=2, max_size=6), st.none(), max_size=20))
@settings(max_examples=50, deadline=None, database=None)
def test_ranks_are_read_as_they_were_written(tokens: dict[bytes, None]) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token: number for number, token in enumerate(tokens, 256)}
    content = format_ranks(ranks)
    assert recognise(content, name="x") == "ranks"
    assert parse_ranks(content, name="x") == ranks


def broken(place: tuple[str | int, ...], value: object) -> bytes:
    """A tekken.json with something else in one place, or nothing if the value is `...`."""
    parsed = json.loads(tekken())
    inside = parsed
    for name in place[:-1]:
        inside = inside[name]
    if value is ...:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return json.dumps(parsed).encode()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "input data was truncated"),
        (tekken()[:500], "input data was truncated"),
        (b"[]", "expected object"),
        (broken(("config",), ...), "missing required field config"),
        (broken(("config", "default_vocab_size"), ...), "missing required field default_vocab_size"),
        (broken(("config", "default_num_special_tokens"), "10"), "expected int, got str"),
        (broken(("config", "default_num_special_tokens"), -1), "-1 of 267 tokens are special"),
        (broken(("config", "default_vocab_size"), 1 << 62), f"10 of {1 << 62} tokens are special"),
        (broken(("config", "pattern"), None), "expected str, got null"),
        (broken(("vocab", 7), {}), "missing required field rank - at"),
        (broken(("vocab", 7, "token_bytes"), "?"), "invalid base64"),
        (broken(("vocab", 7, "rank"), -300), "a rank is out of range"),
        (broken(("vocab", 7, "rank"), 1 << 40), "a rank is out of range"),
        (broken(("vocab", 7, "token_bytes"), ""), "a token is empty"),
        (broken(("vocab",), []), "it has no tokens"),
        (broken(("special_tokens",), [{"rank": 10, "token_str": "</s>"}]), "the rank of a special token"),
    ],
)  # fmt: skip
def test_a_broken_tekken_file_is_an_error_that_says_what_is_wrong(content: bytes, what: str) -> None:
    with pytest.raises(TokenizerError, match=rf"(?i)^x is not a complete tekken\.json: .*{what}") as caught:
        parse_tekken(content, name="x")
    assert "Error" not in caught.value.message
    assert "tokenizer.json of the same model" in caught.value.hint


PARTS: list[Any] = [
    ("pre_tokenizer", "ByteLevel"),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [1, 2]}),
    ("normalizer", {"type": "Sequence", "normalizers": 5}),
    ("added_tokens", [{"id": 300, "content": "<x>", "special": False, "normalized": 1}]),
    ("model", None),
    ("model", {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}),
    ("model", {"type": "BPE", "vocab": [["a"]], "merges": []}),
]


@pytest.mark.parametrize(("part", "value"), PARTS)
def test_a_broken_tokenizer_json_is_an_error_or_is_left_to_its_library(part: str, value: Any, tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}, "merges": []}
    parsed = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**parsed, part: value}))
    with pytest.raises(TokenizerError) as caught:
        choose_engine(resolve(str(tmp_path)))
    assert caught.value.hint
    assert "Error" not in caught.value.message


def test_an_id_that_no_vocabulary_has_is_refused_before_a_table_of_as_many_is_made(tmp_path: Path) -> None:
    (tmp_path / "x.tiktoken").write_bytes(ranks_with(base64.b64encode(b"abc") + b" 999999999"))
    with pytest.raises(TokenizerError, match=r"x\.tiktoken has the id 999,999,999; no more than 16,777,216 ids"):
        resolve(f"{tmp_path}/x.tiktoken:gpt2")
