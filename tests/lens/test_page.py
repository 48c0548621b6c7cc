"""The page in a real browser, from a file, without a network, on a screen and on a phone.

Screenshots of every run are kept in ``test-artefacts/lens`` to be looked at.
"""

from __future__ import annotations

import copy
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import timm
import torch

import gfsa
from gfsa.lens import LensReport
from support.chromium import Browser, find_chromium
from support.reports import example_report, example_trajectory

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

    def choose(select: str, value: str) -> None:
        browser.run(
            f"(() => {{ const s = document.getElementById('{select}'); s.value = '{value}';"
            "s.dispatchEvent(new Event('change')); })()"
        )

    for select, value, plot in (
        ("singular-depth", "0", "singular"),
        ("response-depth", "2", "response"),
    ):
        before = paths(browser, plot)
        choose(select, value)
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
