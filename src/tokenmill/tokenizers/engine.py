"""The engines that encode Arrow text: gigatoken, tokenizers, tiktoken, bytes and characters.

gigatoken gets the Arrow buffers without a copy, one call per batch, on the calling thread. Special tokens are removed
from the tokenizer first, so that their names inside a text are encoded as text. The other engines are each tokenizer's
own implementation. They also encode the few texts with characters that gigatoken is known to classify differently (see
`unicode_versions`). A failure of native code becomes a `TokenizerError` that names the library and the document.

gigatoken takes and returns ragged arrays of awkward, which takes longer to load than gigatoken, numpy and Arrow
together. But it calls only five functions of awkward, on buffers that exist already. So in a process that runs only
tokenmill, a module of these five takes the place of awkward. If gigatoken asks for any other function, it gets the real
awkward.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from gigatoken import Tokenizer as _Gigatoken
from gigatoken import gigatoken_rs as _rs

from tokenmill.errors import TokenizerError, TokenmillError, is_failure, is_panic
from tokenmill.resources import MEMORY_BUDGET, _trim, resident_bytes
from tokenmill.sources.base import text_array, text_buffers
from tokenmill.storage.output import temporary_file
from tokenmill.tokenizers.base import Encoded, Engine, Ids, Memory
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.tokenizers.unicode_versions import classed_differently

_RELOAD_ABOVE = MEMORY_BUDGET * 5 // 7
_CHECK = "check the tokenizer's file, or use another form of it, such as a tokenizer.json"
# What libraries raise of their own. Whatever else is raised while they work is not about the text.
_ERRORS = (Exception, KeyError, RuntimeError, ValueError)


class EngineHolder:
    """The worker's tokenizer. Its cache grows with the text; near the budget it is loaded again."""

    def __init__(self, spec: TokenizerSpec, engine: Engine) -> None:
        self._spec = spec
        self._engine = engine
        self._before = resident_bytes()

    def __call__(self) -> Engine:
        # A program that holds much memory of its own would gain nothing by a reload.
        if resident_bytes() > max(_RELOAD_ABOVE, self._before + _RELOAD_ABOVE // 4):
            del self._engine
            gc.collect()
            _trim()
            self._engine = open_engine(self._spec)
            self._before = resident_bytes()
        return self._engine


_FIRST_NOT_ASCII = 0x80
# Schemes that gigatoken has under another name: those of models that cut text by the same pattern.
_SAME_SCHEME = {"llama3": "olmo3", "tekken": "nemotron"}


def open_engine(spec: TokenizerSpec) -> Engine:
    """An engine for a tokenizer; a tokenizer that it cannot encode is a `TokenizerError`."""
    if spec.kind == "byte":
        return _ByteEngine()
    if spec.kind == "char":
        return _CharEngine(spec)
    if spec.kind == "sentencepiece":
        from tokenmill.tokenizers.sentencepiece import SentencePieceEngine

        return SentencePieceEngine(spec.content, name=spec.name)
    engine = _open(spec)
    _check_specials(engine, spec)
    return engine


def _open(spec: TokenizerSpec) -> Engine:
    if spec.engine != "gigatoken":
        return _open_own(spec)
    return _GuardedEngine(_GigatokenEngine(spec), spec)


def _open_own(spec: TokenizerSpec) -> Engine:
    return _TokenizersEngine(spec) if spec.kind == "hf" else _TiktokenEngine(spec)


def _check_specials(engine: Engine, spec: TokenizerSpec) -> None:
    """No text may give a special token's id, least of all its own name."""
    for name, number in specials(spec).items():
        if number in engine.encode(text_array([name, f"a{name} {name}"])).ids:
            raise TokenizerError(f"{spec.engine} encodes the text {name!r} as the special token {number}")


@contextlib.contextmanager
def _without_panic_reports() -> Iterator[None]:
    """Drop what Rust prints about a panic, which it does before the error can be caught. Anything else is printed."""
    try:
        own, held = os.dup(2), os.memfd_create("standard-error")
    except (OSError, AttributeError):  # it is closed, or this is not Linux
        yield
        return
    try:
        os.dup2(held, 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
        os.write(own, os.pread(held, os.fstat(held).st_size, 0))
    finally:
        os.close(own)
        os.close(held)


class _GigatokenEngine:
    def __init__(self, spec: TokenizerSpec) -> None:
        try:
            self._encoder = self._load(spec)
        except BaseException as error:
            if not is_failure(error) or isinstance(error, TokenmillError):
                raise
            reason = str(error).partition("\n")[0]
            raise TokenizerError(f"gigatoken cannot encode {spec.name}: {reason}", hint=_CHECK) from None

    def _load(self, spec: TokenizerSpec) -> Any:
        if spec.kind == "tiktoken":
            with temporary_file(spec.content, suffix=".tiktoken") as path, _without_panic_reports():
                return _rs.BPETokenizer.from_tiktoken(path, _SAME_SCHEME.get(spec.scheme, spec.scheme), None)
        return _Gigatoken.from_json(without_specials(spec)).backend

    def encode(self, text: pa.Array) -> Encoded:
        with native_errors("gigatoken"):
            return encode_ragged(self._encoder, *text_buffers(text))

    def memory(self, text: pa.Array) -> Memory:
        return Memory(4, 24)

    def decode(self, ids: Ids) -> str:
        with native_errors("gigatoken", "decode ids"):
            return bytes(self._encoder.decode(ids.astype(np.uint32))).decode(errors="replace")


class _TokenizersEngine:
    """Hugging Face's own encoder, for what gigatoken does not know."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._encoder = open_tokenizers(spec)

    def encode(self, text: pa.Array) -> Encoded:
        with native_errors("tokenizers"):
            found = self._encoder.encode_batch_fast(text.to_pylist(), add_special_tokens=False)
        rows = [np.array(row.ids, np.uint32) for row in found]
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        return Encoded(np.concatenate(rows) if rows else np.zeros(0, np.uint32), lengths)

    def memory(self, text: pa.Array) -> Memory:
        return Memory(40)

    def decode(self, ids: Ids) -> str:
        with native_errors("tokenizers", "decode ids"):
            return str(self._encoder.decode(ids.tolist(), skip_special_tokens=True))


class _TiktokenEngine:
    """OpenAI's own encoder of rank files, for those that gigatoken encodes in another way."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._encoder = open_tiktoken(spec)

    def encode(self, text: pa.Array) -> Encoded:
        with native_errors("tiktoken"):
            rows = [self._encoder.encode_to_numpy(document, disallowed_special=()) for document in text.to_pylist()]
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        return Encoded(np.concatenate(rows) if rows else np.zeros(0, np.uint32), lengths)

    def memory(self, text: pa.Array) -> Memory:
        return Memory(40)

    def decode(self, ids: Ids) -> str:
        with native_errors("tiktoken", "decode ids"):
            return str(self._encoder.decode(ids.tolist()))


class _GuardedEngine:
    """gigatoken, but for texts with characters that it classes in another way: those are for the reference."""

    def __init__(self, engine: Engine, spec: TokenizerSpec) -> None:
        self._engine = engine
        # Many texts have no such character, so both are made when they are needed.
        self._characters = functools.cache(lambda: classed_differently(spec))
        self._own = functools.cache(lambda: _open_own(spec))

    def _rows(self, text: pa.Array) -> npt.NDArray[np.int64]:
        """The texts that are for the reference."""
        is_ascii = text_buffers(text)[1].max(initial=0) < _FIRST_NOT_ASCII
        return np.zeros(0, np.int64) if is_ascii else self._characters().rows(text)

    def encode(self, text: pa.Array) -> Encoded:
        rows = self._rows(text)
        found = self._engine.encode(text)
        if not len(rows):
            return found
        begins = np.concatenate(([0], np.cumsum(found.lengths)))
        lengths, parts, at = found.lengths.copy(), [], 0
        for row in rows.tolist():
            own = self._own().encode(text[row : row + 1])
            lengths[row] = len(own.ids)
            parts += [found.ids[at : begins[row]], own.ids]
            at = begins[row + 1]
        return Encoded(np.concatenate([*parts, found.ids[at:]]), lengths)

    def memory(self, text: pa.Array) -> Memory:
        engine = self._engine.memory(text)
        if not len(self._rows(text)):
            return engine
        own = self._own().memory(text)
        return Memory(max(engine.times_text, own.times_text), max(engine.times_run, own.times_run))

    def decode(self, ids: Ids) -> str:
        return self._engine.decode(ids)


class _ByteEngine:
    def encode(self, text: pa.Array) -> Encoded:
        offsets, data = text_buffers(text)
        return Encoded(data, np.diff(offsets))

    def memory(self, text: pa.Array) -> Memory:
        return Memory(4)

    def decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


_CONTINUES = 0x80  # the first two bits of a byte that continues a character


class _CharEngine:
    def __init__(self, spec: TokenizerSpec) -> None:
        self._characters = np.array(json.loads(spec.content), np.uint32)
        self._ids = np.full(0x110000, 0xFFFFFFFF, np.uint32)
        self._ids[self._characters] = np.arange(len(self._characters), dtype=np.uint32)

    def encode(self, text: pa.Array) -> Encoded:
        offsets, data = text_buffers(text)
        points = np.frombuffer(data.tobytes().decode().encode("utf-32-le"), np.uint32)
        # A character begins at every byte that does not continue one.
        begun = np.concatenate(([0], np.cumsum((data & 0xC0) != _CONTINUES)))
        return Encoded(self._ids[points], np.diff(begun[offsets]))

    def memory(self, text: pa.Array) -> Memory:
        return Memory(24)

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


def without_specials(spec: TokenizerSpec, *, keep: bool = False) -> str:
    """The tokenizer.json with no special token that a text could name.

    `tokenizers` numbers added tokens anew, by their order, so it has to `keep` the special ones, all marked as such.

    Byte-pair models reach their tokens by merges, and none leads to a special one. Other models, and those that
    ignore merges for whole words, look texts up in their vocabulary: there the names give way to ones no text holds.
    """
    parsed = json.loads(spec.content)
    added = parsed.get("added_tokens") or []
    special = _special_tokens(parsed, spec)
    model = parsed["model"]
    hidden: dict[str, str] = {}
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        hidden = {token["content"]: f"\ufdd0{token['content']}\ufdd1" for token in special}
    parsed["added_tokens"] = [
        {**token, "special": True, "content": hidden.get(token["content"], token["content"])}
        if token in special
        else token
        for token in added
        if keep or token not in special
    ]
    if hidden:
        vocab = model["vocab"]
        if model.get("unk_token") in hidden:
            model["unk_token"] = hidden[model["unk_token"]]
        if isinstance(vocab, dict):
            model["vocab"] = {hidden.get(token, token): number for token, number in vocab.items()}
        else:
            model["vocab"] = [[hidden.get(token, token), score] for token, score in vocab]
    return json.dumps(parsed)


def open_tiktoken(spec: TokenizerSpec) -> Any:
    """The `tiktoken` object of a rank file."""
    import tiktoken

    from tokenmill.tokenizers.parity import PATTERNS

    words = spec.content.split()  # a token and its rank, line after line
    with native_errors("tiktoken"):
        return tiktoken.Encoding(
            spec.name,
            pat_str=PATTERNS[spec.scheme],
            mergeable_ranks=dict(zip(map(binascii.a2b_base64, words[::2]), map(int, words[1::2]), strict=True)),
            special_tokens={},
        )


def open_tokenizers(spec: TokenizerSpec) -> Any:
    """The `tokenizers` object of a tokenizer.json, with special strings as plain text."""
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_str(without_specials(spec, keep=True))
    except BaseException as error:
        if not is_failure(error):
            raise
        raise TokenizerError(f"tokenizers cannot read {spec.name}: {error}", hint="check the file") from None
    found.encode_special_tokens = True  # as text, that is
    found.no_padding()
    found.no_truncation()
    return found


@contextlib.contextmanager
def native_errors(library: str, what: str = "encode a text") -> Iterator[None]:
    """What native code dies of while it encodes or decodes, as a typed error."""
    try:
        yield
    except BaseException as error:
        if type(error) not in _ERRORS and not is_panic(error):
            raise
        reason = str(error).partition("\n")[0]
        raise TokenizerError(f"{library} cannot {what}: {reason}", hint=_CHECK) from None


def culprit(engine: Engine, text: pa.Array) -> int | None:
    """The first of some documents that an engine cannot encode; None if it can encode each, or nothing any more."""
    if not _encodes(engine, text_array(["a"])):
        return None
    return next((number for number in range(len(text)) if not _encodes(engine, text[number : number + 1])), None)


def _encodes(engine: Engine, text: pa.Array) -> bool:
    try:
        engine.encode(text)
    except TokenizerError:
        return False
    return True


_NAME = "awkward"
Offsets = npt.NDArray[np.int64]
Data = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Strings:
    """Texts end to end, and where each of them begins."""

    offsets: Offsets
    data: Data


def stand_in() -> None:
    """Do without awkward from here on, unless it is loaded. For processes that run no code but ours."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _STAND_IN


def encode_ragged(encoder: Any, offsets: Offsets, data: Data) -> Encoded:
    """What an encoder of gigatoken makes of texts, on the calling thread."""
    if sys.modules.get(_NAME) is _STAND_IN:
        try:
            found = encoder.encode_batch(_Strings(offsets, data), parallel=False)
        except (AttributeError, TypeError):
            found = None
        if isinstance(found, Encoded):
            return found
        del sys.modules[_NAME]  # this gigatoken wants more of it
    import awkward as ak

    strings = ak.contents.ListOffsetArray(
        ak.index.Index64(offsets),
        ak.contents.NumpyArray(data, parameters={"__array__": "char"}),
        parameters={"__array__": "string"},
    )
    layout = encoder.encode_batch(ak.Array(strings), parallel=False).layout
    ends = np.asarray(layout.offsets.data)
    return Encoded(np.asarray(layout.content.data)[ends[0] : ends[-1]], np.diff(ends))


def _make_stand_in() -> ModuleType:
    module: Any = ModuleType(_NAME, "What gigatoken asks of awkward, and no more.")
    module.Array = _Strings
    module.without_parameters = module.to_numpy = lambda array: array
    module.flatten = lambda strings: strings.data
    module.num = lambda strings: np.diff(strings.offsets)
    module.unflatten = Encoded
    return module  # type: ignore[no-any-return]  # Any, to be given functions


_STAND_IN = _make_stand_in()
