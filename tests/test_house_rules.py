"""Rules that hold over the whole source: who writes, who loads what, what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

SOURCE = Path(tokenmill.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", [path for path in MODULES if "storage" not in path.parts], ids=str)
def test_no_module_but_storage_writes_files(path: Path) -> None:
    writers = {"write_text", "write_bytes", "tofile", "save", "savez", "rename", "replace_file", "mkdir", "makedirs"}
    for call in calls(path):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name == "open":
            texts = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
            modes = [text for text in texts if isinstance(text, str) and set(text) <= set("rwaxbt+") and text]
            assert not any(set(mode) & set("wax+") for mode in modes), f"{path}:{call.lineno}"
        owner = getattr(getattr(call.func, "value", None), "id", "")
        assert not (name in writers and owner in {"os", "shutil", "np", "Path"}), f"{path}:{call.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_nothing_unsafe_is_called(path: Path) -> None:
    for call in calls(path):
        name = ast.unparse(call.func)
        assert name not in {"eval", "exec", "pickle.loads", "pickle.load", "yaml.load", "os.system"}, f"{path}"
        for keyword in call.keywords:
            assert keyword.arg not in {"allow_pickle", "trust_remote_code", "shell"}, f"{path}:{call.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_is_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450
    if path.name != "__init__.py" or path.read_text(encoding="utf-8"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "it says what it is for"


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_tokenmill_loads_nothing_heavy() -> None:
    heavy = {"numpy", "pyarrow", "gigatoken", "awkward", "typer", "rich", "tiktoken", "tokenizers"}
    assert not heavy & modules_after("import tokenmill")


def test_the_public_names_are_there_and_no_others_are_shown() -> None:
    assert dir(tokenmill) == sorted(tokenmill.__all__)
    for name in tokenmill.__all__:
        assert callable(getattr(tokenmill, name)), name


def test_a_public_name_stays_a_function_after_its_module_was_imported() -> None:
    modules_after(
        "import tokenmill, tokenmill.build.plan, tokenmill.maintenance.verify; assert callable(tokenmill.plan)"
    )
