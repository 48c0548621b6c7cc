"""Pages in Chromium, on a screen and on a phone, and what they complain about there."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = {"phone": (390, 844), "tablet": (1024, 768), "screen": (1440, 900)}
# wider than the window, and not inside of a box that scrolls by itself
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser from $CHROMIUM, or where Debian and others put it."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        message = "NO PAGE WAS TESTED: install playwright and Chromium, or set $CHROMIUM"
        # a skip is a letter; a warning is in the summary
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Window:
    """A page of a browser that loads nothing but ``allowed`` addresses, and ``replaced`` ones."""

    def __init__(
        self,
        browser: Any,
        size: str = "screen",
        scheme: str = "light",
        allowed: tuple[str, ...] = ("file:",),
        replaced: dict[str, Path] | None = None,
    ) -> None:
        self.width, height = SIZES[size]
        viewport = {"width": self.width, "height": height}
        context = browser.new_context(
            viewport=viewport, color_scheme=scheme, is_mobile=size == "phone"
        )
        self.page = context.new_page()
        self.complaints: list[str] = []
        self._allowed = (*allowed, "data:", "blob:")
        self._replaced = replaced or {}
        self.page.route("**/*", self._route)
        self.page.on("pageerror", lambda error: self.complain(f"exception: {error}"))
        self.page.on("requestfailed", self._read_failure)
        self.page.on("console", self._read_console)

    def complain(self, text: str) -> None:
        self.complaints.append(f"{urlparse(self.page.url).path} {text}")

    def open(self, address: str | Path) -> None:
        """Load a page, and wait until its scripts have run; nothing may stick out to the side."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self.page.goto(url, wait_until="load")
        if (extra := self.run(TOO_WIDE)) > 0:
            self.complain(f"is {extra} px wider than the window")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.page.evaluate(script)

    def _read_failure(self, request: Any) -> None:
        # a request is aborted when the page is left before its answer has come
        if request.failure != "net::ERR_ABORTED":
            self.complain(f"failed: {request.url} {request.failure}")

    def _read_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complain(f"console {message.type}: {message.text}")

    def _route(self, route: Any) -> None:
        address = route.request.url
        for start, path in self._replaced.items():
            if address.startswith(start):
                return route.fulfill(path=path, content_type="text/javascript")
        if address.startswith(self._allowed):
            return route.continue_()
        self.complain(f"request elsewhere: {address}")
        return route.abort()
