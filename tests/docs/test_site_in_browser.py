"""The built site in a browser: every page is drawn, no code is cut.

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


def test_the_list_of_models_has_a_filter(window: Window, origin: str) -> None:
    window.open(f"{origin}/docs/supported/")
    window.page.locator("input.filter").fill("transformers:bert ")
    left = window.page.locator("article tbody tr:not([hidden])").all_inner_texts()
    assert left
    assert all("bert" in row.lower() for row in left)
