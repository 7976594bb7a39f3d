"""Every setting, function and command that a message names exists where the user who reads it is.

Which functions of the library may raise a message is read from the source: a graph of who names whom, from the public
functions down. Methods are followed if their name is unique. So the graph has a few ways that no call takes; those that
lead to a message with other settings are listed below, with the reason.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import get_type_hints

import pytest
from typer.main import get_command

import tokenmill
from test_house_rules import MODULES, SOURCE
from tokenmill.arguments import RecipeOptions, StreamOptions
from tokenmill.cli.commands import app
from tokenmill.formats.base import Options
from tokenmill.formats.templar import consolidate

Place = tuple[str, str]  # a module, and a function, Class.method or constant in it
FUNCTIONS = ("prepare", "plan", "export", "import_", "verify", "repair", "push", "pull", "peek", "open", "cluster")
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]  # it is a group
# Messages that the functions without their settings never show, and why.
UNREACHABLE = {
    "`ray_address` is given without Ray": "plan takes no ray_address",
    "`placement='node-local'` is for the nodes of a cluster": "plan takes no placement",
    "`filter` is only used with `source`": "repair verifies without a filter",
    "add `source='sample'`, or drop `filter`": "the same",
    "`eot_token` does not apply to {}": "only a recipe has an eot_token",
    "`config` takes the path of a YAML file": "stream reads no recipe file",
    "start the viewer with `tokenizer`": "only the viewer renders pages",
}


@cache
def trees() -> dict[str, ast.Module]:
    found = {}
    for path in MODULES:
        parts = ("tokenmill", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def definitions() -> dict[Place, ast.AST]:
    """Functions, methods and constants of all modules."""
    found: dict[Place, ast.AST] = {}
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found[module, node.name] = node
            elif isinstance(node, ast.ClassDef):
                found |= {
                    (module, f"{node.name}.{one.name}"): one for one in node.body if isinstance(one, ast.FunctionDef)
                }
            elif isinstance(node, ast.Assign):
                found |= {(module, one.id): node for one in node.targets if isinstance(one, ast.Name)}
    return found


@cache
def imports(module: str) -> dict[str, Place]:
    nodes = (node for node in ast.walk(trees()[module]) if isinstance(node, ast.ImportFrom))
    return {one.asname or one.name: (node.module or "", one.name) for node in nodes for one in node.names}


@cache
def methods() -> dict[str, set[Place]]:
    found = defaultdict(set)
    for module, name in definitions():
        if "." in name:
            found[name.partition(".")[2]].add((module, name))
    return found


@cache
def resolve(module: str, name: str) -> set[Place]:
    """What a name means in a module: a function, the methods that make an object, or a constant."""
    if module not in trees():
        return set()
    if (module, name) in definitions():
        return {(module, name)}
    makers = {(module, f"{name}.{method}") for method in ("__init__", "__post_init__")} & definitions().keys()
    return makers or (resolve(*imports(module)[name]) if name in imports(module) else set())


@cache
def named(place: Place) -> frozenset[Place]:
    """What a function, method or constant names."""
    return frozenset(each_named(place))


def each_named(place: Place) -> Iterator[Place]:
    module, owner = place[0], place[1].partition(".")[0]
    for node in ast.walk(definitions()[place]):
        if isinstance(node, ast.Name):
            yield from resolve(module, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            own = (module, f"{owner}.{node.attr}")
            if node.value.id in ("self", "cls") and own in definitions():
                yield own
            elif node.value.id in imports(module):
                yield from resolve(".".join(imports(module)[node.value.id]), node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = methods()[node.func.attr]
            yield from found if len(found) == 1 else ()


@cache
def reached_from(name: str) -> frozenset[Place]:
    home = "tokenmill.formats.templar" if name == "consolidate" else tokenmill._HOME_OF[name]
    found: set[Place] = set()
    to_do = [(home, name)]
    while to_do:
        place = to_do.pop()
        if place not in found:
            found.add(place)
            to_do += named(place)
    return frozenset(found)


@cache
def settings_of(name: str) -> frozenset[str]:
    function = consolidate if name == "consolidate" else getattr(tokenmill, name)
    found = set(inspect.signature(function).parameters)
    if name in ("prepare", "plan"):  # options of a layout are a part of `layout`
        found |= {*get_type_hints(RecipeOptions), *Options.__dataclass_fields__}
    if name == "stream":
        found |= set(get_type_hints(StreamOptions))
    return frozenset(found)


def sentences(place: Place) -> Iterator[tuple[int, str]]:
    """The texts of a definition, with `{}` where a value is put in."""
    nodes = list(ast.walk(definitions()[place]))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def wrong_settings(module: str) -> Iterator[str]:
    """Settings that a message names, and that a function which may raise it does not take."""
    for place in (place for place in definitions() if place[0] == module):
        readers = [name for name in (*FUNCTIONS, "stream", "consolidate") if place in reached_from(name)]
        for line, text in sentences(place):
            plain = re.sub(r"`[^`]*`", "", text)
            others = [name for name in FUNCTIONS if re.search(rf"\b{name.rstrip('_')}\b", plain)]
            for setting in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", text) if text not in UNREACHABLE else ():
                if not any(setting in settings_of(name) for name in others):  # else it says of which function
                    lacking = [name for name in readers if setting not in settings_of(name)]
                    yield from (f"{module}:{line}: {name} has no {setting}: {text}" for name in lacking)


@pytest.mark.parametrize("module", [name for name in trees() if ".cli" not in name])
def test_settings_exist_in_every_function_that_names_them(module: str) -> None:
    assert list(wrong_settings(module)) == []


def test_the_graph_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint of `push` at an option that only others have."""
    place = ("tokenmill.maintenance.push_pull", "_numbers")
    bad = ast.parse("def _numbers(shards):\n    raise RecipeError('x', hint='use `restart=True`')").body[0]
    monkeypatch.setitem(definitions(), place, bad)
    found = list(wrong_settings(place[0]))
    assert {line.partition(": ")[2].partition(" ")[0] for line in found} == {"push", "pull"}
    assert {"push", "verify", "prepare"} <= {name for name in FUNCTIONS if len(reached_from(name)) > 100}


@pytest.mark.parametrize("module", trees())
def test_commands_and_options_that_texts_name_exist(module: str) -> None:
    options = {name for command in COMMANDS.values() for param in command.params for name in param.opts}
    for place in (place for place in definitions() if place[0] == module):
        for line, text in sentences(place):
            for command in re.findall(r"(?:[Rr]un|same|again:|with|or) tokenmill ([a-z]+)\b(?! that)", text):
                assert command in COMMANDS, f"{module}:{line}: {text}"
            if module.startswith("tokenmill.cli") and not text.startswith("--"):
                rest = re.sub(r"slots=.*|ray \S+.*", "", text)
                for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
                    assert option in {*options, "--help", "--like-this", "--version"}, f"{module}:{line}: {text}"
