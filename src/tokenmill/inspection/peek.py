"""peek: the text of documents and samples, token by token, with the boundaries between documents.

    document 12    The | mill | turns | end of document 12
    sample 3       raw | text | end of document 41 | into | tokens    begins and ends anywhere in a document

A piece is one token, or the few tokens that together make one character. Any dataset that `open` reads can be shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill import arguments
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.open import open as open_dataset
from tokenmill.sizes import counted

if TYPE_CHECKING:
    from tokenmill.tokenizers.spec import TokenizerSpec

# A character of UTF-8 has at most four bytes, so at most four tokens; emoji sequences are several characters.
_MAX_PIECE_TOKENS = 8
_MAX_PIECES_BACK = 16
Decode = Callable[[Sequence[int]], str]
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one piece of text. An end of text has no text, and `ends_document`."""

    text: str
    ids: tuple[int, ...]
    ends_document: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The first pieces of a document, or of a sample. Offsets count tokens of the split."""

    split: str
    document: int
    sample: int | None
    offset: int
    num_tokens: int
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.ids]

    @property
    def num_cut(self) -> int:
        """Tokens that are not shown."""
        return self.num_tokens - len(self.ids)

    def __repr__(self) -> str:
        what = f"document {self.document}" if self.sample is None else f"sample {self.sample}"
        return f"Excerpt({self.split} {what}, {self.num_tokens:,} tokens, {self.text[:40]!r})"


def peek(
    dataset: str | os.PathLike[str] | Dataset,
    *,
    split: str | None = None,
    document: int | None = None,
    sample: int | None = None,
    seq_len: int = 1024,
    count: int = 1,
    random: bool = False,
    seed: int = 0,
    max_tokens: int = 256,
    tokenizer: str | None = None,
) -> list[Excerpt]:
    """The beginnings of `count` documents, from `document` on, or of samples of `seq_len` tokens, from `sample` on.

    With `random`, documents are drawn instead, or samples if `sample` is given; the same seed draws the same ones.
    Sample i has the tokens from i * seq_len on, as in a loader without packing. `split` is train if there is one.
    Files of other trainers do not say what their tokenizer is: without `tokenizer`, their pieces have ids and no text.
    """
    spec = _find_tokenizer(arguments.text_or_none("tokenizer", tokenizer))
    eot_id = None if spec is None else spec.eot_id  # for files that do not record it
    opened = dataset if isinstance(dataset, Dataset) else open_dataset(dataset, eot_id=eot_id)
    name = _choose_split(opened, split)
    tokens = opened[name]
    if document is not None and sample is not None:
        raise RecipeError("document and sample are both given", hint="give one of them")
    seq_len = arguments.whole("seq_len", seq_len, least=1)
    count = arguments.whole("count", count, least=1)
    max_tokens = arguments.whole("max_tokens", max_tokens, least=1)
    of_samples = sample is not None
    total = tokens.num_tokens // seq_len if of_samples else tokens.num_documents
    first = arguments.whole("sample", sample) if of_samples else arguments.whole("document", document or 0)
    chance = Random(arguments.seed_number(seed)) if arguments.flag("random", random) else None
    numbers = _choose(first, count, total, chance, what="sample" if of_samples else "document")
    reader = ExcerptReader(_find_decoder(opened, spec), tokens, name, max_tokens)
    return [reader.sample(number, seq_len) if of_samples else reader.document(number) for number in numbers]


def open_reader(dataset: Dataset, split: str, *, max_tokens: int, tokenizer: str | None = None) -> ExcerptReader:
    """Excerpts of one split, for those who show many."""
    return ExcerptReader(_find_decoder(dataset, _find_tokenizer(tokenizer)), dataset[split], split, max_tokens)


def _choose_split(dataset: Dataset, split: str | None) -> str:
    if split is not None:
        return split
    if not len(dataset):
        raise DatasetError(f"{dataset.path} has no splits", hint="prepare it from sources that have text")
    return "train" if "train" in dataset else dataset.splits[0]


def _choose(first: int, count: int, total: int, chance: Random | None, *, what: str) -> Sequence[int]:
    if chance is not None:
        return sorted(chance.sample(range(total), min(count, total)))
    if first >= total:
        raise RecipeError(f"{what} {first:,} of {counted(total, what)}", hint=f"{what}s count from 0")
    return range(first, min(first + count, total))


def _find_tokenizer(name: str | None) -> TokenizerSpec | None:
    from tokenmill.tokenizers.spec import resolve

    return None if name is None else resolve(name)


def _find_decoder(dataset: Dataset, spec: TokenizerSpec | None) -> Decode | None:
    if spec is None:
        return None if dataset.manifest.tokenizer["kind"] == "unknown" else dataset.decode
    from tokenmill.tokenizers.engine import open_engine

    engine = open_engine(spec)

    def decode(ids: Sequence[int]) -> str:
        if max(ids) >= spec.vocab_size:
            hint = f"{spec.name} is not the tokenizer of these files, or pass their dtype to `tokenmill.open`"
            raise RecipeError(f"id {max(ids)}, but {spec.name} has 0 to {spec.vocab_size - 1}", hint=hint)
        return engine.decode(np.array([token for token in ids if token != spec.eot_id], np.uint32))

    return decode


class ExcerptReader:
    """Reads excerpts of a split: ids, and the pieces of text that they make."""

    def __init__(self, decode: Decode | None, split: TokenSplit, name: str, max_tokens: int) -> None:
        self._decode = decode
        self._split = split
        self._name = name
        self._max_tokens = max_tokens

    def document(self, number: int, *, skip: int = 0) -> Excerpt:
        """A document, from its token `skip` on."""
        (offset,) = self._split.document_starts(np.array([number])).tolist()
        ids = self._split.document(number)[skip:]
        return self._excerpt(ids, document=number, sample=None, offset=offset + skip)

    def sample(self, number: int, seq_len: int) -> Excerpt:
        offset = number * seq_len
        (document,) = self._split.document_at(np.array([offset])).tolist()
        ids = self._split.tokens(offset, offset + seq_len)
        return self._excerpt(ids, document=document, sample=number, offset=offset)

    def pieces(self, ids: Sequence[int], *, is_ended: bool) -> Iterator[Piece]:
        """The pieces of tokens of one document; `is_ended` if they are its last ones."""
        eot_id, eot = self._split.eot_id, self._split.eot
        if eot == "prepend" and list(ids[:1]) == [eot_id]:
            ids = ids[1:]
            yield Piece("", (eot_id,) if eot_id is not None else ())
        has_eot = is_ended and eot == "append" and list(ids[-1:]) == [eot_id]
        yield from self._text_pieces(ids[:-1] if has_eot else ids)
        if is_ended:
            yield Piece("", tuple(ids[-1:]) if has_eot else (), ends_document=True)

    def _excerpt(self, ids: npt.NDArray[np.generic], *, document: int, sample: int | None, offset: int) -> Excerpt:
        shown = np.asarray(ids[: self._max_tokens], np.int64)
        # Where documents end among these tokens; without ends of text, between two tokens.
        ends = self._split.document_ends(offset, offset + len(shown)) - offset
        pieces = tuple(self._pieces_of_documents(shown, ends.tolist()))
        return Excerpt(
            split=self._name, document=document, sample=sample, offset=offset, num_tokens=len(ids), pieces=pieces
        )

    def _pieces_of_documents(self, ids: npt.NDArray[np.int64], ends: Sequence[int]) -> Iterator[Piece]:
        begin = 0
        for end in ends:
            yield from self.pieces(ids[begin:end].tolist(), is_ended=True)
            begin = end
        yield from self.pieces(ids[begin:].tolist(), is_ended=False)

    def _text_pieces(self, ids: Sequence[int]) -> Iterator[Piece]:
        """Each piece is what the text grows by, since a token may not decode alone as it does behind others.

        The text is decoded from a few pieces back, not from the start, so the time is linear.
        """
        if self._decode is None:
            yield from (Piece("", (token,)) for token in ids)
            return
        edges, begin, known, anchor = [0], 0, "", 0
        for stop in range(1, len(ids) + 1):
            text = self._decode(ids[anchor:stop])
            is_whole = not text.endswith(_INCOMPLETE) and text.startswith(known)
            if is_whole or stop - begin == _MAX_PIECE_TOKENS or stop == len(ids):
                yield Piece(text[len(known) :], tuple(ids[begin:stop]))
                known, begin = text, stop
                edges.append(stop)
                if len(edges) > _MAX_PIECES_BACK:
                    anchor, edges = edges[_MAX_PIECES_BACK // 2], edges[_MAX_PIECES_BACK // 2 :]
                    known = self._decode(ids[anchor:stop])
