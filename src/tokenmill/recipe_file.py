"""A recipe in a YAML file, read into plain fields. What they mean is for recipe.py to say."""

from __future__ import annotations

import os
from typing import Any

import yaml

from tokenmill.errors import RecipeError

_HINT = "a recipe is a YAML mapping, with lines like `tokenizer: gpt2`"


class _Loader(yaml.SafeLoader):
    """Plain values only, and no key twice: YAML forbids it, and PyYAML would take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    where = f"{self.name}, line {key.start_mark.line + 1}"
                    raise RecipeError(f"{where}: {key.value!r} stands twice", hint="keep one of the two")
                seen.add(key.value)
        return node


def read_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields that the file gives, as they are written there."""
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            fields = _Loader(file).get_single_data()
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe file {name}", hint="--config takes the path of a YAML file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # PyYAML lets some of a date's through
        raise RecipeError(f"cannot read the recipe {name}: {_cause(error)}", hint=_HINT) from None
    if not isinstance(fields, dict):
        raise RecipeError(f"{name} is not a YAML mapping", hint=_HINT)
    if odd := [type(key).__name__ for key in fields if not isinstance(key, str)]:
        raise RecipeError(f"{name}: the name of a field is a text, not of the type {odd[0]}", hint=_HINT)
    return fields


def _cause(error: Exception) -> str:
    """What is wrong, and in which line where that is known, in one sentence."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
