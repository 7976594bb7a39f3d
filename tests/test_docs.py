"""The docs are true: what they show runs, and what is generated is current."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from conftest import Command, make_texts, write_parquet
from tokenmill.cli.commands import app

COMMANDS = tuple(get_command(app).commands)
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


GENERATE = runpy.run_path(str(ROOT / "docs/generate.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [path for pattern in ("*.md", "docs/**/*.md", ".github/**/*.md") for path in sorted(ROOT.glob(pattern))]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_tree_names_every_module_with_what_it_is_for() -> None:
    assert GENERATE["with_block"](CONTRIBUTING, "tree", GENERATE["tree"]()) == CONTRIBUTING, "run make docs"


def test_the_readme_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "src/tokenmill").glob("*/__init__.py")}
    (tree,) = re.findall(r"```\nsrc/tokenmill/\n(.*?)```", README, re.DOTALL)
    assert set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == packages


@pytest.mark.slow
def test_the_walks_name_the_files_that_run() -> None:
    found = runpy.run_path(str(ROOT / "tools/walks.py"))["count"]()
    (block,) = re.findall(r"<!-- walks -->\n(.*)<!-- /walks -->", CONTRIBUTING, re.DOTALL)
    walks = [re.findall(r"^\d+\. `(.*?)`", walk, re.MULTILINE) for walk in block.split("### ")[1:]]
    assert [set(walk) for walk in walks] == [set(files) for files in found.values()], "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_to_what_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            lines = [line for line in target.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
            assert anchor in [line.lstrip("# ").lower().replace(" ", "-") for line in lines], link


def test_the_make_targets_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([\w-]+)", page.read_text(encoding="utf-8")))
        assert named <= targets, page


def test_the_lowest_versions_are_those_of_the_dependencies() -> None:
    pins = runpy.run_path(str(ROOT / "tools/lowest.py"))["constraints"]()
    assert "pyarrow==18.0" in pins
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_reference_names_the_options_that_there_are(tokenmill: Command, command: str) -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"## tokenmill {command}\n(.*?)(?=\n## |\Z)", page, re.DOTALL)
    options = [
        set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", text, re.MULTILINE))
        for text in (section, tokenmill(command, "--help").stdout)
    ]
    assert options[0] == options[1], "run make docs"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(tokenmill: Command, command: str) -> None:
    shown = tokenmill(command, "--help").stdout
    assert f"tokenmill {command} " in shown
    assert "Example" in shown


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_parquet(tmp_path / "corpus/a.parquet", make_texts(400))
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code.replace("workers=16", "workers=2").replace("val=0.0005", "val=0.05")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted((ROOT / "docs/how-to").glob("*.md")), ids=lambda page: page.stem)
def test_the_python_of_a_how_to_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "corpus").mkdir()
    write_parquet(tmp_path / "corpus/a.parquet", make_texts(400))
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    frameworks = re.findall(r"\btokenmill\.(jax|lightning|torch|torchtitan|transformers)\b", code)
    for module in [*frameworks, *re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the page needs {module}, which is not installed")
    if "s3://" in code:
        bucket = request.getfixturevalue("bucket")
        bucket.put("corpus/a.parquet", (tmp_path / "corpus/a.parquet").read_bytes())
        code = code.replace("s3://bucket", bucket.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_readme_run(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_parquet(tmp_path / "corpus/a.parquet", make_texts(400))
    import zstandard

    chat = b'{"prompt": "a", "response": "b"}\n' * 10
    (tmp_path / "chat.jsonl.zst").write_bytes(zstandard.compress(chat))
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    commands = [line.partition("#")[0].strip() for line in lines if line.startswith("tokenmill ")]
    commands = [command for command in commands if not command.startswith("tokenmill view")]  # it runs until Ctrl-C
    assert len(commands) == 10
    # The first block and the second one prepare the same folder with two recipes.
    for group in (commands[:2], [*commands[2:4], *commands[4:]]):
        subprocess.run(["rm", "-rf", tmp_path / "data"], check=True)
        for command in group:
            arguments = command.removeprefix("tokenmill ").replace("corpus/*.parquet", "corpus/a.parquet")
            tokenmill(*[part.strip('"') for part in re.findall(r'"[^"]*"|\S+', arguments.replace("-j 16", "-j 2"))])
