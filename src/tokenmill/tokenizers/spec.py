"""Resolves the name of a tokenizer to its content, fingerprint and end-of-text id.

gpt2 | byte | char                        built in
DIR, tokenizer.json                       Hugging Face format
ranks.tiktoken, ranks.tiktoken:SCHEME     byte-pair ranks and the scheme that cuts text into words
x.model                                   SentencePiece, or ranks: the content tells
tekken.json                               Mistral's ranks
org/name, org/name@revision               from the hub
tokenizers:tokenizer.json                 encode with `tokenizers` instead of gigatoken
tiktoken:ranks.tiktoken                   encode with tiktoken instead of gigatoken
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill import records
from tokenmill.errors import TokenizerError, hint_for, is_failure
from tokenmill.tokenizers.files import format_ranks, parse_ranks, parse_tekken, recognise

_GPT2 = ("gpt2", 50256)
# Scheme and end-of-text of the rank files that OpenAI publishes, by what they hash to; they carry neither.
_KNOWN_RANKS = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _GPT2,  # r50k_base
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": ("gpt4", 100257),  # cl100k_base
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": ("o200k", 199999),  # o200k_base
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _GPT2,  # p50k_base, with a gap for it
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": ("llama3", 128001),  # Llama 3
}
_KNOWN_EOT = "<|endoftext|>"
_LLAMA3_EOT = "<|end_of_text|>"
SCHEMES = ("gpt2", "gpt4", "llama3", "o200k", "qwen2", "tekken")
EOT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  DeepSeek's, with wide bars
    "<|end▁of▁sentence|>",
    "[EOS]",
    "[SEP]",
)
# Sixty times the largest vocabulary in use.
MAX_VOCAB_SIZE = 1 << 24
MAX_CONTENT_BYTES = 1 << 28
# Engines that can be asked for by name, and for what.
_FORCED = (("tokenizers", "hf", "tokenizer.json"), ("tiktoken", "tiktoken", "rank file"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """All that it takes to encode, and to know that it is the same tokenizer again."""

    name: str
    kind: str
    scheme: str
    content: bytes = field(repr=False)
    vocab_size: int
    eot_id: int | None
    engine: str

    @property
    def fingerprint(self) -> str:
        return records.digest(
            [self.kind, self.scheme, hashlib.sha256(self.content).hexdigest(), self.vocab_size, self.eot_id]
        )

    @property
    def needs_texts(self) -> bool:
        """Whether its vocabulary is made of the texts, so that it has none before they are read: `char`."""
        return self.kind == "char"

    @property
    def file_name(self) -> str | None:
        """The name of the content in a dataset; None for built-in tokenizers."""
        if self.kind == "byte" or (self.kind == "tiktoken" and self.name == "gpt2"):
            return None
        names = {"hf": "tokenizer.json", "tiktoken": "tokenizer.tiktoken", "char": "characters.json"}
        return {**names, "sentencepiece": "tokenizer.model"}[self.kind]

    @property
    def engine_version(self) -> str:
        """What encodes, and which version of it: another one may give other ids."""
        if self.engine == "tokenmill":
            return "tokenmill"
        parts = self.engine.split("+")
        return f"{self.engine} {' '.join(importlib.metadata.version(part) for part in parts)}"

    def describe(self) -> dict[str, Any]:
        """The tokenizer as the manifest has it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "scheme": self.scheme,
            "file": self.file_name,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "engine": self.engine_version,
        }


def resolve(name: str, *, eot_token: str | None = None) -> TokenizerSpec:
    """Find a tokenizer by the name the user gave. `char` comes back without its characters."""
    if "://" in name:
        raise TokenizerError(
            f"{name.partition('://')[0]}:// tokenizers are not fetched by this version",
            hint="give a local file, or a name on the hub",
        )
    for engine, kind, what in _FORCED:
        if name.startswith(f"{engine}:"):
            spec = _with_usual_ids(_resolve(name.removeprefix(f"{engine}:"), eot_token))
            if spec.kind != kind:
                raise TokenizerError(f"{name}: only a {what} can be encoded by {engine}", hint="drop the prefix")
            return replace(spec, engine=engine)
    return _with_usual_ids(_resolve(name, eot_token))


def _with_usual_ids(spec: TokenizerSpec) -> TokenizerSpec:
    """Refuse ids that only a damaged file has. Engines make tables of as many entries, and abort without the memory."""
    if spec.vocab_size > MAX_VOCAB_SIZE:
        raise TokenizerError(
            f"{spec.name} has the id {spec.vocab_size - 1:,}; no more than {MAX_VOCAB_SIZE:,} ids are supported",
            hint="check the file",
        )
    return spec


def from_dataset(description: dict[str, Any], content: bytes | None) -> TokenizerSpec:
    """The tokenizer of a dataset, from what its manifest and its folder hold."""
    if content is None:
        content = _embedded() if description["kind"] == "tiktoken" else b""
    return TokenizerSpec(
        name=description["name"],
        kind=description["kind"],
        scheme=description["scheme"],
        content=content,
        vocab_size=description["vocab_size"],
        eot_id=description["eot_id"],
        engine=description["engine"].partition(" ")[0],
    )


def char_spec(characters: str) -> TokenizerSpec:
    """A tokenizer of these characters: ids in code point order, then the end of text."""
    chars = sorted(set(characters))
    return TokenizerSpec(
        name="char",
        kind="char",
        scheme="",
        content=records.canonical([ord(char) for char in chars]),
        vocab_size=len(chars) + 1,
        eot_id=len(chars),
        engine="tokenmill",
    )


def _resolve(name: str, eot_token: str | None) -> TokenizerSpec:
    if not name.strip():  # as a path, it would be the current folder
        raise TokenizerError(
            f"the tokenizer is {name!r}: it names nothing", hint="name one, like gpt2; is a variable not set?"
        )
    if name == "gpt2":
        return _tiktoken("gpt2", _embedded(), _GPT2, "", eot_token)
    if name == "byte":
        _no_eot_token(name, eot_token)
        return TokenizerSpec(
            name="byte", kind="byte", scheme="", content=b"", vocab_size=257, eot_id=256, engine="tokenmill"
        )
    if name == "char":
        _no_eot_token(name, eot_token)
        return char_spec("")
    path_text, _, scheme = name.rpartition(":")
    if not path_text or (".tiktoken:" not in name and scheme not in SCHEMES):
        path_text, scheme = name, ""
    try:
        path = _find_file(path_text)
    except (OSError, RuntimeError) as error:  # not readable, not a path, or ~ of an unknown user
        cause = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        hint = hint_for(error, "check the path") if isinstance(error, OSError) else "check the path"
        raise TokenizerError(f"cannot look for the tokenizer {path_text}: {cause}", hint=hint) from None
    return _from_hub(name, eot_token) if path is None else _from_file(path, scheme, eot_token)


def _find_file(name: str) -> Path | None:
    """The file that a name means; None if it may be one on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", "tekken.json")
        found = [path / file for file in names if (path / file).is_file()] or sorted(path.glob("tokenizer.model.v*"))
        if not found:
            raise TokenizerError(
                f"{path} holds neither tokenizer.json nor tokenizer.model", hint="name the tokenizer's file itself"
            )
        return found[0]
    if path.is_file():
        return path
    if path.exists():
        raise TokenizerError(f"{path} is not a plain file", hint="save the tokenizer to a file, and give that one")
    if path.suffix in (".json", ".model", ".tiktoken") or name.startswith((".", "/", "~")):
        raise TokenizerError(f"there is no tokenizer file {path}", hint="check the path")
    return None


def _from_file(path: Path, scheme: str, eot_token: str | None) -> TokenizerSpec:
    content = _read(path)
    kind = recognise(content, name=path.name)
    if kind == "ranks":
        known = _KNOWN_RANKS.get(hashlib.sha256(content).hexdigest(), ("", None))
        return _tiktoken(path.name, content, known, scheme, eot_token)
    if scheme:
        raise TokenizerError(f"{path.name} is not a rank file, so {scheme!r} does not apply", hint="drop the scheme")
    if kind == "tekken":
        return _tekken(path.name, content, eot_token)
    if kind == "sentencepiece":
        return _sentencepiece(path.name, content, eot_token)
    config = path.parent / "tokenizer_config.json"
    return _hf(path.name, content, _read(config) if config.is_file() else None, eot_token)


def _sentencepiece(name: str, content: bytes, eot_token: str | None) -> TokenizerSpec:
    from tokenmill.tokenizers.sentencepiece import list_pieces, open_model

    model = open_model(content, name=name)
    pieces = list_pieces(model, name=name)
    if eot_token is not None and eot_token not in pieces:
        raise TokenizerError(f"{name} has no token {eot_token!r}", hint="name a piece of the model")
    # Its own end of text wins over the usual names.
    own = model.eos_id()
    names = (*([pieces[own]] if own >= 0 else []), *EOT_NAMES) if eot_token is None else (eot_token,)
    eot = next((pieces.index(piece) for piece in names if piece in pieces), None)
    return TokenizerSpec(
        name=name,
        kind="sentencepiece",
        scheme="",
        content=content,
        vocab_size=len(pieces),
        eot_id=eot,
        engine="sentencepiece",
    )


def _tekken(name: str, content: bytes, eot_token: str | None) -> TokenizerSpec:
    """Of Mistral's tekken.json, as a rank file of the ids."""
    from tokenmill.tokenizers.parity import PATTERNS

    found = parse_tekken(content, name=name)
    scheme = next((scheme for scheme in SCHEMES if PATTERNS[scheme] == found.pattern), None)
    if scheme is None:
        raise TokenizerError(
            f"{name} cuts text into words by a pattern that this version does not know",
            hint="use the tokenizer.json of the same model",
        )
    eot = found.eot_id(eot_token)
    if eot_token is not None and eot is None:
        raise TokenizerError(
            f"{name} has no token {eot_token!r}", hint=f"its special tokens: {', '.join(found.specials)}"
        )
    ranks = format_ranks(found.ranks)
    parse_ranks(ranks, name=name)
    size = max(found.vocab_size, *(number + 1 for number in found.ranks.values()))
    return TokenizerSpec(
        name=name, kind="tiktoken", scheme=scheme, content=ranks, vocab_size=size, eot_id=eot, engine="gigatoken"
    )


def _from_hub(name: str, eot_token: str | None) -> TokenizerSpec:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, revision = name.partition("@")
    silence = _silence(repository)
    fetch = partial(hf_hub_download, repository, revision=revision or None, local_files_only=bool(silence))
    try:
        content = _read(Path(fetch("tokenizer.json")))
        try:
            config = _read(Path(fetch("tokenizer_config.json")))
        except EntryNotFoundError:
            config = None
    except BaseException as error:  # the hub's client raises many kinds; all mean that there is no tokenizer
        if not is_failure(error):
            raise
        said = f"the hub cannot be reached: {silence}" if silence else f"the hub says: {_first_line(error)}"
        raise TokenizerError(
            f"unknown tokenizer {name!r}: not built in (gpt2, byte, char), no file here, and {said}",
            hint="check the name, or give a tokenizer.json, .tiktoken or .model file",
        ) from None
    return _hf(name, content, config, eot_token)


def _silence(repository: str) -> str:
    """Why the hub cannot be reached, "" if it answers. To fetch a file, its client would try for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        HfApi().model_info(repository)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):  # a download reports the same
        return ""
    except BaseException as error:  # those of its http library have no public name
        if not is_failure(error):
            raise
        return _first_line(error)
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _tiktoken(
    name: str, content: bytes, known: tuple[str, int | None], scheme: str, eot_token: str | None
) -> TokenizerSpec:
    """Of a rank file; `known` are its scheme and end of text, if it is one of OpenAI's."""
    scheme, eot = scheme or known[0], known[1]
    if scheme not in SCHEMES:
        said = f"{scheme!r} is not a scheme" if scheme else "it is not one of OpenAI's"
        raise TokenizerError(
            f"{name}: a .tiktoken file does not say how text is cut into words, and {said}",
            hint=f"add the scheme: {name}:SCHEME, one of {', '.join(SCHEMES)}",
        )
    eot_name = _LLAMA3_EOT if known[0] == "llama3" else _KNOWN_EOT
    if eot is not None and eot_token not in (None, eot_name):
        raise TokenizerError(f"{name} has no token {eot_token!r}", hint=f"its end of text is {eot_name}")
    if name == "gpt2" and known == _GPT2:
        num_ids = known[1] or 0  # built in: there is nothing to find wrong with it
    else:
        ranks = parse_ranks(content, name=name)
        num_ids = max(ranks.values()) + 1
        if len(ranks) != len(content.splitlines()):  # lines that are empty, or have an empty token
            num_ids = max(num_ids, *(int(line.split()[1]) + 1 for line in content.splitlines() if line.strip()))
            content = format_ranks(ranks)
    if eot is None and eot_token is not None:
        eot = num_ids  # beyond them; its name is for others to know
    return TokenizerSpec(
        name=name,
        kind="tiktoken",
        scheme=scheme,
        content=content,
        vocab_size=num_ids if eot is None else max(num_ids, eot + 1),
        eot_id=eot,
        engine="gigatoken",
    )


def _hf(name: str, content: bytes, config: bytes | None, eot_token: str | None) -> TokenizerSpec:
    try:
        parsed = json.loads(content)
        if not isinstance(parsed, dict):
            raise TypeError("it is not an object")
        model = parsed["model"]
        added = {token["content"]: int(token["id"]) for token in parsed.get("added_tokens") or []}
        vocab = model["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        if not all(type(number) is int for number in ids.values()):
            raise TypeError("an id is not a number")
        if not all(isinstance(token, str) for token in (*ids, *added)):
            raise TypeError("a token is not a text")
        dropout = model.get("dropout")
    except KeyError as error:
        raise TokenizerError(
            f"{name} is not a complete tokenizer.json: it has no {error}", hint="check the file"
        ) from None
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise TokenizerError(f"{name} is not a complete tokenizer.json: {error}", hint="check the file") from None
    if dropout:
        raise TokenizerError(
            f"{name} has BPE dropout {dropout}, with which the same text gets other ids each time",
            hint='set "dropout" to null in a copy of the file',
        )
    known = {**added, **ids}  # a token of the vocabulary keeps its id, whatever the list of added tokens says
    if eot_token is not None and eot_token not in known:
        raise TokenizerError(
            f"{name} has no token {eot_token!r}", hint=f"its special tokens: {', '.join(sorted(added)) or 'none'}"
        )
    wanted = [eot_token] if eot_token is not None else [_configured_eos(config), *EOT_NAMES]
    ending = next((token for token in wanted if token in known), None)
    if ending is not None and known[ending] != _in_order(added, ids).get(ending):
        _check_number(name, content, ending, known[ending])
    eot = None if ending is None else known[ending]
    return TokenizerSpec(
        name=name,
        kind="hf",
        scheme="",
        content=content,
        vocab_size=max(known.values(), default=-1) + 1,
        eot_id=eot,
        engine="gigatoken",
    )


def _in_order(added: dict[str, int], ids: dict[str, int]) -> dict[str, int]:
    """The ids that `tokenizers` gives: those of the vocabulary, then the order of the added tokens, without gaps."""
    numbers = dict(ids)
    following = len(ids)
    for token in added:
        following = max(following, numbers.setdefault(token, following) + 1)
    return numbers


def _check_number(name: str, content: bytes, token: str, number: int) -> None:
    """An end of text with another id than the model knows is wrong in every document."""
    import tokenizers

    try:
        own = tokenizers.Tokenizer.from_str(content.decode()).token_to_id(token)
    except Exception:  # encoding reports what is wrong
        return
    if own not in (None, number):
        raise TokenizerError(
            f"{name} gives {token!r} the id {number}, but tokenizers loads it as {own}",
            hint="load the file with tokenizers, check its ids, and save it again",
        )


def _configured_eos(config: bytes | None) -> str | None:
    try:
        eos = json.loads(config or b"{}").get("eos_token")
    except (ValueError, AttributeError):
        return None
    content = eos.get("content") if isinstance(eos, dict) else eos
    return content if isinstance(content, str) else None


def _no_eot_token(name: str, eot_token: str | None) -> None:
    if eot_token is not None:
        raise TokenizerError(f"`eot_token` does not apply to {name}", hint="its last id ends a text")


def _embedded() -> bytes:
    return importlib.resources.files("tokenmill").joinpath("embedded/gpt2.tiktoken").read_bytes()


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_CONTENT_BYTES:
            raise TokenizerError(f"{path} is too large for a tokenizer", hint="check the path")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"cannot read the tokenizer {path}: {error.strerror}", hint=hint_for(error, "check the path")
        ) from None
