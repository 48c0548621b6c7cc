"""A real browser for tests: headless Chromium, spoken to over a pipe, with nothing in between.

The protocol is Chrome's own (DevTools), one JSON message after another, each ended by a zero byte,
on file descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Chromium's path: from $CHROMIUM, or where Debian and others put it."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One headless Chromium with one page in it."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="gfsa-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        arguments = [
            path,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            # pages come from files; whatever asks for a network finds none
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--disable-background-networking",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]

        def hand_over() -> None:
            # through high numbers first: one of the ends may already be 3 or 4
            high = [os.dup2(fd, 100 + n) for n, fd in enumerate((to_browser, from_browser))]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            arguments,
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(30)
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            return answer["result"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {seconds} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError(f"Chromium ended with {self._process.poll()}")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Make the window so large; a mobile one lays pages out as a phone does."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """What the page's media queries see."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=kind, features=features)

    def open(self, path: Path) -> None:
        """Load a page from a file, and wait until its scripts have run."""
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 30
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(max(0.1, end - time.monotonic())))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, once it has been scrolled into view."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return box[0], box[1]

    def hover(self, selector: str) -> None:
        """Point at the middle of an element with the mouse."""
        x, y = self.middle(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Press and let go of the left button on the middle of an element."""
        self.hover(selector)
        x, y = self.middle(selector)
        button = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mousePressed", **button)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", **button)

    def press(self, key: str) -> None:
        """Press a key such as ``ArrowDown`` on what has the focus."""
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it prints."""
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF")["data"]))

    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions, and requests for anything else."""
        # one more round trip: what was said before it has arrived
        self.run("0")
        found = []
        for event in self.events:
            params = event.get("params", {})
            method = event.get("method")
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails']}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(f"console: {params['args']}")
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {params['entry']['text']}")
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(f"request: {url}")
        return found

    def close(self) -> None:
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (RuntimeError, OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()
