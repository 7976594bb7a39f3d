"""The parity check: before the work, the engine and its reference encode the user's own documents.

The reference is another implementation of the same tokenizer: tiktoken for rank files,
`tokenizers` for tokenizer.json, Python's own encoder for bytes and characters. It works here, while
the engine makes its trial, as a rule in another process; so the engine is loaded here only if it is needed.
"""

from __future__ import annotations

import binascii
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from tokenmill.arrow_text import text_array
from tokenmill.errors import ParityError, TokenizerError
from tokenmill.tokenizer.encoded import Engine, Ids
from tokenmill.tokenizer.spec import TokenizerSpec

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# How each scheme cuts text into words: the patterns are part of the tokenizers' definition.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


Reference = tuple[str, Callable[[str], list[int]]]
# References are slow; tiktoken and tokenizers let others run meanwhile.
_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was compared, and with whom."""

    reference: str
    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What an engine makes of some texts: the ids of all, in base64, how many each has, and the seconds it takes."""

    packed_ids: str
    lengths: tuple[int, ...]
    seconds: float

    @property
    def ids(self) -> Ids:
        return np.frombuffer(binascii.a2b_base64(self.packed_ids), "<u4")


def choose_engine(spec: TokenizerSpec) -> tuple[TokenizerSpec, Engine, str]:
    """The tokenizer with an engine that can encode it, and a sentence about it if it is the slow one."""
    from tokenmill.tokenizer.engine import open_engine

    try:
        return spec, open_engine(spec), ""
    except TokenizerError as error:
        if spec.engine != "gigatoken":
            raise
        if spec.kind != "hf":
            raise TokenizerError(error.message, hint="use a tokenizer.json instead") from None
        fallback = replace(spec, engine="tokenizers")
        note = f"{error.message}; encoding with tokenizers, which is many times slower"
        return fallback, open_engine(fallback), note


def try_engine(engine: Engine, texts: Sequence[str]) -> Trial:
    """Encode `texts`, and once more to see how quickly: the first pass fills a cache that a long run has full."""
    if not texts:
        return Trial(packed_ids="", lengths=(), seconds=0.0)
    array = text_array(texts)
    encoded = engine.encode(array)
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


def _disagreement(spec: TokenizerSpec, name: str, text: str, ours: list[int], theirs: list[int]) -> ParityError:
    from tokenmill.tokenizer.engine import open_engine

    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    before = open_engine(spec).decode(np.array(theirs[:at], np.uint32))
    return ParityError(
        f"{spec.engine_version} and {name} disagree on a document at token {at}: "
        f"{ours[at : at + 8]} against {theirs[at : at + 8]}, after {before[-60:]!r}; "
        f"the text there: {text[len(before) : len(before) + 200]!r}",
        hint="please report this text; --tokenizer tokenizers:NAME encodes with the reference meanwhile",
    )


def open_reference(spec: TokenizerSpec) -> Reference:
    """The name and the encode function of another implementation of the same tokenizer."""
    if spec.kind == "byte":
        return "python", lambda text: list(text.encode())
    if spec.kind == "char":
        ids = {chr(point): i for i, point in enumerate(json.loads(spec.content))}
        return "python", lambda text: [ids[char] for char in text]
    if spec.kind == "tiktoken":
        import tiktoken

        words = spec.content.split()  # a token and its rank, line after line
        encoding = tiktoken.Encoding(
            spec.name,
            pat_str=PATTERNS[spec.scheme],
            mergeable_ranks=dict(zip(map(binascii.a2b_base64, words[::2]), map(int, words[1::2]), strict=True)),
            special_tokens={},
        )
        return "tiktoken", encoding.encode_ordinary
    from tokenmill.tokenizer.engine import open_tokenizers

    encoder = open_tokenizers(spec)
    return "tokenizers", lambda text: list(encoder.encode(text, add_special_tokens=False).ids)
