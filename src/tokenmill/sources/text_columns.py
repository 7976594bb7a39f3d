"""Which columns or fields are the text of a document, and the text of a row.

A rule says how the text is made: one column, a template, parts joined by a blank line, or the turns of a conversation.
If the user names none, the rule is found from the names of the columns, by the first of these shapes that fits:

    text                              {"column": "text"}
    instruction, input?, output       {"join": [...]}    also input/output, prompt/response, question/answer,
    messages, conversations           {"turns": ...}     prompt/completion, query/response
    prompt?, chosen, rejected         {"chosen": [...]}  the prompt, unless the chosen answer repeats it, and the answer

All rows of a table have the same columns. Each object of JSON lines has its own fields, so an optional part stays in
the rule even if many objects lack it. A rule also names the columns that a filter asks for, if any.

`TableFormat` is what parquet and Arrow files have in common: rows of columns, some of which are the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from tokenmill.errors import RecipeError
from tokenmill.recipe import fill, template_columns
from tokenmill.sources.base import Batch, Extent, Rule, Skip, Source, SourceFormat, judged_batch, make_batch

# Each shape: its columns in the order in which they are joined; "?" marks an optional one. A table with an instruction
# and an output is recognised by them first, so that the instruction is not lost.
_SHAPES: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("instruction", "input?", "output"),
    ("instruction?", "input", "output"),
    ("messages",),
    ("conversations",),
    ("prompt", "response"),
    ("question", "answer"),
    ("prompt", "completion"),
    ("query", "response"),
    *(("chosen", "rejected", asked) for asked in ("prompt", "question", "query", "instruction", "input")),
    ("chosen", "rejected"),
)
# The rule of a source that could not be read when it was planned.
UNREAD: Rule = {"unread": True}
_TURN_TEXT = ("content", "value", "text")
_GLUE = "\n\n"
# Names of columns that an error lists; each object may have others.
MAX_NAMES = 100


def find_rule(columns: Collection[str], *, text_column: str | None, template: str | None, where: str) -> Rule:
    """The rule for a table with these columns."""
    rule = _asked_rule(text_column, template)
    if rule is not None and all(name in columns for name in rule_columns(rule)):
        return rule
    shape = _shape(columns) if rule is None else None
    if shape is None:
        raise refusal(columns, text_column=text_column, template=template, where=where)
    return _shape_rule([name for name in shape if name.rstrip("?") in columns])


def common_rule(objects: Sequence[Collection[str]], *, text_column: str | None, template: str | None) -> Rule | None:
    """The rule for JSON lines whose first objects have these fields: the shape that most of them have.

    None if no object has a known shape. A single odd object decides nothing, wherever it is.
    """
    rule = _asked_rule(text_column, template)
    if rule is not None:
        wanted = rule_columns(rule)
        return rule if any(all(name in fields for name in wanted) for fields in objects) else None
    shapes: Counter[tuple[str, ...]] = Counter()
    for fields, count in Counter(map(tuple, objects)).items():  # most have the same fields
        if (shape := _shape(fields)) is not None:
            shapes[shape] += count
    return _shape_rule(shapes.most_common(1)[0][0]) if shapes else None


def refusal(columns: Collection[str], *, text_column: str | None, template: str | None, where: str) -> RecipeError:
    """The error for a source with these columns if no rule fits."""
    shown = ", ".join(sorted(columns)) or "none"
    rule = _asked_rule(text_column, template)
    if rule is None:
        names = [name for name in sorted(columns) if name.isascii() and name.isidentifier()] or ["NAME"]
        example = "\\n\\n".join(f"{{{name}}}" for name in names[:2])
        return RecipeError(
            f"{where}: no known shape of text among its columns: {shown}",
            hint=f"name the text, for example with `text_column={names[0]!r}` or `template='{example}'`",
        )
    wanted = rule_columns(rule)
    missing = [name for name in wanted if name not in columns]
    what = f"column {missing[0]!r}" if missing else f"object with all of {', '.join(wanted)}"
    return RecipeError(f"{where} has no {what}; its columns: {shown}", hint="check `text_column` or `template`")


def unseen_rule(*, text_column: str | None, template: str | None) -> Rule:
    """The rule for a source without any object: it is empty, or all its lines will be skipped with a reason."""
    return _asked_rule(text_column, template) or {"column": "text"}


def _asked_rule(text_column: str | None, template: str | None) -> Rule | None:
    if text_column is not None:
        return {"column": text_column}
    return {"template": template} if template is not None else None


def _shape(columns: Collection[str]) -> tuple[str, ...] | None:
    """The first shape that fits."""
    fitting = (shape for shape in _SHAPES if all(name in columns for name in shape if not name.endswith("?")))
    return next(fitting, None)


def _shape_rule(shape: Sequence[str]) -> Rule:
    if shape[0] == "chosen":
        return {"chosen": [*shape[2:], "chosen"]}
    if len(shape) > 1:
        return {"join": list(shape)}
    return {"column": "text"} if shape[0] == "text" else {"turns": shape[0]}


def rule_columns(rule: Rule) -> list[str]:
    """The columns that a rule reads."""
    if "column" in rule:
        return [rule["column"]]
    if "template" in rule:
        return list(dict.fromkeys(template_columns(rule["template"])))
    if "chosen" in rule:
        return list(rule["chosen"])
    return [rule["turns"]] if "turns" in rule else [name.rstrip("?") for name in rule["join"]]


def filter_columns(rule: Rule) -> list[str]:
    """The columns whose values a filter gets."""
    return list(rule.get("filter", ()))


def columns_to_read(rule: Rule) -> list[str]:
    """The columns of the text, and those for the filter."""
    return list(dict.fromkeys((*rule_columns(rule), *filter_columns(rule))))


def with_filter_columns(rule: Rule, wanted: Sequence[str], columns: Iterable[str], *, where: str) -> Rule:
    """The rule with the columns that a filter asks for. `columns` are read until all have been seen.

    A source without any column has no object either, or none that can be read.
    """
    missing, seen = dict.fromkeys(wanted), dict[str, None]()
    for name in columns:
        missing.pop(name, None)
        if not missing:
            break
        if len(seen) < MAX_NAMES:
            seen[name] = None
    if missing and seen:
        raise no_filter_column(next(iter(missing)), where=where, has=f"its columns: {', '.join(sorted(seen))}")
    return {**rule, "filter": list(wanted)}


def no_filter_column(name: str, *, where: str, has: str) -> RecipeError:
    """The error for a source that lacks a column that a filter asks for."""
    return RecipeError(
        f"{where} has no column {name!r}, which the filter asks for; {has}",
        hint="each parameter of a filter after the text is a column, unless it has a default value",
    )


def row_text(rule: Rule, row: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a row and "", or "" and the reason why the row is skipped."""
    if "column" in rule:
        return _string(row, rule["column"])
    if "template" in rule:
        return _filled(row, rule["template"])
    if "turns" in rule:
        return _turns(row, rule["turns"])
    return _preferred(row, rule["chosen"]) if "chosen" in rule else _joined(row, rule["join"])


def _filled(row: Mapping[str, Any], template: str) -> tuple[str, str]:
    values = {}
    for name in template_columns(template):
        value = row.get(name)
        if value is None or isinstance(value, bytes):
            value, reason = _string(row, name)
            if reason:
                return "", reason
        values[name] = value
    return fill(template, values), ""


def _joined(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, str]:
    parts = []
    for name in names:
        if name.endswith("?") and row.get(name[:-1]) is None:
            continue
        part, reason = _string(row, name.rstrip("?"))
        if reason:
            return "", reason
        parts.append(part)
    return _GLUE.join(part for part in parts if part), ""


def _string(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    value = row.get(name)
    if isinstance(value, str):
        return value, ""
    if isinstance(value, bytes):
        try:
            return value.decode(), ""
        except UnicodeDecodeError:
            return "", "invalid_utf8"
    if value is None:
        return "", "null_text" if name in row else "missing_field"
    return "", "not_text"


def _turns(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    turns = row.get(name)
    if turns is None:
        return "", "null_text" if name in row else "missing_field"
    if not isinstance(turns, list):
        return "", "not_text"
    texts = []
    for turn in turns:
        text = _turn_text(turn)
        if text is None:
            return "", "not_text"
        texts.append(text)
    return _GLUE.join(text for text in texts if text), ""


def _preferred(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, str]:
    """The preferred answer, a string or turns, behind what was asked unless the answer repeats that."""
    texts = []
    for name in names:
        text, reason = (_turns if isinstance(row.get(name), list) else _string)(row, name)
        if reason:
            return "", reason
        texts.append(text)
    *asked, answer = texts
    return _GLUE.join(part for part in (*(one for one in asked if not answer.startswith(one)), answer) if part), ""


def _turn_text(turn: Any) -> str | None:
    """The text of one turn, which may be a string, parts, or an object with either; None for anything else."""
    if isinstance(turn, str):
        return turn
    if isinstance(turn, list):
        parts = [_turn_text(part) for part in turn]
        return _GLUE.join(part for part in parts if part) if None not in parts else None
    if isinstance(turn, dict):
        for key in _TURN_TEXT:
            if turn.get(key) is not None:
                return _turn_text(turn[key])
        return ""
    return None


# What a turn says about itself, and is not a part of it.
_ABOUT_TURN = ("role", "from", "name", "type", "id", "weight", "train", "loss")


def parts_left_out(turns: Any) -> set[str]:
    """The names of the parts of a conversation that are not text, such as tool_calls or image_url."""
    found: set[str] = set()
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, dict):
            continue
        spoken = next((key for key in _TURN_TEXT if turn.get(key) is not None), None)
        if spoken is None and isinstance(turn.get("type"), str):
            found.add(turn["type"])
        else:
            found |= {key for key, value in turn.items() if value and key not in (*_ABOUT_TURN, spoken)}
        if spoken is not None:
            found |= parts_left_out(turn[spoken]) if isinstance(turn[spoken], list | dict) else set()
    return found


# A dictionary column can repeat one stored text a million times, so the size of the file bounds nothing.
MAX_BATCH_ROWS = 1 << 14


class TableFormat(SourceFormat, Protocol):
    """A format with rows in sections, whose schema tells the columns. Its modules add `columns`, `sections`, `read`."""

    has_columns: ClassVar[bool] = True
    has_sections: ClassVar[bool] = True
    positions_are_bytes: ClassVar[bool] = False

    def columns(self, path: str, source: Source) -> list[str]:
        """The names of the columns, in order."""

    def find_text(self, path: str, source: Source, *, text_column: str | None, template: str | None) -> Rule:
        return find_rule(self.columns(path, source), text_column=text_column, template=template, where=path)

    def check(self, path: str, source: Source) -> None:
        self.columns(path, source)

    def extent(self, path: str, source: Source) -> Extent:
        sizes = tuple(section.text_bytes for section in self.sections(path, source))
        return Extent(text_bytes=sum(sizes), sections=sizes)


def check_columns(schema: pa.Schema, rule: Rule, path: str) -> None:
    """Refuse a schema in which a column of the rule occurs twice, or the text column does not contain text."""
    for name in columns_to_read(rule):
        if len(schema.get_all_field_indices(name)) != 1:
            raise RecipeError(f"{path} has several columns {name!r}", hint="rename all but one of them")
    for name in rule_columns(rule):
        _check_text_column(schema.field(name), rule, path)


def _check_text_column(field: pa.Field, rule: Rule, path: str) -> None:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    binaries = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    if "column" in rule and not any(is_kind(kind) for is_kind in (*texts, *binaries)):
        raise RecipeError(
            f"{path}: column {field.name!r} contains {kind}, not text", hint="name a text column with `text_column`"
        )


def table_batch(index: int, table: pa.RecordBatch, rule: Rule, row: int) -> Batch:
    """The texts of some rows, of which `row` is the first."""
    positions = np.arange(row, row + table.num_rows, dtype=np.int64)
    wanted = filter_columns(rule)
    if "column" not in rule or wanted:
        rows = _rows(table)
        texts = [row_text(rule, row) if row is not None else ("", "invalid_utf8") for row in rows]
        batch = judged_batch(index, ((at, *text) for at, text in zip(positions.tolist(), texts, strict=True)))
        kept = (row for row, (_, reason) in zip(rows, texts, strict=True) if row is not None and not reason)
        return replace(batch, beside=tuple({name: row[name] for name in wanted} for row in kept)) if wanted else batch
    text = plain_text(table.column(rule["column"]))
    if not text.null_count:
        return make_batch(index, text, positions)
    null = text.is_null().to_numpy(zero_copy_only=False)
    skips = [Skip(index, int(position), "null_text") for position in positions[null]]
    return make_batch(index, text.drop_null(), positions[~null], skips)


def _rows(table: pa.RecordBatch) -> list[dict[str, Any] | None]:
    """Rows as Python objects; None for a row with a string that is not valid UTF-8."""
    try:
        rows: list[dict[str, Any] | None] = table.to_pylist()
    except UnicodeDecodeError:
        rows = []
        for index in range(table.num_rows):
            try:
                rows += table.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                rows.append(None)
    except (ValueError, OverflowError) as error:  # such as a date beyond those that Python has
        raise pa.ArrowInvalid(f"a value cannot be given to Python: {error}") from None
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
