"""SentencePiece .model files, as tokenizer.json.

Byte-pair models with byte fallback are converted by gigatoken, which encodes them itself.
Unigram models are converted here and encoded by `tokenizers`: pieces with their scores, the
model's own normalisation map, and spaces as "▁". Those with byte fallback, with pieces of the
user's own, or that keep extra spaces, would not give the same ids there, and are refused.

The file is a protobuf message; of its fields we need the pieces (1: text 1, score 2, type 3),
the trainer's model type (2: 3) and the normaliser (3: map 2, dummy prefix 3, extra spaces 4).
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

from tokenmill.errors import TokenizerError

UNIGRAM, BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def to_tokenizer_json(data: bytes, *, name: str) -> bytes:
    """The tokenizer.json of a .model file."""
    try:
        trainer = dict(_fields(_last(data, 2)))
        if trainer.get(3, UNIGRAM) == BPE:
            from tokenmill.tokenizer.engine import convert_sentencepiece_bpe

            return convert_sentencepiece_bpe(data)
        if trainer.get(3, UNIGRAM) != UNIGRAM:
            raise ValueError(f"model type {trainer.get(3)!r}; only unigram and BPE models are known")
        return _unigram(data)
    except (ValueError, KeyError, IndexError, struct.error, AssertionError) as error:
        raise TokenizerError(
            f"{name} cannot be read as a SentencePiece model: {error}", hint="convert it to a tokenizer.json"
        ) from None


def _unigram(data: bytes) -> bytes:
    pieces = [_piece(value) for field, value in _fields(data) if field == 1 and isinstance(value, bytes)]
    if not pieces:
        raise ValueError("it has no pieces")
    normaliser = dict(_fields(_last(data, 3)))
    kinds = {kind for _, _, kind in pieces}
    if kinds & {_BYTE, _USER_DEFINED} or not normaliser.get(4, 1):
        raise ValueError("a unigram model with byte fallback, user-defined pieces or extra spaces kept")
    steps: list[dict[str, Any]] = []
    if charsmap := normaliser.get(2):
        assert isinstance(charsmap, bytes)
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    steps.append({"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    scheme = "always" if normaliser.get(3, 1) else "never"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    unknown = next((i for i, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN), None)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": i,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for i, (text, _, kind) in enumerate(pieces)
                if kind in (_CONTROL, _UNKNOWN)
            ],
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": metaspace,
            "post_processor": None,
            "decoder": metaspace,
            "model": {
                "type": "Unigram",
                "unk_id": unknown,
                "vocab": [[text, score] for text, score, _ in pieces],
                "byte_fallback": False,
            },
        },
        ensure_ascii=False,
    ).encode()


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, _NORMAL)
    assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
    return text.decode(), struct.unpack("<f", score)[0], kind


def _last(message: bytes, wanted: int) -> bytes:
    found = b""
    for field, value in _fields(message):
        if field == wanted and isinstance(value, bytes):
            found = value
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            number, at = _varint(message, at)
            yield field, number
            continue
        size, at = {1: (8, at), 5: (4, at)}.get(wire) or (_varint(message, at) if wire == 2 else (-1, at))
        if size < 0 or at + size > len(message):
            raise ValueError(f"not a protobuf message at byte {at}")
        yield field, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError(f"not a protobuf message at byte {at}")
