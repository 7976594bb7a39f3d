"""SentencePiece models, read and encoded by the library `sentencepiece`, which alone defines their ids.

Conversions to other formats differ from it on white space, normalisation and ties, so there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.base import Encoded, Ids, Memory
from tokenmill.tokenizers.engine import native_errors


def open_model(content: bytes, *, name: str) -> Any:
    """The processor of a .model file."""
    import sentencepiece

    with _reading(name):
        found = sentencepiece.SentencePieceProcessor(model_proto=content)
        if not found.vocab_size():
            raise ValueError("it has no pieces")
    return found


def list_pieces(model: Any, *, name: str) -> list[str]:
    """The pieces of a model, by their ids."""
    with _reading(name):
        return [model.id_to_piece(number) for number in range(model.vocab_size())]


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many kinds, by version
        reason = str(error).partition("\n")[0]
        raise TokenizerError(
            f"{name} cannot be read as a SentencePiece model: {reason}", hint="check the file, or use a tokenizer.json"
        ) from None


class SentencePieceEngine:
    def __init__(self, content: bytes, *, name: str) -> None:
        self._model = open_model(content, name=name)
        # Version 0.2.0 knows lists of ids alone.
        self._encode = getattr(self._model, "encode_as_numpy", self._model.encode_as_ids)

    def encode(self, text: pa.Array) -> Encoded:
        with native_errors("sentencepiece"):
            rows = [np.asarray(self._encode(document), np.uint32) for document in text.to_pylist()]
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        return Encoded(np.concatenate(rows) if rows else np.zeros(0, np.uint32), lengths)

    def memory(self, text: pa.Array) -> Memory:
        return Memory(40)

    def decode(self, ids: Ids) -> str:
        with native_errors("sentencepiece", "decode ids"):
            return str(self._model.decode(ids.tolist()))
