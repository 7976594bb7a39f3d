"""The viewer in a real browser: every page in both themes and two widths, by keyboard and pointer, with axe-core.

`make browser` runs it: it needs Debian's chromium, and axe-core of npm. With --pictures FOLDER it saves what it saw.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import tokenmill as api
from conftest import write_jsonl
from tokenmill import Viewer

ROOT = Path(__file__).parent.parent.parent
AXE = ROOT / ".venv-browser/node_modules/axe-core/axe.min.js"
PICTURES = os.environ.get("PICTURES")
# Chromium asks for updates and more at its start, which a test must not.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=2"> \u202eevil\x1b[31m & "quotes"'
PAGES = {
    "overview": "/",
    "documents": "/documents",
    "document": "/document?n=1",
    "sample": "/sample?n=3&seq_len=200",
    "step": "/step?step=2&seq_len=64&batch_size=4&packing=best_fit&rank=1&world_size=2",
    "search": "/search?q=mill",
    "beside": "/beside?n=1",
    "build": "/build",
    "refusal": "/document?n=999999",
}


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("viewer")
    texts = ["The mill turns raw text into tokens.\n\n\tIt is quick.", HOSTILE, "数千の文書 🙂 naïve", "long " * 3000]
    write_jsonl(folder / "a.jsonl", texts + [f"document {number} of the mill, " * 9 for number in range(300)])
    path = api.prepare(folder / "a.jsonl", folder / "out", tokenizer="gpt2", split="val=0.05", workers=1).output
    other = api.prepare(folder / "a.jsonl", folder / "bytes", tokenizer="byte", workers=1).output
    with api.view(path, beside=other, tokenizer="byte") as viewer:
        yield viewer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(
    params=[("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390)], ids=lambda kind: f"{kind[0]}-{kind[1]}"
)
def page(request: pytest.FixtureRequest, browser: Browser, viewer: Viewer) -> Iterator[Page]:
    """A page that has opened the viewer, in one theme and width. Errors in its console fail the test."""
    theme, width = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(viewer.url)
    yield page
    context.close()
    assert [error for error in errors if "404" not in error] == []


def open_page(page: Page, viewer: Viewer, path: str) -> None:
    page.goto(f"http://127.0.0.1:{viewer.port}{path}")


def axe(page: Page) -> list[str]:
    """What axe-core finds wrong. It is put in as a script of the test's, which the page's policy does not hold for."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = page.evaluate("axe.run().then(result => result.violations)")
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}" for one in found]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_is_accessible_and_runs_nothing_of_a_document(page: Page, viewer: Viewer, name: str) -> None:
    open_page(page, viewer, PAGES[name])
    if PICTURES:
        size = page.viewport_size or {}
        theme = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
        page.screenshot(path=f"{PICTURES}/{name}-{theme}-{size['width']}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img, main iframe").count() == 0
    assert axe(page) == []


def test_the_keyboard_leads_through_documents_and_tokens(page: Page, viewer: Viewer) -> None:
    open_page(page, viewer, "/document?n=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#token").text_content() == page.locator(".t").nth(1).get_attribute("title")
    assert page.locator(".chosen").count() == 1
    page.keyboard.press("j")
    page.wait_for_url("**n=1")
    page.keyboard.press("k")
    page.wait_for_url("**n=0")
    page.keyboard.press("/")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    page.wait_for_url("**n=3")
    assert "Document 3" in (page.locator("h1").text_content() or "")


def test_a_pointer_tells_what_a_token_is(page: Page, viewer: Viewer) -> None:
    open_page(page, viewer, "/document?n=0")
    token = page.locator(".t").first
    token.hover()
    assert page.locator("#token").text_content() == token.get_attribute("title")


def test_forms_lead_where_they_say(page: Page, viewer: Viewer) -> None:
    open_page(page, viewer, "/search")
    page.fill("input[name=q]", "quick")
    page.get_by_role("button", name="Search").click()
    page.locator(".list a").first.click()
    page.wait_for_url("**/document?**")
    page.get_by_role("link", name="Step").click()
    page.fill("input[name=seq_len]", "32")
    page.get_by_role("button", name="Show").click()
    assert page.locator("article").count() == 4
    page.get_by_role("link", name="next →").click()
    page.wait_for_url("**step=1**")
    page.get_by_role("link", name="Text").click()
    page.fill("textarea", HOSTILE)
    page.get_by_role("button", name="Encode").click()
    assert page.locator(".columns section").count() == 3
    assert page.evaluate("window.hacked") is None
    assert axe(page) == []


def test_without_the_token_a_browser_sees_nothing(browser: Browser, viewer: Viewer) -> None:
    context = browser.new_context()
    page = context.new_page()
    open_page(page, viewer, "/document?n=0")
    assert "Open the URL" in (page.text_content("body") or "")
    context.close()
