"""What `import tokenmill` offers: names, types and results, as an editor and a notebook see them."""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill import arguments, errors, jax
from tokenmill.loader import loader
from tokenmill.recipe import Recipe

ADAPTERS: list[ModuleType] = [jax]
for framework in ("torch", "lightning", "transformers", "torchtitan"):
    if importlib.util.find_spec(framework) is not None:
        ADAPTERS.append(importlib.import_module(f"tokenmill.{framework}"))


def public() -> Iterator[tuple[str, Any]]:
    """Every public class and function, of the adapters too."""
    for name in tokenmill.__all__:
        yield name, getattr(tokenmill, name)
    for module in ADAPTERS:
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
                yield f"{module.__name__}.{name}", value


PUBLIC = dict(public())


def functions(value: Any) -> Iterator[Callable[..., Any]]:
    """The function itself, or the methods and properties of a class that are ours."""
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for name, member in inspect.getmembers(value):
            function = member.fget if isinstance(member, property) else member
            is_ours = str(getattr(function, "__module__", "")).startswith("tokenmill")
            if inspect.isfunction(function) and is_ours and (name == "__init__" or not name.startswith("_")):
                yield function


def test_names_are_declared_once_and_shown_as_declared() -> None:
    assert dir(tokenmill) == sorted(tokenmill.__all__) == sorted(tokenmill._HOME_OF)
    assert len(set(tokenmill.__all__)) == len(tokenmill.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenmill.nothing  # noqa: B018


def test_every_error_is_public() -> None:
    def tree(root: type[errors.TokenmillError]) -> set[str]:
        return {root.__name__}.union(*map(tree, root.__subclasses__()))

    assert {name for name in tree(errors.TokenmillError) if hasattr(errors, name)} <= set(tokenmill.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_types_are_known(name: str) -> None:
    value = PUBLIC[name]
    if inspect.isclass(value):
        typing.get_type_hints(value)
    for function in functions(value):
        hints = typing.get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in ("self", "_"):
                assert parameter.name in hints, f"{function.__qualname__} does not say what {parameter.name} is"
            if parameter.kind is parameter.VAR_KEYWORD:
                said = hints[parameter.name]
                assert typing.get_origin(said) is Unpack, f"{function.__qualname__} takes anything"
            if parameter.name == "dataset":
                assert hints["dataset"] is not Any, function.__qualname__


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isclass(value)])
def test_classes_have_a_repr_of_their_own(name: str) -> None:
    assert PUBLIC[name].__repr__ is not object.__repr__


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isfunction(value)])
def test_what_functions_return_is_public(name: str) -> None:
    said = typing.get_type_hints(PUBLIC[name]).get("return")
    for kind in (said, *typing.get_args(said)):
        if dataclasses.is_dataclass(kind):
            assert getattr(tokenmill, kind.__name__) is kind


def keywords(function: Callable[..., Any]) -> set[str]:
    """The names that a call may give."""
    hints, found = typing.get_type_hints(function), set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= set(typing.get_type_hints(typing.get_args(hints[parameter.name])[0]))
        elif parameter.name != "self":
            found.add(parameter.name)
    return found


def test_fields_of_a_recipe_are_keywords() -> None:
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert set(typing.get_type_hints(arguments.RecipeOptions)) == fields - {"sources"}
    assert fields <= keywords(tokenmill.prepare)
    assert fields <= keywords(tokenmill.plan)
    assert fields <= keywords(tokenmill.stream.__init__)


def test_adapters_take_what_the_loader_takes() -> None:
    takes = keywords(loader.DataLoader.__init__)
    assert keywords(jax.DataLoader.__init__) == takes | {"sharding"}
    assert keywords(jax.DataSource.__init__) < takes


def test_the_adapter_for_torch_takes_what_the_loader_takes() -> None:
    pytest.importorskip("torch")
    from tokenmill import torch

    takes = keywords(loader.DataLoader.__init__)
    assert keywords(torch.DataLoader.__init__) == takes | {"pin_memory"}
    assert keywords(torch.IterableDataset.__init__) == takes | {"pin_memory"}
    assert keywords(torch.Dataset.__init__) < takes
    assert keywords(torch.TextDataset.__init__) == keywords(tokenmill.stream.__init__)


def test_the_adapter_for_lightning_takes_what_the_loader_takes() -> None:
    pytest.importorskip("lightning")
    from tokenmill import lightning

    takes = keywords(loader.DataLoader.__init__)
    assert keywords(lightning.DataModule.__init__) == takes | {"pin_memory", "val_split"}


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_adapters_are_attributes_that_load_when_they_are_used() -> None:
    pytest.importorskip("torch")
    run(
        "import sys, tokenmill\n"
        "assert not {'torch', 'numpy', 'tokenmill.jax'} & set(sys.modules)\n"
        "tokenmill.jax.DataLoader\n"
        "assert 'torch' not in sys.modules\n"
        "tokenmill.torch.DataLoader\n"
    )


def test_errors_load_nothing_else() -> None:
    run("import sys, tokenmill\ntokenmill.LockedError\nassert not {'numpy', 'pyarrow', 'msgspec'} & set(sys.modules)")


def test_type_checkers_are_told_that_there_are_types() -> None:
    assert importlib.resources.files("tokenmill").joinpath("py.typed").is_file()


def test_results_are_shown_in_one_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50, seed=1))
    options: Any = {"tokenizer": "byte", "split": {"val": 0.2}, "workers": 1}
    planned = tokenmill.plan(source, tmp_path / "out", **options)
    assert repr(planned).startswith("PlanResult(1 file, 1 of 1 unit left: about ")
    done = tokenmill.prepare(source, tmp_path / "out", **options)
    totals = f"{done.tokens:,} tokens, {done.documents:,} documents in train, val"
    assert repr(done).startswith(f"PrepareResult('{tmp_path}/out': {totals}; done in ")
    assert repr(tokenmill.prepare(source, tmp_path / "out", **options)).endswith("; complete already)")
    assert repr(tokenmill.verify(tmp_path / "out", quick=True)).endswith(" files; ok)")
    (tmp_path / "out/train/00000.bin").write_bytes(b"")
    assert "train/00000.bin: " in repr(tokenmill.verify(tmp_path / "out"))
