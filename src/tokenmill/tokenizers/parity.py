"""The parity check: engine and reference must encode the user's documents to the same ids.

The reference is another implementation of the same tokenizer: tiktoken for rank files,
`tokenizers` for tokenizer.json, `sentencepiece` for its models, Python's own encoder for bytes and
characters. It runs here, while the engine makes its trial, usually in another process. Both also
encode the texts of `hard_texts`.
"""

from __future__ import annotations

import binascii
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenmill.errors import ParityError, TokenizerError
from tokenmill.records import Int
from tokenmill.sources.base import text_array
from tokenmill.tokenizers.base import Encoded, Engine, Ids
from tokenmill.tokenizers.hard_texts import HARD_TEXTS, texts_around
from tokenmill.tokenizers.spec import TokenizerSpec

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# How each scheme cuts text into words: the patterns are part of the tokenizers' definition.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # As tiktoken has it: white space at the end of a text is one word, newlines or not.
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


Reference = tuple[str, Callable[[str], list[int]]]
# Tokenizers with more added tokens have thousands of placeholders, all alike.
_MAX_ADDED = 2000
# References are slow; tiktoken and tokenizers let others run meanwhile.
_THREADS = 2
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was compared, and with which reference."""

    reference: str
    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What an engine makes of some texts: the ids of all, in base64, how many each has, and the seconds it takes."""

    packed_ids: str
    lengths: tuple[Int, ...]
    seconds: float

    @property
    def ids(self) -> Ids:
        return np.frombuffer(binascii.a2b_base64(self.packed_ids), "<u4")


def choose_engine(spec: TokenizerSpec) -> tuple[TokenizerSpec, Engine, str]:
    """The tokenizer with gigatoken, if that gives the ids of the reference on every hard text; else the reference.

    And a sentence about it if it is not gigatoken.
    """
    from tokenmill.tokenizers.engine import open_engine

    if spec.engine != "gigatoken":
        return spec, open_engine(spec), _OWN if spec.kind == "sentencepiece" else ""
    own = "tokenizers" if spec.kind == "hf" else "tiktoken"
    reason = unproven(spec)
    if not reason:
        try:
            opened = open_engine(spec)
        except TokenizerError as error:
            reason = error.message
        else:
            try:
                check_hard(spec, open_reference(spec), opened)
            except (ParityError, TokenizerError) as error:
                reason = f"gigatoken and {own} disagree on a test text: {error.message}"
            else:
                return spec, opened, ""
    fallback = replace(spec, engine=own)
    return fallback, open_engine(fallback), f"{reason}; encoding with {own}, which is many times slower"


_OWN = "a SentencePiece model is encoded by sentencepiece itself, which is many times slower than gigatoken"
_NORMALIZERS = {"NFC", "Prepend", "Replace", "Sequence"}
_FLAGS = ("single_word", "lstrip", "rstrip")


def unproven(spec: TokenizerSpec) -> str:
    """What of a tokenizer.json gigatoken may pass over, as a sentence; "" if there is nothing."""
    if spec.kind != "hf":
        return ""
    try:
        return _unproven(json.loads(spec.content), spec.eot_id)
    except (AttributeError, KeyError, TypeError, ValueError):  # tokenizers will say what is wrong with the file
        return "gigatoken does not know the parts of this tokenizer.json"


def _unproven(parsed: dict[str, Any], eot_id: int | None) -> str:
    normalizer, model = parsed.get("normalizer"), parsed["model"]
    for token in parsed.get("added_tokens") or ():
        if token.get("special") or token["id"] == eot_id:
            continue
        flags = [flag for flag in _FLAGS if token.get(flag)]
        flags += ["normalized"] if token.get("normalized") and normalizer else []
        if flags:
            return f"gigatoken does not know the flag {flags[0]} of the added token {token['content']!r}"
    if strange := [*sorted(_types(normalizer) - _NORMALIZERS), *_strange_cuts(parsed.get("pre_tokenizer"))]:
        return f"gigatoken is not known to do {strange[0]} as tokenizers does"
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            return f"gigatoken is not known to have a {field}"
    ids = list(model["vocab"].values()) if isinstance(model["vocab"], dict) else []
    return "two tokens of the vocabulary have the same id" if len(set(ids)) < len(ids) else ""


def _types(part: object) -> set[str]:
    """The types of a normaliser, and of all that are in it."""
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))}.union(*map(_types, part.get("normalizers") or ()))


def _strange_cuts(part: dict[str, Any] | None) -> Iterator[str]:
    """What of a pre-tokeniser is neither ByteLevel, nor patterns before it, nor spaces that stay with the word before.

    gigatoken knows some patterns as a whole, and passes over what is beside them.
    """
    if part is None or part == _SPACES_STAY:
        return
    *cuts, last = part.get("pretokenizers") or [part]
    for cut in cuts:
        whole = cut.get("behavior") == "Isolated" or (cut.get("behavior") == "Removed" and cut.get("invert"))
        if cut.get("type") != "Split" or "Regex" not in (cut.get("pattern") or {}) or not whole:
            yield f"the pre-tokeniser {cut.get('type')}"
    if last.get("type") != "ByteLevel" or (cuts and last.get("use_regex", True)):
        yield f"the pre-tokeniser {last.get('type')}"


_SPACES_STAY = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def hard_texts(spec: TokenizerSpec) -> tuple[str, ...]:
    """The hard texts, as far as the tokenizer has an id for their characters, and those of its own added tokens."""
    if spec.kind == "hf":
        added = json.loads(spec.content).get("added_tokens") or ()
        return (*HARD_TEXTS, *texts_around([token["content"] for token in added][:_MAX_ADDED]))
    if spec.kind != "char":
        return HARD_TEXTS
    known = set(map(chr, json.loads(spec.content)))
    return tuple("".join(char for char in text if char in known) for text in HARD_TEXTS)


def check_hard(spec: TokenizerSpec, reference: Reference, engine: Engine) -> None:
    """Raise `ParityError` at the first hard text on which they differ."""
    texts = hard_texts(spec)
    compare(spec, reference, texts, engine.encode(text_array(texts)))


def compare(spec: TokenizerSpec, reference: Reference, texts: Sequence[str], encoded: Encoded | Trial) -> None:
    """Raise `ParityError` at the first text whose ids are not those of the reference."""
    name, encode_here = reference
    ends = itertools.accumulate(map(int, encoded.lengths))
    for text, length, end in zip(texts, encoded.lengths, ends, strict=True):
        ours, theirs = encoded.ids[end - int(length) : end], np.array(encode_here(text), np.uint32)
        if not np.array_equal(ours, theirs):
            raise _disagreement(spec, name, text, ours.tolist(), theirs.tolist())


def try_engine(engine: Engine, texts: Sequence[str]) -> Trial:
    """Encode `texts`, and once more to see how quickly: the first pass fills a cache that a long run has full."""
    from tokenmill.tokenizers.engine import culprit

    if not texts:
        return Trial(packed_ids="", lengths=(), seconds=0.0)
    array = text_array(texts)
    try:
        encoded = engine.encode(array)
    except TokenizerError as error:
        place = culprit(engine, array)
        said = error.message if place is None else f"{error.message}; it was asked to {_a(texts[place])}"
        raise TokenizerError(said, hint=error.hint) from None
    begin = time.perf_counter()
    engine.encode(array)
    seconds = time.perf_counter() - begin
    packed = binascii.b2a_base64(encoded.ids.astype("<u4").tobytes(), newline=False)
    return Trial(packed_ids=packed.decode(), lengths=tuple(encoded.lengths.tolist()), seconds=seconds)


def check_parity(
    spec: TokenizerSpec, reference: Reference, texts: Sequence[str], encode: Callable[[Sequence[str]], Trial]
) -> tuple[Parity, Trial]:
    """Have `encode` make a trial of `texts`, and compare it with the ids of the reference.

    Raises `ParityError` at the first document on which they differ.
    """
    name, encode_here = reference
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenmill-reference") as beside:
        expected = beside.map(lambda text: np.array(encode_here(text), np.uint32), texts)
        trial = encode(texts)
        ids, start = trial.ids, 0
        for text, length, theirs in zip(texts, trial.lengths, expected, strict=True):
            ours = ids[start : start + length]
            start += length
            if not np.array_equal(ours, theirs):
                raise _disagreement(spec, name, text, ours.tolist(), theirs.tolist())
    size = sum(len(text.encode()) for text in texts)
    return Parity(reference=name, documents=len(texts), bytes=size, tokens=len(ids)), trial


_WAY_OUT = {
    "hf": "; `tokenizer='tokenizers:NAME'` encodes with the reference meanwhile",
    "tiktoken": "; `tokenizer='tiktoken:NAME'` encodes with the reference meanwhile",
}


def _disagreement(spec: TokenizerSpec, name: str, text: str, ours: list[int], theirs: list[int]) -> ParityError:
    from tokenmill.tokenizers.engine import open_engine

    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    before = open_engine(spec).decode(np.array(theirs[:at], np.uint32))
    return ParityError(
        f"{spec.engine_version} and {name} disagree on a document at token {at}: "
        f"{ours[at : at + 8]} against {theirs[at : at + 8]}, after {before[-60:]!r}; "
        f"the text there: {text[len(before) : len(before) + 200]!r}",
        hint=f"please report this text{_WAY_OUT.get(spec.kind, '')}",
    )


def open_reference(spec: TokenizerSpec) -> Reference:
    """The name and the encode function of another implementation of the same tokenizer."""
    if spec.kind == "byte":
        return "python", lambda text: list(text.encode())
    if spec.kind == "char":
        ids = {chr(point): i for i, point in enumerate(json.loads(spec.content))}
        return "python", lambda text: [ids[char] for char in text]
    from tokenmill.tokenizers.engine import native_errors, open_tiktoken, open_tokenizers

    if spec.kind == "sentencepiece":
        from tokenmill.tokenizers.sentencepiece import open_model

        model = open_model(spec.content, name=spec.name)

        def by_sentencepiece(text: str) -> list[int]:
            with native_errors("sentencepiece", _a(text)):
                return list(model.encode(text))

        return "sentencepiece", by_sentencepiece
    if spec.kind == "tiktoken":
        encoding = open_tiktoken(spec)

        def by_tiktoken(text: str) -> list[int]:
            with native_errors("tiktoken", _a(text)):
                return list(encoding.encode_ordinary(text))

        return "tiktoken", by_tiktoken
    encoder = open_tokenizers(spec)

    def by_tokenizers(text: str) -> list[int]:
        with native_errors("tokenizers", _a(text)):
            return list(encoder.encode(text, add_special_tokens=False).ids)

    return "tokenizers", by_tokenizers


def _a(text: str) -> str:
    return f"encode the text {text[:_SHOWN_CHARS]!r}{'...' if len(text) > _SHOWN_CHARS else ''}"
