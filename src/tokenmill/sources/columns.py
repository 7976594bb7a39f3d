"""The text of a document that comes as columns or fields.

A rule says how: one column, a template, parts joined by a blank line, or the turns of a
conversation. Without the user's word, the rule is found from the names of the columns, by the
first of these shapes that fits: text; input/output; instruction(+input)/output; messages;
conversations; prompt/response; question/answer; prompt/completion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tokenmill.errors import RecipeError
from tokenmill.template import fill, template_columns

Rule = dict[str, Any]

# Each shape: the columns that must be there, those that may be, and the order in which they are joined.
_SHAPES: tuple[tuple[str, ...], ...] = (
    ("input", "output"),
    ("instruction", "input?", "output"),
    ("messages",),
    ("conversations",),
    ("prompt", "response"),
    ("question", "answer"),
    ("prompt", "completion"),
)
# Of a table that could not be read when it was planned.
UNREAD: Rule = {"unread": True}
_TURN_TEXT = ("content", "value", "text")
_GLUE = "\n\n"


def find_rule(columns: Collection[str], *, text_column: str | None, template: str | None, where: str) -> Rule:
    """The rule for a source with these columns."""
    if text_column is not None:
        _require(columns, [text_column], where)
        return {"column": text_column}
    if template is not None:
        _require(columns, template_columns(template), where)
        return {"template": template}
    if "text" in columns:
        return {"column": "text"}
    # input/output stands before instruction/output in the list of shapes, but a table with an
    # instruction column is an instruction table: its instruction must not be lost.
    shapes = sorted(_SHAPES, key=lambda shape: "instruction" not in shape) if "instruction" in columns else _SHAPES
    for shape in shapes:
        if all(name in columns for name in shape if not name.endswith("?")):
            if len(shape) == 1:
                return {"turns": shape[0]}
            return {"join": [name for name in shape if name.rstrip("?") in columns]}
    raise RecipeError(
        f"{where}: no known shape of text among its columns: {', '.join(sorted(columns)) or 'none'}",
        hint='name the text with --text-column NAME or --template "{a}\\n\\n{b}"',
    )


def unseen_rule(*, text_column: str | None, template: str | None) -> Rule:
    """The rule for a source that shows no columns: it is empty or bad, and its documents will tell."""
    return {"template": template} if template is not None else {"column": text_column or "text"}


def rule_columns(rule: Rule) -> list[str]:
    """The columns that a rule reads."""
    if "column" in rule:
        return [rule["column"]]
    if "template" in rule:
        return list(dict.fromkeys(template_columns(rule["template"])))
    return [rule["turns"]] if "turns" in rule else [name.rstrip("?") for name in rule["join"]]


def row_text(rule: Rule, row: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a row and "", or "" and the reason why it has none."""
    if "column" in rule:
        return _string(row, rule["column"])
    if "template" in rule:
        values = {}
        for name in template_columns(rule["template"]):
            value = row.get(name)
            if value is None or isinstance(value, bytes):
                value, reason = _string(row, name)
                if reason:
                    return "", reason
            values[name] = value
        return fill(rule["template"], values), ""
    if "turns" in rule:
        return _turns(row, rule["turns"])
    parts = []
    for name in rule["join"]:
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


def _turn_text(turn: Any) -> str | None:
    """What is said in one turn; a turn may be a string, or hold its text as parts. None if it is neither."""
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


def _require(columns: Collection[str], wanted: list[str], where: str) -> None:
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise RecipeError(
            f"{where} has no column {missing[0]!r}; its columns: {', '.join(sorted(columns)) or 'none'}",
            hint="check --text-column or --template",
        )
