"""Text templates over columns: `"{title}\\n\\n{body}"`, names in braces and nothing else."""

from __future__ import annotations

import json
import string

from tokenmill.errors import RecipeError

_HINT = 'write it like "{title}\\n\\n{body}"'


def template_columns(template: str) -> list[str]:
    """The columns that a template names, in order."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise RecipeError(f"{template!r}: {error}", hint=_HINT) from None
    fields = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    plain = all(
        name and not spec and conversion is None and not set(name) & set(".[]") for name, spec, conversion in fields
    )
    if not fields or not plain:
        raise RecipeError(f"{template!r} must name columns, and nothing else, in its braces", hint=_HINT)
    return [name for name, _, _ in fields]


def fill(template: str, values: dict[str, object]) -> str:
    """The template with the columns' values in place of their names."""
    return "".join(
        literal + (_as_text(values[name]) if name is not None else "")
        for literal, name, _, _ in string.Formatter().parse(template)
    )


def _as_text(value: object) -> str:
    """A value as others write it too: what is no text and no number, as JSON."""
    if isinstance(value, bool | list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
