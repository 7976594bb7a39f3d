"""The text of a document that comes as columns or fields.

A rule says how: one column, a template, parts joined by a blank line, or the turns of a
conversation. Without the user's word, the rule is found from the names of the columns, by the
first of these shapes that fits: text; instruction(+input)/output; input/output; messages;
conversations; prompt/response; question/answer; prompt/completion.

All rows of a table have the same columns. An object of JSON lines has fields of its own, so that a
part that may be absent stays in the rule, however many objects lack it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenmill.errors import RecipeError
from tokenmill.template import fill, template_columns

Rule = dict[str, Any]

# Each shape: the columns that must be there, those that may be, and the order in which they are joined. What has an
# instruction and an output is told by them first: its instruction must not be lost.
_SHAPES: tuple[tuple[str, ...], ...] = (
    ("text",),
    ("instruction", "input?", "output"),
    ("instruction?", "input", "output"),
    ("messages",),
    ("conversations",),
    ("prompt", "response"),
    ("question", "answer"),
    ("prompt", "completion"),
)
# Of a source that could not be read when it was planned.
UNREAD: Rule = {"unread": True}
_TURN_TEXT = ("content", "value", "text")
_GLUE = "\n\n"


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
    """The rule for JSON lines some of whose objects have these fields: that of the shape which most of them have.

    None if none of them shows its text. A single odd one among them decides nothing, wherever it stands.
    """
    rule = _asked_rule(text_column, template)
    if rule is not None:
        wanted = rule_columns(rule)
        return rule if any(all(name in fields for name in wanted) for fields in objects) else None
    shapes = Counter(shape for fields in objects if (shape := _shape(fields)) is not None)
    return _shape_rule(shapes.most_common(1)[0][0]) if shapes else None


def refusal(columns: Collection[str], *, text_column: str | None, template: str | None, where: str) -> RecipeError:
    """Why there is no rule for a source with these columns."""
    shown = ", ".join(sorted(columns)) or "none"
    rule = _asked_rule(text_column, template)
    if rule is None:
        return RecipeError(
            f"{where}: no known shape of text among its columns: {shown}",
            hint='name the text with --text-column NAME or --template "{a}\\n\\n{b}"',
        )
    wanted = rule_columns(rule)
    missing = [name for name in wanted if name not in columns]
    what = f"column {missing[0]!r}" if missing else f"object with all of {', '.join(wanted)}"
    return RecipeError(f"{where} has no {what}; its columns: {shown}", hint="check --text-column or --template")


def unseen_rule(*, text_column: str | None, template: str | None) -> Rule:
    """The rule for a source that shows no columns: it is empty or bad, and its documents will tell."""
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
    if len(shape) > 1:
        return {"join": list(shape)}
    return {"column": "text"} if shape[0] == "text" else {"turns": shape[0]}


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
