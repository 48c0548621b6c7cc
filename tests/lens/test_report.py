"""A report: its JSON, table, sentences and figures."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import gfsa
from gfsa.lens import LensReport
from gfsa.lens.page import render
from gfsa.lens.readings import AttentionReading, FeatureReading, ModelReading, OwnValue, to_plain
from gfsa.lens.sentences import findings, headline, passed
from support.lens import example_report
from support.tiny import TinyEncoder, padded_batch


@pytest.fixture(scope="module")
def report() -> LensReport:
    return example_report()


def feature(depth: int, cosine: float, rank: float = 5.0) -> FeatureReading:
    return FeatureReading(depth, "", cosine, rank, 10.0, 0.5, 1.0, [1.0, 0.5])


def layer(coefficients: list[float], verdict: str = "low-pass", share: float = 0.5) -> Any:
    nothing = [math.nan]
    return AttentionReading(
        1, "a", "GFSA", [coefficients], [verdict], nothing, [share], nothing, nothing
    )


def model(
    features: list[FeatureReading],
    attention: list[AttentionReading] | None = None,
    name: str = "m",
    learned: int = 0,
) -> ModelReading:
    return ModelReading(name, "M", 9, learned, 1, 1, 0, 1.0, features, attention or [])


def test_json_and_back(report: LensReport, tmp_path: Path) -> None:
    path, copy = tmp_path / "report.json", tmp_path / "copy.json"
    report.to_json(path)
    again = LensReport.from_json(path)
    again.to_json(copy)
    assert copy.read_text() == path.read_text()
    # six digits, of everything
    assert to_plain(again) == to_plain(report)
    assert str(again) == str(report)
    assert "plain:\n  - Tokens are" in str(report)


def test_json_has_no_nan(tmp_path: Path) -> None:
    report = example_report(spectral=False, attention=False)
    path = tmp_path / "report.json"
    report.to_json(path)
    # nothing that strict readers refuse
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    again = LensReport.from_json(path)
    assert math.isnan(again.models["plain"].attention[0].entropy[0])
    assert again.models["plain"].attention[0].spectrum is None
    assert "similarity" in again.figures
    assert "response" not in again.figures


def test_a_report_with_coefficients_over_training_is_read_without_them(
    report: LensReport, tmp_path: Path
) -> None:
    """Reports had them once, mostly none."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report.to_plain() | {"trajectories": {}}))
    assert to_plain(LensReport.from_json(path)) == to_plain(report)
    layer = {"depth": 1, "name": "a", "coefficients": [[[0.0, 1.0]]]}
    recorded = {"GFSA": {"steps": [0], "layers": [layer]}}
    path.write_text(json.dumps(report.to_plain() | {"trajectories": recorded}))
    with pytest.warns(UserWarning, match="coefficients over training"):
        assert to_plain(LensReport.from_json(path)) == to_plain(report)


DEEP = b'{"format": "gfsa-lens/1", "models": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "content", [b'{"format": "a"}', b"[]", b"", b"a,b\n", b"\xff\xfe", b'{"format": "gfsa', DEEP]
)
def test_a_file_that_is_no_report_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match=r"other is not a lens report(, or damaged)?: expected"):
        LensReport.from_json(tmp_path / "other")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("models",), None),
        (("models",), {"a": 1}),
        (("models",), []),
        (("created",), 5),
        (("models", 0), 3),
        (("models", 0, "name"), ["a"]),
        (("models", 0, "name"), "GFSA <all>"),
        (("models", 0, "seconds"), [1.0]),
        (("models", 0, "parameters"), 10**400),
        (("models", 0, "samples"), "3"),
        (("models", 0, "unknown"), 1),
        (("models", 0, "features", 1, "cosine"), "0.5"),
        (("models", 0, "features", 1, "cosine"), 10**400),
        (("models", 0, "features", 1, "norm"), 1e308),
        (("models", 0, "attention", 0, "verdict", 0), "odd"),
        (("models", 0, "attention", 0, "entropy"), []),
        (("models", 0, "attention", 0, "coefficients", 0), []),
        (("models", 0, "attention", 0, "spectrum", "frequencies"), []),
        (("models", 0, "attention", 0, "spectrum", "map_response", 0), [1.0]),
    ],
)
def test_a_damaged_report_has_one_kind_of_error(
    report: LensReport, tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    plain: Any = json.loads(json.dumps(report.to_plain()))
    inside = plain
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    (tmp_path / "report.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="damaged, or was changed by hand"):
        LensReport.from_json(tmp_path / "report.json")


def test_names_cannot_command_a_terminal_or_stop_a_file(tmp_path: Path) -> None:
    from rich.console import Console

    name = "\x1b[2J\x9b2J {{summary}} \ud800"
    found = gfsa.diagnose({name: TinyEncoder(depth=1)}, padded_batch([4]), spectral=False)
    plain = found.to_plain()
    plain["models"][0]["name"] = name
    plain["models"][0]["attention"][0]["name"] = name
    (tmp_path / "report.json").write_text(json.dumps(plain))
    for report in (found, LensReport.from_json(tmp_path / "report.json")):
        out = io.StringIO()
        report.table(Console(file=out))
        assert not {"\x1b", "\x9b"} & set(out.getvalue())
        report.to_html(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert "{{summary}} \\ud800</title>" in page
        report.figures["similarity"].savefig(tmp_path / "figure.svg")


def test_table_fits_a_terminal_of_80_columns(report: LensReport) -> None:
    from rich.console import Console

    out = io.StringIO()
    report.table(Console(file=out, width=80))
    text = out.getvalue()
    assert "plain (TinyEncoder)" in text
    assert "GFSA <all> (TinyEncoder)" in text
    first = next(line for line in text.splitlines() if line.strip().startswith("4 "))
    reading = report.models["plain"].features[-1]
    assert f"{reading.cosine:.3f}" in first
    assert f"{reading.residual:.3f}" in first
    # nothing was cut off
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (
            model([feature(d, c) for d, c in enumerate((0.1, 0.5, 0.95))]),
            ["more alike", "0.10", "0.95", "passes 0.9 after layer 2"],
        ),
        (model([feature(0, 0.6), feature(1, 0.2)]), ["less alike"]),
        (model([feature(0, 0.1), feature(1, 0.1, rank=0.9)]), ["collapsed"]),
        (model([], [layer([0, 1, 0])]), ["1 low-pass", "is 0, in layer 1"]),
        (
            model([], [layer([0.5, 1, -0.25], "mixed", share=0.99)]),
            ["0.5, in layer 1", "1 of 1 heads attend almost uniformly"],
        ),
    ],
)
def test_findings_say_what_the_numbers_say(measured: ModelReading, said: list[str]) -> None:
    text = " ".join(findings(measured))
    assert all(part in text for part in said), text
    assert ("over-smoothing" in text) == ("passes 0.9 after layer 2" in said)


def test_high_frequencies_are_relative_to_frequency_0() -> None:
    assert passed([[2.0, 9.0, 2.0, 4.0]]) == 1.5
    assert passed([[0.0, 1.0]]) == math.inf


def test_a_pure_gain_passes_no_more_high_frequencies() -> None:
    model = TinyEncoder(depth=2)
    gfsa.plug(model, K=None, w1=2.0)
    reading = gfsa.diagnose(model, padded_batch([12, 9])).models["TinyEncoder"]
    (sentence,) = [text for text in findings(reading) if "frequencies" in text]
    maps, filters = re.findall(r"(\d+)%(?: of|\.)", sentence)
    assert maps == filters


def test_figures_have_marks_and_save_as_vectors(report: LensReport, tmp_path: Path) -> None:
    figures = report.figures
    assert set(figures) == {
        *("similarity", "rank", "residual", "singular_values", "response", "entropy", "energy"),
        *("coefficients (GFSA <all>)", "coefficients (twicing & some)"),
    }
    for name, figure in figures.items():
        marks = [a for axis in figure.axes for a in (*axis.lines, *axis.collections)]
        assert marks, name
        figure.savefig(tmp_path / "figure.svg")
        svg = (tmp_path / "figure.svg").read_text()
        assert "<image" not in svg, name
        assert "<text" in svg, name
    line = figures["similarity"].axes[0].lines[0]
    expected = [reading.cosine for reading in report.models["plain"].features]
    assert list(line.get_ydata()) == pytest.approx(expected)


def test_the_page_is_one_file_and_names_are_text(report: LensReport) -> None:
    page = render(report)
    assert "{{" not in page
    # a name with < in it is shown, not obeyed
    assert "GFSA &lt;all&gt;" in page
    assert "twicing &amp; some" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    assert [m["name"] for m in json.loads(data[1])["models"]] == list(report.models)
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", page))
    # the XML namespace of SVG, which is not loaded, and a link
    assert addresses == {"http://www.w3.org/2000/svg", "https://arxiv.org/abs/2312.04234"}
    assert len(page) < 200_000
    name = "</script><script>alert(1)</script>"
    assert "<script>alert" not in render(LensReport({name: reading(name, 0.5)}))


def reading(
    name: str, cosine: float, coefficients: list[float] | None = None, learned: int = 3
) -> ModelReading:
    """A model of one layer whose tokens end with ``cosine``; plain without ``coefficients``."""
    attention = layer(coefficients or [0.0, 1.0])
    if coefficients is None:
        attention.filter, learned = None, 0
    return model([feature(0, 0.1), feature(1, cosine)], [attention], name, learned)


def advice(*models: ModelReading) -> str:
    return " ".join(headline(models).advises)


def test_filters_that_hardly_moved_want_a_larger_rate() -> None:
    plain = reading("plain", 0.6)
    said = advice(plain, reading("GFSA", 0.6, [0.004, 1.0, 0.0]))
    assert "hardly moved (at most 0.004" in said
    assert "filter_lr" in said
    assert "hardly" not in advice(plain, reading("GFSA", 0.6, [0.4, 1.0, 0.0]))
    assert "too high" in advice(plain, reading("GFSA", 0.3, [0.4, 11.0, 0.0]))
    assert "as alike as without" in advice(plain, reading("GFSA", 0.6, [0.4, 1.0, 0.0]))
    assert "fixed" in advice(plain, reading("twicing", 0.3, [0.0, 2.0, -1.0], learned=0))
    # beside a fixed exclusive term, which is never ordinary attention
    exclusive = reading("exclusive and depth", 0.3, [0.0, 1.0])
    exclusive.attention[0].own = OwnValue(part=[0.2], weight=[0.1], cosine=[0.0])
    assert "hardly moved (at most 0 from their start)" in advice(plain, exclusive)


def test_modules_with_the_same_reason_share_a_line() -> None:
    plain = reading("plain", 0.5)
    plain.skipped = {f"layers.{at}.attn": "has no map" for at in range(12)}
    page = render(LensReport({"plain": plain}))
    # once in the summary, twelve times in the data
    assert page.count("has no map") == 1 + 12
