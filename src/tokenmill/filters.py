"""The user's own filter: a function of a text that says whether to keep it, named `module:function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from tokenmill import records
from tokenmill.errors import RecipeError

_HINT = "write it like --filter mymodule:keep, with mymodule.py on the Python path"


def load_filter(name: str) -> Callable[[str], bool]:
    """The function that `module:function` names."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise RecipeError(f"--filter {name!r} does not name a function", hint=_HINT)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"--filter {name!r}: {error}", hint=_HINT) from None
    if not callable(function):
        raise RecipeError(f"--filter {name!r} is not a function", hint=_HINT)
    return function  # type: ignore[no-any-return]  # getattr knows no signature


def code_digest(name: str) -> str:
    """A digest of the module that holds a filter: another code may keep other documents."""
    function = load_filter(name)
    try:
        return records.digest(inspect.getsource(inspect.getmodule(function) or function))
    except (OSError, TypeError):
        return "no source"
