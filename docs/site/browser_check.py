"""Clicks through the built site in Chromium: ``python docs/site/browser_check.py``.

Every page at the width of a phone and of a desktop: no error in the console, no failed request, no
horizontal scrolling; formulas and diagrams are drawn; the search finds a name and leads to it.
Needs playwright and a Chromium (of playwright, or Debian's).
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

from playwright.sync_api import Browser, Page, Request, Route, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}
# what Material loads to draw diagrams, and the pages that have some
MERMAID = "https://unpkg.com/mermaid"
# wider than the window, and not inside of a box that scrolls by itself
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def serve() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def pages() -> list[str]:
    """The address of every page, relative to the site."""
    found = (path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
    return sorted("" if path == "." else f"{path}/" for path in found)


class Visit:
    """One window of the browser, and what it complained about."""

    def __init__(self, browser: Browser, origin: str, width: str, mermaid: Path | None) -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self.origin = origin
        self.page: Page = browser.new_context(viewport=size).new_page()
        self.complaints: list[str] = []
        self._mermaid = mermaid
        self.page.route("**/*", self._route)
        self.page.on("pageerror", lambda error: self.complain(f"exception: {error}"))
        self.page.on("requestfailed", self._read_failure)
        self.page.on("console", self._read_console)

    def complain(self, text: str) -> None:
        self.complaints.append(f"{urlparse(self.page.url).path} {text}")

    def _read_failure(self, request: Request) -> None:
        # a request is aborted when the page is left before its answer has come
        if request.failure != "net::ERR_ABORTED":
            self.complain(f"failed: {request.url} {request.failure}")

    def _read_console(self, message: object) -> None:
        kind, text = getattr(message, "type", ""), getattr(message, "text", "")
        if kind in ("error", "warning"):
            self.complain(f"console {kind}: {text}")

    def _route(self, route: Route) -> None:
        address = route.request.url
        if address.startswith(MERMAID) and self._mermaid:
            route.fulfill(path=self._mermaid, content_type="text/javascript")
        elif address.startswith((self.origin, MERMAID, "data:", "blob:")):
            route.continue_()
        else:
            self.complain(f"request elsewhere: {address}")
            route.abort()

    def look(self, path: str) -> None:
        self.page.goto(f"{self.origin}/{path}", wait_until="load")
        if self.page.locator(".mermaid").count():
            # drawn diagrams are put into a closed shadow root of a <div class="mermaid">
            self.page.wait_for_selector("div.mermaid", timeout=20_000)
        extra = self.page.evaluate(TOO_WIDE)
        if extra > 0:
            self.complain(f"is {extra} px wider than the window")
        if self.page.locator("article").inner_text().strip() == "":
            self.complain("is empty")

    def search(self, words: str, leads_to: str) -> None:
        self.page.goto(self.origin)
        if self.page.viewport_size and self.page.viewport_size["width"] < 900:
            self.page.locator("label.md-header__button[for=__search]").click()
        field = self.page.locator("input.md-search__input")
        field.click()
        # the search listens to keys, not to a changed value
        field.press_sequentially(words)
        result = self.page.locator(f"a.md-search-result__link[href*='{leads_to}']").first
        result.wait_for(timeout=20_000)
        result.click()
        self.page.wait_for_url(f"**/{leads_to}**")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mermaid", type=Path, help="serve this file instead of unpkg's mermaid")
    parser.add_argument("--screenshots", type=Path, help="write a picture of each page here")
    arguments = parser.parse_args()
    server = serve()
    origin = f"http://127.0.0.1:{server.server_port}"
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for width in WIDTHS:
            visit = Visit(browser, origin, width, arguments.mermaid)
            for path in pages():
                visit.look(path)
                if arguments.screenshots:
                    name = (path.strip("/").replace("/", "-") or "home") + f"-{width}.png"
                    arguments.screenshots.mkdir(parents=True, exist_ok=True)
                    visit.page.screenshot(path=arguments.screenshots / name)
            visit.search("FilterNotCalledError", leads_to="docs/reference/plugs/")
            visit.search("oversmoothing", leads_to="docs/")
            complaints += [f"{width}: {text}" for text in visit.complaints]
        visit = Visit(browser, origin, "desktop", arguments.mermaid)
        visit.page.goto(origin)
        for tab in ("Concepts", "How-to", "Reference", "Results", "Architecture"):
            visit.page.locator(f".md-tabs__link:has-text('{tab}')").click()
            visit.page.wait_for_selector(f".md-tabs__item--active:has-text('{tab}')")
        visit.page.goto(f"{origin}/docs/concepts/")
        if visit.page.locator("math").first.bounding_box() is None:
            visit.complain("has no drawn formula")
        complaints += visit.complaints
        browser.close()
    server.shutdown()
    if complaints:
        sys.exit("\n".join(complaints))
    print(
        f"{len(pages())} pages at {len(WIDTHS)} widths, search and tabs: nothing to complain about"
    )


if __name__ == "__main__":
    main()
