"""Rules that hold over the whole source: who writes, who loads what, what is public."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import tokenmill
from tokenmill.arguments import RecipeOptions
from tokenmill.cli.options import shell_names

SOURCE = Path(tokenmill.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = Path(__file__).parent


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
def test_a_module_says_what_it_is_for(path: Path) -> None:
    if path.name != "__init__.py" or path.read_text(encoding="utf-8"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


# What an adapter offers has the name that users of its framework look for.
ADAPTERS = ("torch.py", "jax.py", "lightning.py", "torchtitan.py", "transformers.py")
ADAPTED = {"DataLoader", "Dataset", "DataModule", "IterableDataset"}


def test_no_class_name_is_used_twice() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not (path.name in ADAPTERS and node.name in ADAPTED):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


# Everyone else asks a `SourceFormat` or a `TokenizerSpec` what it can do.
MODULES_OF_KINDS = (
    *(Path("sources", f"{name}.py") for name in ("parquet", "arrow", "jsonl", "text", "reader")),
    *(path.relative_to(SOURCE) for path in SOURCE.glob("tokenizers/*.py")),
    Path("dataset/manifest.py"),  # it refuses unknown ones
)
KINDS = {"parquet", "arrow", "jsonl", "text", "byte", "char", "hf", "sentencepiece", "tiktoken"}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.relative_to(SOURCE) not in MODULES_OF_KINDS], ids=str
)
def test_the_kind_of_a_source_or_a_tokenizer_is_compared_in_its_own_modules_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            operands = [ast.unparse(operand) for operand in (node.left, *node.comparators)]
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if {operand.rpartition(".")[2] for operand in operands} & {"kind", "kinds"}:
                assert not constants & KINDS, f"{path}:{node.lineno}"
            if any(operand.endswith("source.kind") for operand in operands):
                assert not any(operand.isupper() for operand in operands), f"{path}:{node.lineno}"


def test_every_module_has_a_test_at_the_mirrored_path() -> None:
    modules = [path.relative_to(SOURCE) for path in MODULES if not path.name.startswith("__")]
    missing = {str(module) for module in modules if not (TESTS / module.parent / f"test_{module.name}").exists()}
    assert missing == set(), "write their tests"


def texts(path: Path) -> list[tuple[int, str]]:
    """The sentences of a module that are not docstrings: with `{}` where a value is put in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if " " in text or "`" in text:
            found.append((node.lineno, text))
    return found


LIBRARY = [path for path in MODULES if "cli" not in path.parts]
OTHER_PROGRAMS = re.compile(r"\b(ray (start|status)|ssh|jq|aws|ulimit|ls|tr|iconv|gzip|bzip2|xz|lz4)\b[^`);,]*")
# Lines of a cluster file, which `ray up` runs, and those that run over SSH.
COMMANDS_OF_HOSTS = ("hosts.py", "host_cluster.py")


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.name not in COMMANDS_OF_HOSTS], ids=str)
def test_the_library_names_no_flags(path: Path) -> None:
    for line, text in texts(path):
        rest = OTHER_PROGRAMS.sub("", text)
        assert not re.search(r"(?<![\w-])--?[a-zA-Z][\w-]*", rest), f"{path}:{line}: {text!r}"


def keywords_of_the_library() -> set[str]:
    found = {"ray_address"}
    for name in ("prepare", "plan", "export", "import_", "verify", "repair", "push", "pull", "cluster", "open", "view"):
        found |= set(inspect.signature(getattr(tokenmill, name)).parameters)
    return found | set(get_type_hints(RecipeOptions))


@pytest.mark.parametrize("path", LIBRARY, ids=str)
def test_settings_that_messages_name_exist_in_python_and_in_the_shell(path: Path) -> None:
    keywords, options = keywords_of_the_library(), shell_names("")
    for line, text in texts(path):
        for quoted in re.findall(r"`([^`]+)`", text):
            where = f"{path}:{line}: {text!r}"
            if setting := re.fullmatch(r"([a-z_]+)(=.*)?", quoted):
                assert setting[1] in keywords, where
                assert setting[1] in options, where
            elif call := re.fullmatch(r"tokenmill\.(\w+)(\(.*\))?", quoted):
                function = inspect.signature(getattr(tokenmill, call[1])).parameters
                for keyword in re.findall(r"(\w+)=", call[2] or ""):
                    assert keyword in function, where
            else:
                assert OTHER_PROGRAMS.match(quoted) or quoted in OTHER_QUOTES or "{}" in quoted, where


OTHER_QUOTES = ("tokenizer: gpt2", "node1 16", "name = value")


@pytest.mark.parametrize("path", LIBRARY, ids=str)
def test_hints_quote_the_settings_that_they_name(path: Path) -> None:
    """So that a shell user is shown the option. Names without an underscore are words, too."""
    settings = {name for name in keywords_of_the_library() & set(shell_names("")) if "_" in name}
    for call in calls(path):
        for keyword in call.keywords:
            if keyword.arg == "hint":
                plain = re.sub(r"`[^`]*`|\w+:\w+=\S+", "", ast.unparse(keyword.value))
                named = settings & set(re.findall(r"\w+", " ".join(re.findall(r"[\'\"](.*)[\'\"]", plain))))
                assert not named, f"{path}:{call.lineno}: {named}"


# What only Python calls. Its messages may name keywords that no command has.
OF_PYTHON_ONLY = {"loader", "text_stream.py", "torch.py", "torch_workers.py", "jax.py", *ADAPTERS}


@pytest.mark.parametrize(
    "path",
    [path for path in LIBRARY if not OF_PYTHON_ONLY & set(path.parts) and path.name not in COMMANDS_OF_HOSTS],
    ids=str,
)
def test_no_sentence_shows_a_keyword_that_the_shell_would_not_translate(path: Path) -> None:
    """`name=value` in backticks becomes an option for a shell user; without them, it stays Python."""
    both = keywords_of_the_library() & set(shell_names(""))
    for line, text in texts(path):
        plain = re.sub(r"`[^`]*`|\w+:\w+=\S+", "", text)
        assert not both & set(re.findall(r"(?<![\w.-])(\w+)=", plain)), f"{path}:{line}: {text!r}"


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_tokenmill_loads_nothing_heavy() -> None:
    heavy = {"numpy", "pyarrow", "gigatoken", "awkward", "typer", "rich", "tiktoken", "tokenizers"}
    assert not heavy & modules_after("import tokenmill")


def test_a_public_name_stays_a_function_after_its_module_was_imported() -> None:
    modules_after(
        "import tokenmill, tokenmill.build.plan, tokenmill.maintenance.verify; assert callable(tokenmill.plan)"
    )
