"""The page in a real browser, from a file, without a network, on a screen and on a phone.

Screenshots of every run are kept in ``test-artefacts/lens`` to be looked at.
"""

from __future__ import annotations

import base64
import copy
import csv
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import timm
import torch

import gfsa
from gfsa.lens import LensReport
from support.reports import example_report, example_trajectory

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


PLOTS = {
    "cosine",
    "rank",
    "residual",
    "norm",
    "singular",
    "response",
    "layers",
    "heat",
    "head-response",
    "head-sigma",
    "entropy",
    "energy",
}
PATHS = {"path", "path-heads"}
SIZES = {"phone": (390, 844), "tablet": (1024, 768), "screen": (1440, 900)}
ARTEFACTS = Path(__file__).parents[2] / "test-artefacts" / "lens"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        message = (
            "THE LENS'S PAGE WAS NOT TESTED: no Chromium was found; install it (Debian: "
            "apt-get install chromium), or set $CHROMIUM to its path"
        )
        # a skip is a letter; a warning is in the summary
        warnings.warn(message, stacklevel=2)
        pytest.skip(message)
    opened = Browser(path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens") / "report with a space.html"
    report = example_report()
    report.trajectories = {"GFSA <all>": example_trajectory()}
    report.to_html(path)
    return path


def marks(browser: Browser, plot: str) -> int:
    return int(browser.run(f"document.querySelectorAll('[data-plot=\"{plot}\"] .mark').length"))


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector('{selector}').textContent"))


def paths(browser: Browser, plot: str) -> list[str]:
    return browser.run(
        f"[...document.querySelectorAll('[data-plot=\"{plot}\"] path.mark')]"
        ".map(p => p.getAttribute('d'))"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_opens_and_draws_everything(browser: Browser, page: Path, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    browser.size(width, height, mobile=size == "phone")
    browser.media(scheme)
    browser.open(page)
    assert browser.complaints() == []
    drawn = set(
        browser.run("[...document.querySelectorAll('[data-plot]')].map(e => e.dataset.plot)")
    )
    assert drawn == PLOTS | PATHS
    for plot in drawn:
        assert marks(browser, plot) > 0, plot
    assert "NaN" not in browser.run("document.querySelector('main').innerHTML")
    # one cell a head and layer, for 4 layers of 4 heads
    assert marks(browser, "heat") == 16
    # nothing sticks out to the side
    assert browser.run("document.documentElement.scrollWidth") == width
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(ARTEFACTS / f"{size}-{scheme}.png")


@pytest.mark.parametrize("size", ["phone", "screen"])
def test_answers_to_hover_and_click(browser: Browser, page: Path, size: str) -> None:
    width, height = SIZES[size]
    browser.size(width, height, mobile=False)
    browser.media("light")
    browser.open(page)
    assert browser.run("document.getElementById('tip').hidden") is True

    browser.hover('[data-plot="cosine"] svg')
    assert browser.run("document.getElementById('tip').hidden") is False
    said = text(browser, "#tip")
    assert "after layer 2" in said
    assert "plain:" in said
    assert "GFSA <all>:" in said
    inside = browser.run(
        "(() => { const b = document.getElementById('tip').getBoundingClientRect();"
        "return b.left >= 0 && b.right <= document.documentElement.clientWidth })()"
    )
    assert inside

    browser.hover('.cell[data-row="1"][data-column="2"]')
    said = text(browser, "#tip")
    assert "layer 2, head 3" in said
    # c = (w0, w1 + (2−K)·wK, (K−1)·wK) with K = 3, w = (0.3, 1, 0.1)
    assert "H = 0.3·I + 0.9·A + 0.2·A²" in said

    before = paths(browser, "head-response")
    browser.click('.cell[data-row="1"][data-column="2"]')
    assert "GFSA <all>, layer 2, head 3" in text(browser, "#head-title")
    after = paths(browser, "head-response")
    assert after != before
    browser.press("ArrowDown")
    assert "layer 3, head 3" in text(browser, "#head-title")

    browser.click('.panel[data-depth="1"]')
    assert browser.run("document.getElementById('response-depth').value") == "1"
    assert browser.complaints() == []


def test_choices_change_what_is_shown(browser: Browser, page: Path) -> None:
    browser.size(1440, 900)
    browser.media("light")
    browser.open(page)

    def choose(control: str, value: str) -> None:
        browser.run(
            f"(() => {{ const s = document.getElementById('{control}'); s.value = '{value}';"
            "s.dispatchEvent(new Event('change')); })()"
        )

    for control, value, plot in (
        ("singular-depth", "0", "singular"),
        ("response-depth", "2", "response"),
    ):
        before = paths(browser, plot)
        choose(control, value)
        assert paths(browser, plot) != before, plot
    fills = "[...document.querySelectorAll('.cell')].map(c => getComputedStyle(c).fill)"
    shown = browser.run(fills)
    # heads differ, so colours do
    assert len(set(shown)) >= 4
    choose("heat-quantity", "entropy")
    assert browser.run(fills) != shown
    choose("heat-model", "0")
    assert "plain, layer" in text(browser, "#head-title")
    assert browser.complaints() == []


def test_zooms_to_the_data_and_back(browser: Browser, page: Path) -> None:
    browser.size(1440, 900)
    browser.media("light")
    browser.open(page)
    labels = "document.querySelectorAll('[data-plot=\"residual\"] svg text')"
    ticks = f"[...{labels}].map(t => t.textContent)"
    whole = browser.run(ticks)
    assert {"0", "1"} <= set(whole)
    browser.click('[data-plot="residual"] [data-tool="zoom"]')
    # the residuals of the example lie between 0.8 and 1
    assert "0.9" in browser.run(ticks)
    assert "0.2" not in browser.run(ticks)
    browser.click('[data-plot="residual"] [data-tool="zoom"]')
    assert browser.run(ticks) == whole
    assert browser.complaints() == []


def test_pictures_and_numbers_can_be_downloaded(browser: Browser, page: Path) -> None:
    browser.size(1440, 900)
    browser.media("light")
    browser.open(page)
    figure = "document.querySelector('[data-plot=\"{}\"]')"
    table = list(csv.reader(browser.run(f"csvText({figure.format('cosine')})").splitlines()))
    assert table[0][:3] == ["series", "layer", "cosine similarity"]
    report = example_report(spectral=False, attention=False)
    shown = {(name, int(depth)): float(value) for name, depth, value, *_ in table[1:]}
    expected = {
        (name, reading.depth): pytest.approx(reading.cosine, abs=1e-5)
        for name, model in report.models.items()
        for reading in model.features
    }
    assert shown == expected
    cells = list(csv.reader(browser.run(f"csvText({figure.format('heat')})").splitlines()))
    assert cells[0][:2] == ["layer", "head"]
    assert len(cells) == 1 + 16
    for plot in PLOTS | PATHS:
        svg = ElementTree.fromstring(browser.run(f"svgText({figure.format(plot)})"))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg", plot
        # it needs no style sheet of the page
        styles = [node.get("style", "") for node in svg.iter() if node.get("class")]
        assert styles, plot
        assert all("fill:" in style and "var(" not in style for style in styles), plot
    saved = browser.run(
        "(() => { const seen = []; const links = HTMLAnchorElement.prototype;"
        "const real = links.click;"
        "links.click = function () { seen.push(this.download, this.protocol); };"
        "const buttons = document.querySelectorAll('[data-plot=\"rank\"] .tools button');"
        "for (const button of buttons) button.click();"
        "links.click = real; return seen; })()"
    )
    assert saved == ["rank.svg", "blob:", "rank.csv", "blob:"]
    assert browser.complaints() == []


def test_the_csv_button_writes_no_formulas(browser: Browser, tmp_path: Path) -> None:
    report = LensReport({}, trajectories={"a": example_trajectory()})
    report.to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    row = browser.run("csvOf([['=cmd|a', '+cmd|a', '@a', '-0.5', -0.5, 'plain']])")
    assert row == "'=cmd|a,'+cmd|a,'@a,-0.5,-0.5,plain\n"


def test_coefficients_over_training_need_no_model(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "coefficients.html"
    LensReport({}, trajectories={"GFSA": example_trajectory()}).to_html(path)
    browser.size(390, 844, mobile=True)
    browser.open(path)
    assert browser.complaints() == []
    drawn = browser.run("[...document.querySelectorAll('[data-plot]')].map(e => e.dataset.plot)")
    assert set(drawn) == PATHS
    # three coefficients of four layers; then four layers of four heads
    assert len(paths(browser, "path")) == 3 * 4
    assert len(paths(browser, "path-heads")) == 4 * 4
    before = paths(browser, "path-heads")
    browser.run(
        "(() => { const s = document.getElementById('path-power'); s.value = '2';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert paths(browser, "path-heads") != before
    assert "over 300 steps" in text(browser, ".headline")
    assert browser.run("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("together", [False, True], ids=["alone", "compared"])
def test_a_method_that_is_no_polynomial_has_a_page(
    browser: Browser, tmp_path: Path, together: bool
) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    scaled = copy.deepcopy(model)
    gfsa.baselines.apply(scaled, "attnscale")
    models = {"attnscale": scaled} | ({"plain": model} if together else {})
    report = gfsa.diagnose(models, torch.randn(2, 3, 32, 32), progress=False)
    assert "not a polynomial" in next(iter(report.models["attnscale"].skipped.values()))
    path = tmp_path / "other.html"
    report.to_html(path)
    browser.size(1440, 900)
    browser.open(path)
    assert browser.complaints() == []
    assert marks(browser, "cosine") > 0
    if together:
        # the one that has maps to show is looked at first; the other says why it has none
        browser.run("document.getElementById('heat-model').value = '0'")
        browser.run("document.getElementById('heat-model').onchange()")
    assert "not a polynomial" in text(browser, '[data-plot="heat"] .canvas')
    assert browser.complaints() == []
