"""The page of the lens in a real browser, from a file, without a network."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import timm
import torch

import gfsa
from support.browser import SIZES, Window, chromium
from support.lens import example_report

PLOTS = {
    *("cosine", "rank", "residual", "norm", "singular", "response", "layers"),
    *("heat", "head-response", "head-sigma", "entropy", "energy"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens") / "report with a space.html"
    example_report().to_html(path)
    return path


def marks(window: Window, plot: str) -> int:
    return int(window.run(f"document.querySelectorAll('[data-plot=\"{plot}\"] .mark').length"))


def text(window: Window, selector: str) -> str:
    return str(window.run(f"document.querySelector('{selector}').textContent"))


def paths(window: Window, plot: str) -> list[str]:
    return window.run(
        f"[...document.querySelectorAll('[data-plot=\"{plot}\"] path.mark')]"
        ".map(p => p.getAttribute('d'))"
    )


def opened(browser: Any, page: Path, size: str = "screen", scheme: str = "light") -> Window:
    window = Window(browser, size, scheme)
    window.open(page)
    return window


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_opens_and_draws_everything(browser: Any, page: Path, size: str, scheme: str) -> None:
    window = opened(browser, page, size, scheme)
    drawn = set(
        window.run("[...document.querySelectorAll('[data-plot]')].map(e => e.dataset.plot)")
    )
    assert drawn == PLOTS
    for plot in drawn:
        assert marks(window, plot) > 0, plot
    assert "NaN" not in window.run("document.querySelector('main').innerHTML")
    # one cell a head and layer, for 4 layers of 4 heads
    assert marks(window, "heat") == 16
    assert window.complaints == []


@pytest.mark.parametrize("size", ["phone", "screen"])
def test_answers_to_hover_and_click(browser: Any, page: Path, size: str) -> None:
    window = opened(browser, page, size)
    assert window.run("document.getElementById('tip').hidden") is True

    window.page.hover('[data-plot="cosine"] svg')
    assert window.run("document.getElementById('tip').hidden") is False
    said = text(window, "#tip")
    assert "after layer 2" in said
    assert "plain:" in said
    assert "GFSA <all>:" in said
    inside = window.run(
        "(() => { const b = document.getElementById('tip').getBoundingClientRect();"
        "return b.left >= 0 && b.right <= document.documentElement.clientWidth })()"
    )
    assert inside

    cell = '.cell[data-row="1"][data-column="2"]'
    window.page.hover(cell)
    said = text(window, "#tip")
    assert "layer 2, head 3" in said
    # c = (w0, w1 + (2−K)·wK, (K−1)·wK) with K = 3, w = (0.3, 1, 0.1)
    assert "H = 0.3·I + 0.9·A + 0.2·A²" in said

    before = paths(window, "head-response")
    window.page.click(cell)
    assert "GFSA <all>, layer 2, head 3" in text(window, "#head-title")
    assert paths(window, "head-response") != before
    window.page.keyboard.press("ArrowDown")
    assert "layer 3, head 3" in text(window, "#head-title")

    window.page.click('.panel[data-depth="1"]')
    assert window.run("document.getElementById('response-depth').value") == "1"
    assert window.complaints == []


def test_choices_change_what_is_shown(browser: Any, page: Path) -> None:
    window = opened(browser, page)

    def choose(control: str, value: str) -> None:
        window.run(
            f"(() => {{ const s = document.getElementById('{control}'); s.value = '{value}';"
            "s.dispatchEvent(new Event('change')); })()"
        )

    for control, value, plot in (
        ("singular-depth", "0", "singular"),
        ("response-depth", "2", "response"),
    ):
        before = paths(window, plot)
        choose(control, value)
        assert paths(window, plot) != before, plot
    fills = "[...document.querySelectorAll('.cell')].map(c => getComputedStyle(c).fill)"
    shown = window.run(fills)
    # heads differ, so colours do
    assert len(set(shown)) >= 4
    choose("heat-quantity", "entropy")
    assert window.run(fills) != shown
    choose("heat-model", "0")
    assert "plain, layer" in text(window, "#head-title")
    assert window.complaints == []


def test_zooms_to_the_data_and_back(browser: Any, page: Path) -> None:
    window = opened(browser, page)
    labels = "document.querySelectorAll('[data-plot=\"residual\"] svg text')"
    ticks = f"[...{labels}].map(t => t.textContent)"
    whole = window.run(ticks)
    assert {"0", "1"} <= set(whole)
    window.page.click('[data-plot="residual"] [data-tool="zoom"]')
    # the residuals of the example lie between 0.8 and 1
    assert "0.9" in window.run(ticks)
    assert "0.2" not in window.run(ticks)
    window.page.click('[data-plot="residual"] [data-tool="zoom"]')
    assert window.run(ticks) == whole
    assert window.complaints == []


def test_pictures_and_numbers_can_be_downloaded(browser: Any, page: Path) -> None:
    window = opened(browser, page)
    figure = "document.querySelector('[data-plot=\"{}\"]')"
    table = list(csv.reader(window.run(f"csvText({figure.format('cosine')})").splitlines()))
    assert table[0][:3] == ["series", "layer", "cosine similarity"]
    report = example_report(spectral=False, attention=False)
    shown = {(name, int(depth)): float(value) for name, depth, value, *_ in table[1:]}
    expected = {
        (name, reading.depth): pytest.approx(reading.cosine, abs=1e-5)
        for name, model in report.models.items()
        for reading in model.features
    }
    assert shown == expected
    cells = list(csv.reader(window.run(f"csvText({figure.format('heat')})").splitlines()))
    assert cells[0][:2] == ["layer", "head"]
    assert len(cells) == 1 + 16
    for plot in PLOTS:
        svg = ElementTree.fromstring(window.run(f"svgText({figure.format(plot)})"))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg", plot
        # it needs no style sheet of the page
        styles = [node.get("style", "") for node in svg.iter() if node.get("class")]
        assert styles, plot
        assert all("fill:" in style and "var(" not in style for style in styles), plot
    saved = window.run(
        "(() => { const seen = []; const links = HTMLAnchorElement.prototype;"
        "const real = links.click;"
        "links.click = function () { seen.push(this.download, this.protocol); };"
        "const buttons = document.querySelectorAll('[data-plot=\"rank\"] .tools button');"
        "for (const button of buttons) button.click();"
        "links.click = real; return seen; })()"
    )
    assert saved == ["rank.svg", "blob:", "rank.csv", "blob:"]
    # no spreadsheet takes a name for a formula
    row = window.run("csvOf([['=cmd|a', '+cmd|a', '@a', '-0.5', -0.5, 'plain']])")
    assert row == "'=cmd|a,'+cmd|a,'@a,-0.5,-0.5,plain\n"
    assert window.complaints == []


@pytest.mark.parametrize("together", [False, True], ids=["alone", "compared"])
def test_a_method_that_is_no_polynomial_has_a_page(
    browser: Any, tmp_path: Path, together: bool
) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    scaled = copy.deepcopy(model)
    gfsa.baselines.apply(scaled, "attnscale")
    models = {"attnscale": scaled} | ({"plain": model} if together else {})
    report = gfsa.diagnose(models, torch.randn(2, 3, 32, 32), progress=False)
    assert "not a polynomial" in next(iter(report.models["attnscale"].skipped.values()))
    path = tmp_path / "other.html"
    report.to_html(path)
    window = opened(browser, path)
    assert marks(window, "cosine") > 0
    if together:
        # the one that has maps to show is looked at first; the other says why it has none
        window.run("document.getElementById('heat-model').value = '0'")
        window.run("document.getElementById('heat-model').onchange()")
    assert "not a polynomial" in text(window, '[data-plot="heat"] .canvas')
    assert window.complaints == []
