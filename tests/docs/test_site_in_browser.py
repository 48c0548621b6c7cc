"""The built site in a browser: every page is drawn, no code is cut, the search leads somewhere.

``make docs-browser`` builds the site first. A page may load nothing from another host.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.browser import Window, chromium

SITE = Path(__file__).parents[2] / "build" / "site"
# blocks of code of which a part is to the right of what is seen
CUT = """[...document.querySelectorAll("article pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => code.textContent.slice(0, 60))"""
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


@pytest.fixture(scope="module", params=["phone", "tablet", "screen"])
def window(request: pytest.FixtureRequest, origin: str) -> Iterator[Window]:
    with chromium() as browser:
        yield Window(browser, request.param, allowed=(origin,))


def test_every_page_is_drawn(window: Window, origin: str) -> None:
    found = [path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html")]
    for path in sorted(found):
        window.open(f"{origin}/{path}/")
        for code in window.run(CUT):
            window.complain(f"cuts off code: {code!r}")
        if window.page.locator("article").inner_text().strip() == "":
            window.complain("is empty")
    window.open(f"{origin}/docs/concepts/")
    assert window.page.locator("math").first.bounding_box(), "no formula is drawn"
    assert window.complaints == []


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("FilterNotCalledError", "docs/reference/plugs/"),
        ("install", "docs/start/"),
        ("learning rate", "docs/transformers/"),
    ],
)
def test_search_has_the_right_page_first(
    window: Window, origin: str, words: str, first: str
) -> None:
    window.open(origin)
    if window.width < 900:
        window.page.locator("label.md-header__button[for=__search]").click()
    field = window.page.locator("input.md-search__input")
    field.click()
    # the search listens to keys, not to a changed value
    field.press_sequentially(words)
    # the last results, not those of the first letters; a link names the words that were found
    last = words.split()[-1]
    result = window.page.locator(f"a.md-search-result__link[href*='{last}']").first
    result.wait_for(timeout=20_000)
    best = window.page.locator("a.md-search-result__link").first
    assert first in (best.get_attribute("href") or "")
    assert window.complaints == []


def test_the_list_of_models_has_a_filter(window: Window, origin: str) -> None:
    window.open(f"{origin}/docs/supported/")
    window.page.locator("input.filter").fill("transformers:bert ")
    left = window.page.locator("article tbody tr:not([hidden])").all_inner_texts()
    assert left
    assert all("bert" in row.lower() for row in left)


def test_tabs(window: Window, origin: str) -> None:
    window.open(origin)
    if window.width < 1220:
        return
    links = window.page.locator(".md-tabs__link").all_inner_texts()
    assert len(links) > 3
    for tab in links[1:]:
        window.page.locator(f".md-tabs__link:has-text('{tab.strip()}')").first.click()
        window.page.wait_for_selector(f".md-tabs__item--active:has-text('{tab.strip()}')")
