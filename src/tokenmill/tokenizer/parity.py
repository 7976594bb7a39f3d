"""The parity check: before the work, the engine and its reference encode the user's own documents.

The reference is another implementation of the same tokenizer: tiktoken for rank files,
`tokenizers` for tokenizer.json, Python's own encoder for bytes and characters.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenmill.errors import ParityError, TokenizerError
from tokenmill.tokenizer.encoded import Engine, text_array
from tokenmill.tokenizer.engine import open_engine, open_tokenizers
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was compared, and with whom."""

    reference: str
    documents: int
    bytes: int
    tokens: int


def choose_engine(spec: TokenizerSpec) -> tuple[TokenizerSpec, Engine, str]:
    """The tokenizer with an engine that can encode it, and a sentence about it if it is the slow one."""
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


def check_parity(spec: TokenizerSpec, engine: Engine, texts: Sequence[str]) -> Parity:
    """Encode `texts` with both; raise `ParityError` at the first document on which they differ."""
    name, reference = open_reference(spec)
    if not texts:
        return Parity(reference=name, documents=0, bytes=0, tokens=0)
    encoded = engine.encode(text_array(texts))
    start = 0
    for text, length in zip(texts, encoded.lengths.tolist(), strict=True):
        ours = encoded.ids[start : start + length].tolist()
        start += length
        theirs = reference(text)
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            before = engine.decode(np.array(ours[:at], np.uint32))
            raise ParityError(
                f"{spec.engine_version} and {name} disagree on a document at token {at}: "
                f"{ours[at : at + 8]} against {theirs[at : at + 8]}, after {before[-60:]!r}; "
                f"the text there: {text[len(before) : len(before) + 200]!r}",
                hint="please report this text; --tokenizer tokenizers:NAME encodes with the reference meanwhile",
            )
    return Parity(
        reference=name, documents=len(texts), bytes=sum(len(text.encode()) for text in texts), tokens=len(encoded.ids)
    )


def open_reference(spec: TokenizerSpec) -> tuple[str, Callable[[str], list[int]]]:
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
    encoder = open_tokenizers(spec)
    return "tokenizers", lambda text: list(encoder.encode(text, add_special_tokens=False).ids)
