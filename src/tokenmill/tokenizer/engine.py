"""Encoding: Arrow text in, ids and the number of ids of each document out.

gigatoken gets the Arrow buffers as they are, one call a batch, on the calling thread. Special
tokens are taken out of the tokenizer first, so that their strings inside a text are text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from gigatoken import Tokenizer as _Gigatoken
from gigatoken import gigatoken_rs as _rs

from tokenmill.arrow_text import text_array, text_buffers
from tokenmill.errors import TokenizerError
from tokenmill.storage.temporary import temporary_file
from tokenmill.tokenizer.encoded import Encoded, Engine, Ids
from tokenmill.tokenizer.ragged import encode_ragged
from tokenmill.tokenizer.spec import TokenizerSpec


def open_engine(spec: TokenizerSpec) -> Engine:
    """An engine for a tokenizer; a tokenizer that it cannot encode is a `TokenizerError`."""
    if spec.kind == "byte":
        return _ByteEngine()
    if spec.kind == "char":
        return _CharEngine(spec)
    engine = _TokenizersEngine(spec) if spec.engine == "tokenizers" else _GigatokenEngine(spec)
    _check_specials(engine, spec)
    return engine


def _check_specials(engine: Engine, spec: TokenizerSpec) -> None:
    """No text may give a special token's id, least of all its own name."""
    for name, number in specials(spec).items():
        if number in engine.encode(text_array([name, f"a{name} {name}"])).ids:
            raise TokenizerError(f"{spec.engine} encodes the text {name!r} as the special token {number}")


def convert_sentencepiece_bpe(data: bytes) -> bytes:
    """gigatoken's own reading of a byte-pair SentencePiece model."""
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    converted: str = sentencepiece_to_tokenizer_json(data)
    return converted.encode()


class _GigatokenEngine:
    times_text, times_run = 4, 24

    def __init__(self, spec: TokenizerSpec) -> None:
        try:
            self._encoder = self._load(spec)
        except BaseException as error:
            if not _is_native(error):
                raise
            reason = str(error).partition("\n")[0]
            raise TokenizerError(f"gigatoken cannot encode {spec.name}: {reason}") from None

    def _load(self, spec: TokenizerSpec) -> Any:
        if spec.kind == "tiktoken":
            with temporary_file(spec.content, suffix=".tiktoken") as path:
                return _rs.BPETokenizer.from_tiktoken(path, spec.scheme, None)
        return _Gigatoken.from_json(without_specials(spec)).backend

    def encode(self, text: pa.Array) -> Encoded:
        return encode_ragged(self._encoder, *text_buffers(text))

    def decode(self, ids: Ids) -> str:
        return bytes(self._encoder.decode(ids.astype(np.uint32))).decode(errors="replace")


class _TokenizersEngine:
    """Hugging Face's own encoder, for the models that gigatoken does not know."""

    times_text, times_run = 40, 0

    def __init__(self, spec: TokenizerSpec) -> None:
        self._encoder = open_tokenizers(spec)

    def encode(self, text: pa.Array) -> Encoded:
        found = self._encoder.encode_batch_fast(text.to_pylist(), add_special_tokens=False)
        rows = [np.array(row.ids, np.uint32) for row in found]
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        return Encoded(np.concatenate(rows) if rows else np.zeros(0, np.uint32), lengths)

    def decode(self, ids: Ids) -> str:
        return str(self._encoder.decode(ids.tolist(), skip_special_tokens=True))


class _ByteEngine:
    times_text, times_run = 4, 0

    def encode(self, text: pa.Array) -> Encoded:
        offsets, data = text_buffers(text)
        return Encoded(data, np.diff(offsets))

    def decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class _CharEngine:
    times_text, times_run = 24, 0

    def __init__(self, spec: TokenizerSpec) -> None:
        self._characters = np.array(json.loads(spec.content), np.uint32)
        self._ids = np.full(0x110000, 0xFFFFFFFF, np.uint32)
        self._ids[self._characters] = np.arange(len(self._characters), dtype=np.uint32)

    def encode(self, text: pa.Array) -> Encoded:
        offsets, data = text_buffers(text)
        points = np.frombuffer(data.tobytes().decode().encode("utf-32-le"), np.uint32)
        # A character begins at every byte that does not continue one.
        begun = np.concatenate(([0], np.cumsum((data & 0xC0) != 0x80)))
        return Encoded(self._ids[points], np.diff(begun[offsets]))

    def decode(self, ids: Ids) -> str:
        return self._characters[ids].tobytes().decode("utf-32-le")


def specials(spec: TokenizerSpec) -> dict[str, int]:
    """Names and ids of the special tokens of a tokenizer.json; other tokenizers bring none along.

    The unknown token is not among them: it is what a text with unknown characters rightly gives.
    """
    if spec.kind != "hf":
        return {}
    parsed = json.loads(spec.content)
    found = {token["content"]: token["id"] for token in _special_tokens(parsed, spec)}
    unknown = parsed["model"].get("unk_token"), parsed["model"].get("unk_id")
    return {name: number for name, number in found.items() if name != unknown[0] and number != unknown[1]}


def _special_tokens(parsed: dict[str, Any], spec: TokenizerSpec) -> list[dict[str, Any]]:
    """Added tokens that no text may give: the special ones, and whatever ends a text."""
    added = parsed.get("added_tokens") or []
    return [token for token in added if token.get("special") or token["id"] == spec.eot_id]


def without_specials(spec: TokenizerSpec) -> str:
    """The tokenizer.json with no special token that a text could name.

    Byte-pair models reach their tokens by merges, and none leads to a special one. Other models look
    texts up in their vocabulary, so there the names give way to ones that no text holds.
    """
    parsed = json.loads(spec.content)
    added = parsed.get("added_tokens") or []
    special = _special_tokens(parsed, spec)
    parsed["added_tokens"] = [token for token in added if token not in special]
    model = parsed["model"]
    if model.get("type") != "BPE":
        vocab = model["vocab"]
        hidden = {token["content"]: f"\ufdd0{token['content']}\ufdd1" for token in special}
        if model.get("unk_token") in hidden:
            model["unk_token"] = hidden[model["unk_token"]]
        if isinstance(vocab, dict):
            model["vocab"] = {hidden.get(token, token): number for token, number in vocab.items()}
        else:
            model["vocab"] = [[hidden.get(token, token), score] for token, score in vocab]
    return json.dumps(parsed)


def _is_native(error: BaseException) -> bool:
    """Whether native code did not get along with a file. Rust's panics are no `Exception`, and have no public name."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def open_tokenizers(spec: TokenizerSpec) -> Any:
    """The `tokenizers` object of a tokenizer.json, with special strings as plain text."""
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_str(without_specials(spec))
    except BaseException as error:
        if not _is_native(error):
            raise
        raise TokenizerError(f"tokenizers cannot read {spec.name}: {error}", hint="check the file") from None
    found.no_padding()
    found.no_truncation()
    return found
