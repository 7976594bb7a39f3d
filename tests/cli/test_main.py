"""The entry point: what it loads, what it starts early, which exit code it gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Command, make_texts, write_jsonl
from tokenmill import __version__
from tokenmill.cli.main import _early_workers
from tokenmill.executors import forkserver
from tokenmill.resources import num_cores


def test_the_version_is_told_without_loading_the_parser() -> None:
    code = (
        "import sys; sys.argv = ['tokenmill', '--version']\n"
        "from tokenmill.cli.main import main; main()\n"
        "sys.exit(len({'typer', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"tokenmill {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nothing",), 2, "No such command"),
        (("prepare", "--nothing"), 2, "No such option"),
        (("verify", "here"), 2, "error: "),
        (("prepare", "a.jsonl"), 2, "hint: give the folder or URL of the dataset with --output OUT"),
    ],
)
def test_exit_codes_and_errors_of_the_process(
    terminal: Command, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = terminal(*arguments, code=code)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "verify out",
        "prepare --help",
        "prepare a -o out -j 1",
        "prepare a -o out --workers=1",
        "prepare a -o out --executor ray",
        "plan a",
    ],
)
def test_commands_without_worker_processes_start_none_early(line: str) -> None:
    with _early_workers(line.split()):
        assert forkserver._unused == []


@pytest.mark.skipif(num_cores() == 1, reason="workers start early on another core")
@pytest.mark.parametrize("line", ["prepare a -o out", "prepare a -o out -j 12"])
def test_workers_of_a_build_load_while_the_command_does(line: str) -> None:
    with _early_workers(line.split()):
        assert len(forkserver._unused) == 1
    assert forkserver._unused == []


def test_an_interrupted_build_says_how_much_is_saved(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(60, seed=1))
    (tmp_path / "once.py").write_text(
        "from pathlib import Path\n"
        "seen = []\n"
        "def keep(text):\n"
        "    seen.append(text)\n"
        "    if len(seen) == 40 and not Path('stopped').exists():\n"
        "        Path('stopped').touch()\n"
        "        raise KeyboardInterrupt\n"
        "    return True\n"
    )
    build = ("prepare", "a.jsonl", "-o", "out", "--tokenizer", "byte", "--unit-bytes", "2KB", "-j", 1)
    said = tokenmill(*build, "--filter", "once:keep", code=130).stderr.splitlines()[-1]
    assert said.startswith("Interrupted. ")
    assert said.endswith(" units are saved; run the same command to resume.")
    assert "error" not in said
    tokenmill(*build, "--filter", "once:keep")
