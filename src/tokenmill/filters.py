"""The user's own filter, named `module:function`: it gets the text of a document, a str, and gives true to keep it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from tokenmill import records
from tokenmill.errors import RecipeError

_HINT = "write it like --filter mymodule:keep; PYTHONPATH=DIR finds modules that are in the folder DIR"


def load_filter(name: str) -> Callable[[str], bool]:
    """The function that `module:function` names."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise RecipeError(f"--filter {name!r} does not name a function", hint=_HINT)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"--filter {name!r}: {error}", hint=_HINT) from None
    except Exception as error:  # a module is code, and may raise anything
        said = f"--filter {name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise RecipeError(said, hint="mend the module") from None
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


def check_filter(made_with: object, named: str | None, *, where: str) -> None:
    """Refuse to do a dataset's units again without the filter of its identity, or after its code has changed."""
    before = made_with if isinstance(made_with, dict) else {"name": None}
    name = before.get("name")
    if name != named:
        raise RecipeError(
            f"{where} was made with {f'the filter {name}' if name else 'no filter'}, and {named or 'none'} is named",
            hint=f"add --filter {name}, if you trust that function" if name else "drop --filter",
        )
    if named is not None and before.get("code") != code_digest(named):
        raise RecipeError(
            f"the code of the filter {named} has changed since {where} was made",
            hint="bring its module back as it was then, or prepare the dataset again",
        )
