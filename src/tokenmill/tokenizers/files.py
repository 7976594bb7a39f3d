"""Recognises the type of a tokenizer's file by its content, because names and suffixes are not reliable.

{"model": ...}                    tokenizer.json
{"config": ..., "vocab": [...]}   tekken.json of Mistral: ranks and a pattern
base64 rank                       line after line: tiktoken's ranks, whatever the suffix
protobuf with pieces              a SentencePiece model
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass

import msgspec

from tokenmill.errors import TokenizerError

_LINE = ("token", "rank")
_MAX_RANK_DIGITS = 9
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]*={0,2}[ \t]+[0-9]{1,9}")
_LFS = b"version https://git-lfs"
_TEKKEN_EOT = "</s>"
_TEKKEN_SPECIALS = {"<unk>": 0, "<s>": 1, _TEKKEN_EOT: 2}
_MAX_IDS = 10**_MAX_RANK_DIGITS
_USE_JSON = "use the tokenizer.json of the same model"


def recognise(content: bytes, *, name: str) -> str:
    """`json`, `tekken`, `ranks` or `sentencepiece`; anything else is an error that says what it is."""
    if content.startswith(_LFS):
        raise TokenizerError(f"{name} is a Git LFS pointer and not the file itself", hint="fetch it: git lfs pull")
    begin = content.lstrip()[:1]
    if begin in (b"{", b"["):
        return _kind_of_json(content, name)
    first = next((line for line in content[:4096].splitlines() if line.strip()), b"")
    if _RANK_LINE.fullmatch(first.strip()):
        return "ranks"
    if content[:1] == b"\n":  # the first field of the message: a piece
        return "sentencepiece"
    if not content.strip():
        raise TokenizerError(f"{name} is empty", hint="check the file")
    raise TokenizerError(
        f"{name} is neither a tokenizer.json, a tekken.json, a rank file nor a SentencePiece model",
        hint="check the file, or " + _USE_JSON,
    )


def _kind_of_json(content: bytes, name: str) -> str:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return "json"  # its reader says where it is broken
    if not isinstance(parsed, dict) or "model" in parsed:
        return "json"
    if isinstance(parsed.get("config"), dict) and isinstance(parsed.get("vocab"), list):
        return "tekken"
    if parsed and all(type(value) is int for value in parsed.values()):
        raise TokenizerError(f"{name} is a vocabulary without its merges, not a tokenizer.json", hint=_USE_JSON)
    if "tokenizer_class" in parsed or "added_tokens_decoder" in parsed:
        raise TokenizerError(f"{name} is a tokenizer's configuration, not a tokenizer.json", hint=_USE_JSON)
    return "json"


def parse_ranks(content: bytes, *, name: str) -> dict[bytes, int]:
    """Tokens and their ranks. A token without a byte, as Whisper's files have one, is left out: no text gives it."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            if len(words) != len(_LINE) or not words[1].isdigit() or len(words[1]) > _MAX_RANK_DIGITS:
                raise ValueError("it is not a token and its rank")
            token = b"" if words[0] == b"=" else base64.b64decode(words[0], validate=True)
            if token in ranks:
                raise ValueError("the token is there a second time")
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"{name}: line {number} of the rank file: {error}", hint="check the file") from None
        if token:
            ranks[token] = int(words[1])
    if not ranks:
        raise TokenizerError(f"{name} has no ranks", hint="check the file")
    if len(set(ranks.values())) < len(ranks):
        raise TokenizerError(f"{name}: two tokens have the same rank", hint="check the file")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(
            f"{name}: byte {missing[0]} has no rank, so that not every text can be encoded", hint="check the file"
        )
    return ranks


def format_ranks(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tekken:
    """A tekken.json: ids of its ranks begin behind those of its special tokens."""

    pattern: str
    ranks: dict[bytes, int]
    vocab_size: int
    specials: dict[str, int]

    def eot_id(self, token: str | None) -> int | None:
        return self.specials.get(_TEKKEN_EOT if token is None else token)


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_num_special_tokens: int
    default_vocab_size: int


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _TekkenSpecial(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenFile(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecial] | None = None


def parse_tekken(content: bytes, *, name: str) -> Tekken:
    """The ranks of a tekken.json that are in use, as ids."""
    try:
        parsed = msgspec.json.decode(content, type=_TekkenFile)
    except (ValueError, RecursionError) as error:
        raise _broken_tekken(name, str(error).replace("`", "")) from None
    config = parsed.config
    num_specials, vocab_size = config.default_num_special_tokens, config.default_vocab_size
    if not 0 <= num_specials < vocab_size <= _MAX_IDS:
        raise _broken_tekken(name, f"{num_specials} of {vocab_size} tokens are special")
    used = parsed.vocab[: vocab_size - num_specials]
    ranks = {row.token_bytes: row.rank + num_specials for row in used}
    if len(ranks) < len(used) or b"" in ranks:
        raise _broken_tekken(name, "a token is empty, or is there a second time")
    if not ranks or min(ranks.values()) < num_specials or max(ranks.values()) >= _MAX_IDS:
        raise _broken_tekken(name, "a rank is out of range" if ranks else "it has no tokens")
    listed = {row.token_str: row.rank for row in parsed.special_tokens or ()}
    if listed and not 0 <= min(listed.values()) <= max(listed.values()) < num_specials:
        raise _broken_tekken(name, "the rank of a special token is out of range")
    return Tekken(pattern=config.pattern, ranks=ranks, vocab_size=vocab_size, specials=listed or _TEKKEN_SPECIALS)


def _broken_tekken(name: str, what: str) -> TokenizerError:
    return TokenizerError(f"{name} is not a complete tekken.json: {what}", hint="check the file, or " + _USE_JSON)
