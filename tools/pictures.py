"""Make the pictures of the docs from a real run: a terminal as SVG, the viewer and the report in Debian's chromium.

make pictures
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from html import escape
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import tokenmill

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
COLUMNS = 100
# Receipts of a build that is then killed.
NUM_RECEIPTS = 3
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
PREPARE = "tokenmill prepare corpus/*.jsonl -o data/code --split val=0.01 --unit-bytes 1MB --no-progress"
# Of a picture, in CSS pixels.
WIDTH, HEIGHT = 1100, 720


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        write_corpus(Path("corpus"))
        (FOLDER / "terminal.svg").write_text(terminal(record()), encoding="utf-8")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
            picture_viewer(browser)
            picture_report(browser)
            browser.close()


def write_corpus(folder: Path) -> None:
    """Python's own standard library, a module a line, in four files."""
    import json

    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(library.glob("*.py")) + sorted(library.glob("*/*.py"))
    for number in range(4):
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in modules[number::4]]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"library-{number}.jsonl").write_text(lines, encoding="utf-8")


def record() -> str:
    """A build that is killed, the same command again, and a check of the result: what a terminal shows."""
    shown = f"$ {PREPARE}\n"
    with subprocess.Popen(["sh", "-c", f"exec {command_line(PREPARE)}"], stderr=subprocess.PIPE) as build:
        receipts = Path("data/code/.build/receipts")
        while build.poll() is None and len(list(receipts.glob("*"))) < NUM_RECEIPTS:
            time.sleep(0.001)
        build.send_signal(signal.SIGKILL)
    shown += f"{'Killed' if build.returncode == -signal.SIGKILL else ''}\n"
    for command in (PREPARE, "tokenmill verify data/code", "tokenmill peek data/code --document 7 --max-tokens 64"):
        done = subprocess.run(
            ["sh", "-c", command_line(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": str(COLUMNS)},
        )
        shown += f"\n$ {command}\n{done.stdout}"
    return shown.replace(f"{os.getcwd()}/", "")


def command_line(command: str) -> str:
    return command.replace("tokenmill", f"{sys.executable} -m tokenmill", 1)


def terminal(text: str) -> str:
    """A text as a picture of a terminal, in the fonts that the reader has."""
    size, width = 13, 7.83
    lines = text.rstrip("\n").split("\n")
    full_width, full_height = round(COLUMNS * width) + 40, round(len(lines) * size * 1.5) + 56
    rows = []
    for number, line in enumerate(lines):
        kind = ' class="command"' if line.startswith("$ ") else ""
        rows.append(f'<text x="20" y="{46 + number * size * 1.5:.1f}"{kind} xml:space="preserve">{escape(line)}</text>')
    dots = "".join(f'<circle cx="{20 + 18 * n}" cy="17" r="5" fill="#4b5158"/>' for n in range(3))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {full_height}" role="img">
<title>A build that is killed, resumed and verified</title>
<style>text {{ font: {size}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d6d9dc }}
.command {{ fill: #8fbdf5 }}</style>
<rect width="{full_width}" height="{full_height}" rx="8" fill="#16181b"/>
{dots}
{chr(10).join(rows)}
</svg>
"""


def picture_viewer(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    with tokenmill.view("data/code") as viewer:
        page.goto(viewer.url)
        page.goto(f"http://127.0.0.1:{viewer.port}/document?n=7")
        for _ in range(9):
            page.keyboard.press("ArrowRight")
        page.screenshot(path=str(FOLDER / "viewer.png"))
    page.close()


def picture_report(browser: Browser) -> None:
    tokenmill.report("data/code", output="report.html")
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(Path("report.html").resolve().as_uri())
    page.screenshot(path=str(FOLDER / "report.png"))
    page.close()


if __name__ == "__main__":
    if shutil.which("chromium") is None:
        sys.exit("chromium is not installed: run make browser once")
    main()
