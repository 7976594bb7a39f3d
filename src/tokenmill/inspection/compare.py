"""compare: what differs between two datasets or recipes: settings, sources, counts, and the first document.

    settings    recipes, field by field, and what the manifests record of the tokenizer
    sources     which of them only one has, and those with other documents
    counts      tokens and documents of each split, and what was dropped
    documents   the first one with other tokens. Shards with the same SHA-256 are not read

Datasets of two tokenizers have other tokens anyway, so the texts of their first documents are compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from tokenmill import arguments
from tokenmill.dataset.dataset import Dataset, SourceRow, TokenSplit
from tokenmill.dataset.manifest import SourceTotal
from tokenmill.errors import DatasetError
from tokenmill.formats.open import open as open_dataset
from tokenmill.recipe import Recipe, make_recipe

_RECIPE_ENDINGS = (".yaml", ".yml")
_BLOCK_TOKENS = 1 << 22
# Tokens that are shown before and behind the first difference, and documents whose texts are compared.
_BEFORE, _BEHIND = 8, 24
_COMPARED_TEXTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """Something that differs, and its two values; None for what only the other one has."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSide:
    """A document of one dataset: its text around the difference, and where it came from, if that is known."""

    text: str
    num_tokens: int
    source: SourceRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDocument:
    """The first document of a split that differs, from its token `offset` on. A side is None if it has none there.

    `offset` is None if texts were compared, because the tokenizers are different ones.
    """

    split: str
    document: int
    offset: int | None
    a: DocumentSide | None
    b: DocumentSide | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between two datasets or recipes. `compared` says, split by split, what was found equal."""

    a: str
    b: str
    settings: tuple[ComparedValue, ...]
    sources: tuple[ComparedValue, ...]
    counts: tuple[ComparedValue, ...]
    documents: tuple[ComparedDocument, ...]
    compared: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not (self.settings or self.sources or self.counts or self.documents)

    def __repr__(self) -> str:
        numbers = ", ".join(
            f"{len(getattr(self, name))} {name}" for name in ("settings", "sources", "counts", "documents")
        )
        return f"Comparison({self.a!r}, {self.b!r}: {'equal' if self.equal else f'{numbers} differ'})"


_Side = Dataset | Recipe


def compare(a: str | os.PathLike[str] | Dataset, b: str | os.PathLike[str] | Dataset) -> Comparison:
    """Compare two datasets, two recipes in YAML, or a dataset with a recipe.

    Datasets are paths, URLs or open ones, also files of other layouts. A path that ends with .yaml is a recipe.
    """
    first, second = _open("a", a), _open("b", b)
    sources: tuple[ComparedValue, ...] = ()
    counts: tuple[ComparedValue, ...] = ()
    documents: tuple[ComparedDocument, ...] = ()
    compared: tuple[str, ...] = ()
    if isinstance(first, Dataset) and isinstance(second, Dataset):
        sources = tuple(_compare_sources(first, second))
        counts = tuple(_differences(_counts(first), _counts(second)))
        documents, compared = _compare_splits(first, second)
    return Comparison(
        a=_name(a),
        b=_name(b),
        settings=tuple(_compare_settings(first, second)),
        sources=sources,
        counts=counts,
        documents=documents,
        compared=compared,
    )


def _name(given: str | os.PathLike[str] | Dataset) -> str:
    return given.path if isinstance(given, Dataset) else os.fspath(given)


def _open(name: str, given: Any) -> _Side:
    if isinstance(given, Dataset):
        return given
    path = arguments.place(name, given)
    return make_recipe({}, config=path) if path.endswith(_RECIPE_ENDINGS) else open_dataset(path)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ComparedValue]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            yield ComparedValue(what=name, a=a.get(name), b=b.get(name))


def _compare_settings(a: _Side, b: _Side) -> Iterator[ComparedValue]:
    ours, theirs = _settings(a), _settings(b)
    if isinstance(a, Recipe) is not isinstance(b, Recipe):
        common = ours.keys() & theirs.keys()
        ours, theirs = ({name: side[name] for name in side if name in common} for side in (ours, theirs))
    yield from _differences(ours, theirs)


def _settings(side: _Side) -> dict[str, Any]:
    """What decides the bytes, by the names that recipes have for it."""
    if isinstance(side, Recipe):
        return json.loads(json.dumps({**dataclasses.asdict(side), "documents": side.identity()["documents"]}))  # type: ignore[no-any-return]
    manifest = side.manifest
    about = dict(manifest.tokenizer)
    kept = {name: value for name, value in manifest.identity.items() if name not in ("tokenizer", "engine")}
    return {
        **kept,
        "tokenizer": about["name"],
        "tokenizer content": about["fingerprint"][:12],
        "vocabulary": about["vocab_size"],
        "end of text id": about["eot_id"],
        "engine": about["engine"],
        "dtype": manifest.dtype,
    }


def _compare_sources(a: Dataset, b: Dataset) -> Iterator[ComparedValue]:
    ours, theirs = ({one.name: one for one in side.manifest.sources} for side in (a, b))
    for name in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or (one.documents, one.bytes) != (other.documents, other.bytes):
            yield ComparedValue(what=name, a=_size_of(one), b=_size_of(other))
        elif one.text_sum != other.text_sum:
            yield ComparedValue(what=name, a=f"text {one.text_sum[:12]}", b=f"text {other.text_sum[:12]}")


def _size_of(source: SourceTotal | None) -> str | None:
    return None if source is None else f"{source.documents:,} documents kept, {source.bytes:,} bytes"


def _counts(side: Dataset) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, split in side.manifest.splits.items():
        found[f"{name} tokens"] = split.tokens
        if side.manifest.documents_read:
            found[f"{name} documents"] = split.documents
    if side.manifest.documents_read:
        found["documents read"] = side.manifest.documents_read
    return found | {f"dropped, {reason.replace('_', ' ')}": count for reason, count in side.manifest.dropped.items()}


def _compare_splits(a: Dataset, b: Dataset) -> tuple[tuple[ComparedDocument, ...], tuple[str, ...]]:
    documents, compared = [], []
    same_tokenizer = _is_same_tokenizer(a, b)
    for name in (name for name in a if name in b):
        if same_tokenizer:
            found, said = _first_other_tokens(a, b, name)
        else:
            found, said = _first_other_text(a, b, name)
        if found is not None:
            documents.append(found)
        else:
            compared.append(said)
    return tuple(documents), tuple(compared)


def _is_same_tokenizer(a: Dataset, b: Dataset) -> bool:
    """Whether equal ids mean equal text. Files of other layouts do not say, so their ids are compared."""
    ours, theirs = a.manifest.tokenizer, b.manifest.tokenizer
    return "unknown" in (ours["name"], theirs["name"]) or ours["fingerprint"] == theirs["fingerprint"]


def _first_other_tokens(a: Dataset, b: Dataset, name: str) -> tuple[ComparedDocument | None, str]:
    ours, theirs = a[name], b[name]
    start = _equal_beginning(a, b, name)
    stop = min(ours.num_tokens, theirs.num_tokens)
    said = f"{name}: all {stop:,} tokens are the same"
    for at in range(start, stop, _BLOCK_TOKENS):
        end = min(at + _BLOCK_TOKENS, stop)
        place = _first_difference(ours, theirs, at, end)
        if place is not None:
            return _document_at(a, b, name, place), said
    if ours.num_tokens != theirs.num_tokens:
        return _document_at(a, b, name, stop), said
    return None, said


def _equal_beginning(a: Dataset, b: Dataset, name: str) -> int:
    """Tokens in the first shards, as far as they have the same digests."""
    shards = zip(a.manifest.splits[name].shards, b.manifest.splits[name].shards, strict=False)
    same = takewhile(lambda pair: pair[0].bin == pair[1].bin and pair[0].idx == pair[1].idx, shards)
    return sum(one.tokens for one, _ in same)


def _first_difference(ours: TokenSplit, theirs: TokenSplit, start: int, stop: int) -> int | None:
    """The first token of a range that differs, or that only one of them begins a document with."""
    places = []
    unequal = np.flatnonzero(ours.tokens(start, stop) != theirs.tokens(start, stop))
    if len(unequal):
        places.append(start + int(unequal[0]))
    try:
        ends = np.setxor1d(ours.document_ends(start, stop), theirs.document_ends(start, stop))
    except DatasetError:  # files that do not record their boundaries
        ends = np.zeros(0, np.int64)
    if len(ends):
        places.append(int(ends[0]) - 1)
    return min(places, default=None)


def _document_at(a: Dataset, b: Dataset, name: str, token: int) -> ComparedDocument:
    """The document with the first difference: all before it are the same, so it has one number in both."""
    owner = a if token < a[name].num_tokens else b
    try:
        number = int(owner[name].document_at(np.array([token]))[0])
        begin = int(owner[name].document_starts(np.array([number]))[0])
    except DatasetError:  # files that do not record their boundaries
        number, begin = 0, 0
    sides = [_side(dataset, name, number, begin, token) for dataset in (a, b)]
    return ComparedDocument(split=name, document=number, offset=token - begin, a=sides[0], b=sides[1])


def _side(dataset: Dataset, name: str, number: int, begin: int, token: int) -> DocumentSide | None:
    split = dataset[name]
    if token >= split.num_tokens:
        return None
    try:
        size = len(split.document(number))
    except (DatasetError, IndexError):
        size = split.num_tokens
    ids = split.tokens(max(begin, token - _BEFORE), min(token + _BEHIND, begin + max(size, token - begin + 1)))
    source = split.source(number) if dataset.has_provenance and number < split.num_documents else None
    return DocumentSide(text=_decode(dataset, ids), num_tokens=size, source=source)


def _decode(dataset: Dataset, ids: Any) -> str:
    if dataset.manifest.tokenizer["kind"] == "unknown":
        return " ".join(map(str, ids.tolist()))
    return dataset.decode(ids)


def _first_other_text(a: Dataset, b: Dataset, name: str) -> tuple[ComparedDocument | None, str]:
    """The first of some documents whose text differs, decoded by two tokenizers."""
    ours, theirs = a[name], b[name]
    count = min(ours.num_documents, theirs.num_documents, _COMPARED_TEXTS)
    for number in range(count):
        texts = ours.text(number), theirs.text(number)
        if texts[0] != texts[1]:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
            at = max(0, same - _BEHIND)
            sides = [
                DocumentSide(
                    text=text[at : at + 4 * _BEHIND],
                    num_tokens=len(dataset[name].document(number)),
                    source=dataset[name].source(number) if dataset.has_provenance else None,
                )
                for dataset, text in ((a, texts[0]), (b, texts[1]))
            ]
            return ComparedDocument(split=name, document=number, offset=None, a=sides[0], b=sides[1]), ""
    return None, f"{name}: the texts of the first {count:,} documents are the same, by two tokenizers"
