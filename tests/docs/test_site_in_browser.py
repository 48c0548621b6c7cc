"""The built site in a browser: every page is drawn, the search finds names, tabs lead somewhere.

``make docs-browser`` builds the site first. Without a network, $MERMAID is the path of
mermaid.min.js.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.browser import Window, chromium

SITE = Path(__file__).parents[2] / "build" / "site"
# what Material loads to draw diagrams
MERMAID = "https://unpkg.com/mermaid"
pytestmark = pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=SITE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module", params=["phone", "screen"])
def window(request: pytest.FixtureRequest, origin: str) -> Iterator[Window]:
    path = os.environ.get("MERMAID")
    replaced = {MERMAID: Path(path)} if path else {}
    with chromium() as browser:
        yield Window(browser, request.param, allowed=(origin, MERMAID), replaced=replaced)


def test_every_page_is_drawn(window: Window, origin: str) -> None:
    found = [path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html")]
    for path in sorted(found):
        window.open(f"{origin}/{path}/")
        if window.page.locator(".mermaid").count():
            # drawn diagrams are put into a closed shadow root of a <div class="mermaid">
            window.page.wait_for_selector("div.mermaid", timeout=20_000)
        if window.page.locator("article").inner_text().strip() == "":
            window.complain("is empty")
    window.open(f"{origin}/docs/concepts/")
    assert window.page.locator("math").first.bounding_box(), "no formula is drawn"
    assert window.complaints == []


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [("FilterNotCalledError", "docs/reference/plugs/"), ("oversmoothing", "docs/")],
)
def test_search(window: Window, origin: str, words: str, leads_to: str) -> None:
    window.open(origin)
    if window.width < 900:
        window.page.locator("label.md-header__button[for=__search]").click()
    field = window.page.locator("input.md-search__input")
    field.click()
    # the search listens to keys, not to a changed value
    field.press_sequentially(words)
    result = window.page.locator(f"a.md-search-result__link[href*='{leads_to}']").first
    result.wait_for(timeout=20_000)
    result.click()
    window.page.wait_for_url(f"**/{leads_to}**")
    assert window.complaints == []


def test_tabs(window: Window, origin: str) -> None:
    window.open(origin)
    if window.width < 900:
        return
    links = window.page.locator(".md-tabs__link").all_inner_texts()
    assert len(links) > 3
    for tab in links[1:]:
        window.page.locator(f".md-tabs__link:has-text('{tab.strip()}')").first.click()
        window.page.wait_for_selector(f".md-tabs__item--active:has-text('{tab.strip()}')")
