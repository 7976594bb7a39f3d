"""What parquet and Arrow files have in common: rows of columns, one or some of which are the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tokenmill.errors import RecipeError
from tokenmill.sources.batch import Batch, Skip, judged_batch, make_batch
from tokenmill.sources.columns import Rule, row_text, rule_columns

# A text that stands in the file once may stand in the column a million times, so the file's size bounds nothing.
MAX_BATCH_ROWS = 1 << 14


def check_columns(schema: pa.Schema, rule: Rule, path: str) -> None:
    """The columns of a rule must each be one, and the one that is to be the text must hold text."""
    for name in rule_columns(rule):
        if len(schema.get_all_field_indices(name)) != 1:
            raise RecipeError(f"{path} has several columns {name!r}", hint="rename all but one of them")
        _check_text_column(schema.field(name), rule, path)


def _check_text_column(field: pa.Field, rule: Rule, path: str) -> None:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    binaries = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    if "column" in rule and not any(is_kind(kind) for is_kind in (*texts, *binaries)):
        raise RecipeError(
            f"{path}: column {field.name!r} holds {kind}, not text", hint="name a text column with --text-column"
        )


def table_batch(index: int, table: pa.RecordBatch, rule: Rule, row: int) -> Batch:
    """The texts of some rows, the first of which is `row`."""
    positions = np.arange(row, row + table.num_rows, dtype=np.int64)
    if "column" not in rule:
        rows = zip(positions.tolist(), _rows(table), strict=True)
        judged = ((at, *(row_text(rule, row) if row is not None else ("", "invalid_utf8"))) for at, row in rows)
        return judged_batch(index, judged)
    text = plain_text(table.column(rule["column"]))
    if not text.null_count:
        return make_batch(index, text, positions)
    null = text.is_null().to_numpy(zero_copy_only=False)
    skips = [Skip(index, int(position), "null_text") for position in positions[null]]
    return make_batch(index, text.drop_null(), positions[~null], skips)


def _rows(table: pa.RecordBatch) -> list[dict[str, Any] | None]:
    """Rows as Python has them; None for one whose strings are not valid."""
    try:
        rows: list[dict[str, Any] | None] = table.to_pylist()
    except UnicodeDecodeError:
        rows = []
        for index in range(table.num_rows):
            try:
                rows += table.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                rows.append(None)
    return rows


def plain_text(column: pa.Array) -> pa.Array:
    """A text column in the layout that the engine takes: offsets and bytes."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return column.view(pa.string() if pa.types.is_binary(column.type) else pa.large_string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary()).view(pa.large_string())
    return column.cast(pa.large_string())
