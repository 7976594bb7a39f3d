"""Text files. The recipe says what a document is: a line, a part between separators, or the whole file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tokenmill.recipe import BY_ROW
from tokenmill.sources.base import BATCH_BYTES, Batch, Rule, Skip, Source, SourceFormat, SourceSlice, make_batch
from tokenmill.sources.byte_ranges import BOM, DocumentRun, LineFormat, read_runs
from tokenmill.sources.files import HEAD_BYTES, check_text, open_stream, pin_of, recognise

# The white space of Python's str.isspace, as a pattern for Arrow.
_BLANK = r"^[\s\v\p{Z}\x{85}\x{1c}-\x{1f}]*$"


def text_format(documents: str) -> SourceFormat:
    """The format of text files by the recipe's `documents`: auto, lines, files, or separator:TEXT."""
    if documents in BY_ROW:
        return TextLines()
    if documents == "files":
        return WholeText()
    return SeparatedText(documents.removeprefix("separator:").encode())


class TextLines(LineFormat):
    """A document is a line without its end. Lines of white space alone are not documents."""

    def check(self, path: str, source: Source) -> None:
        check_text(path, source.compression, pin_of(source), separator=b"\n")

    def parse_lines(self, run: DocumentRun, index: int, rule: Rule, limit: int) -> Batch:
        import pyarrow.compute as pc

        batch = _separated(run, index, b"\n")
        text = batch.text
        if pc.any(pc.ends_with(text, "\r")).as_py():
            text = pc.replace_substring_regex(text, r"\r$", "") if _valid(text) else _strip_returns(text)
        blank = pc.match_substring_regex(text, _BLANK)
        if not pc.any(blank).as_py():
            return make_batch(index, text, batch.positions, batch.skips)
        keep = pc.invert(blank)
        positions = batch.positions[keep.to_numpy(zero_copy_only=False)]
        return make_batch(index, text.filter(keep), positions, batch.skips)


class SeparatedText(SourceFormat):
    """A document is the text between two separators."""

    def __init__(self, separator: bytes) -> None:
        self._separator = separator

    def check(self, path: str, source: Source) -> None:
        check_text(path, source.compression, pin_of(source), separator=self._separator)

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        for run in read_runs(part, self._separator, limit=limit, chunk=batch_bytes):
            yield _separated(run, part.index, self._separator)


class WholeText(SourceFormat):
    """A document is a whole file."""

    is_one_document: ClassVar[bool] = True
    joins_small_files: ClassVar[bool] = True

    def check(self, path: str, source: Source) -> None:
        check_text(path, source.compression, pin_of(source), separator=b"")

    def read(self, part: SourceSlice, *, limit: int, batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
        source, index, position = part.source, part.index, np.zeros(1, np.int64)
        # A read allocates all that it asks for: neither the limit nor a small file is a reason to allocate much.
        step = BATCH_BYTES if source.compression else min(BATCH_BYTES, source.bytes + 1)
        data = bytearray()
        with open_stream(part.path, source.compression, pin=pin_of(source), check=False) as stream:
            while more := stream.read(min(step, limit + 1 - len(data))):
                data += more
                if len(data) > limit:
                    yield make_batch(index, _strings([]), position[:0], [Skip(index, 0, "too_large")])
                    return
        # The unit finds invalid UTF-8 in any text, so the file is not skipped for it here.
        if recognise(bytes(data[:HEAD_BYTES])) is not None and _valid(_strings([data])):
            yield make_batch(index, _strings([]), position[:0], [Skip(index, 0, "not_text")])
            return
        if data.startswith(BOM):
            del data[: len(BOM)]
        yield make_batch(index, _strings([data]), position)


def _separated(run: DocumentRun, index: int, separator: bytes) -> Batch:
    import pyarrow.compute as pc

    if run.too_large:
        return make_batch(index, _strings([]), np.zeros(0, np.int64), [Skip(index, run.start, "too_large")])
    data, at = run.data, run.start
    if at == 0 and data[: len(BOM)] == BOM:
        data, at = data[len(BOM) :], len(BOM)
    whole = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(np.array([0, len(data)])), pa.py_buffer(data)]
    )
    parts = pc.split_pattern(whole, separator).values
    lengths = pc.binary_length(parts).to_numpy() + len(separator)
    positions = np.cumsum(lengths, dtype=np.int64) - lengths + at
    return make_batch(index, parts.view(pa.large_string()), positions)


def _strings(texts: Sequence[bytes | bytearray]) -> pa.Array:
    """Bytes as an Arrow array of strings that are not checked to be valid UTF-8; the unit checks them."""
    return pa.array(texts, pa.large_binary()).view(pa.large_string())


def _valid(text: pa.Array) -> bool:
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _strip_returns(text: pa.Array) -> pa.Array:
    return _strings([line.removesuffix(b"\r") for line in text.cast(pa.large_binary()).to_pylist()])
