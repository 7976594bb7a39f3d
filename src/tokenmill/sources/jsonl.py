"""JSON lines: one object a line. A line that is bad is told apart from its neighbours, and skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tokenmill.errors import RecipeError
from tokenmill.planning import Source
from tokenmill.sources.batch import Batch, Skip, make_batch
from tokenmill.sources.columns import Rule, row_text
from tokenmill.sources.separated import Run, read_runs

_BOM = b"\xef\xbb\xbf"
_PEEK_BYTES = 64_000_000


def read(path: str, index: int, source: Source, start: int, stop: int, *, limit: int) -> Iterator[Batch]:
    fast = _fast_decoder(source.text)
    for run in read_runs(path, source.compression, b"\n", start, stop, limit):
        if run.too_large:
            yield make_batch(index, pa.array([], pa.string()), np.zeros(0, np.int64), [Skip(index, run.start, "too_large")])
        else:
            yield _decode(index, run, source.text, fast)


def columns(path: str, compression: str) -> list[str]:
    """The field names of the first object of a file; none if it has no object at all."""
    for run in read_runs(path, compression, b"\n", 0, -1, _PEEK_BYTES):
        for line in run.data.removeprefix(_BOM).split(b"\n"):
            try:
                row = msgspec.json.decode(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                return list(row)
        break
    return []


def _fast_decoder(rule: Rule) -> Callable[[bytes], list[Any]] | None:
    """A decoder of whole runs that builds the text and nothing else; for rules of one column."""
    if "column" not in rule:
        return None
    try:
        row = msgspec.defstruct("Row", [("text", str)], rename={"text": rule["column"]}, gc=False)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"--text-column {rule['column']!r}: {error}", hint="give the name of a field") from None
    return msgspec.json.Decoder(row).decode_lines


def _decode(index: int, run: Run, rule: Rule, fast: Callable[[bytes], list[Any]] | None) -> Batch:
    data, start = run.data, run.start
    if start == 0 and data.startswith(_BOM):
        data, start = data[len(_BOM) :], len(_BOM)
    if fast is not None:
        try:
            texts = [row.text for row in fast(data)]
        except (ValueError, RecursionError):
            return _decode_each(index, data, start, rule)
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
        positions = np.concatenate(([0], newlines + 1)) + start
        if len(texts) == len(positions):
            return make_batch(index, pa.array(texts, pa.large_string()), positions)
    return _decode_each(index, data, start, rule)


def _decode_each(index: int, data: bytes, start: int, rule: Rule) -> Batch:
    texts: list[str] = []
    positions: list[int] = []
    skips: list[Skip] = []
    for line in data.split(b"\n"):
        if line and not line.isspace():
            text, reason = _line_text(line, rule)
            if reason:
                skips.append(Skip(index, start, reason))
            else:
                texts.append(text)
                positions.append(start)
        start += len(line) + 1
    return make_batch(index, pa.array(texts, pa.large_string()), np.array(positions, np.int64), skips)


def _line_text(line: bytes, rule: Rule) -> tuple[str, str]:
    try:
        row = msgspec.json.decode(line)
    except UnicodeDecodeError:
        return "", "invalid_utf8"
    except (ValueError, RecursionError):
        return "", "lone_surrogate" if _has_lone_surrogate(line) else "invalid_json"
    if not isinstance(row, dict):
        return "", "invalid_json"
    return row_text(rule, row)


def _has_lone_surrogate(line: bytes) -> bool:
    """Whether a line is JSON but for an escaped half of a surrogate pair."""
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False
