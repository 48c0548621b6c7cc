"""gfsa bench: timing, rows, profiles, and the command."""

from __future__ import annotations

import csv
import dataclasses
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import gfsa
from gfsa.cli import build
from gfsa.environment import commit
from gfsa.kernels.routes import Decision
from gfsa_benchmarks import measure as measuring
from gfsa_benchmarks import suites
from gfsa_benchmarks.case import MIB, Case, Setting, Shape, Variant, deterministic
from gfsa_benchmarks.command import run_suite
from gfsa_benchmarks.measure import COLUMNS, append, interleaved, measure, peak_mib
from gfsa_benchmarks.published import published_attention
from gfsa_benchmarks.suites import SUITES

CPU = Setting(torch.device("cpu"), torch.float32)


def mib(count):
    return torch.empty(count * MIB, dtype=torch.uint8)


def test_peak_counts_what_is_alive_at_once():
    def work():
        first = mib(4)
        del first
        second = mib(3)
        third = mib(2)
        del second
        return third

    # 4, then 3 + 2, then 2
    assert peak_mib(work, CPU.device) == pytest.approx(5, abs=0.01)


def test_peak_includes_the_result_and_not_the_inputs():
    kept = mib(7)
    assert peak_mib(lambda: kept.add(1), CPU.device) == pytest.approx(7, abs=0.01)


def test_a_sample_is_as_long_as_it_is_asked_to_be(monkeypatch):
    repeated = []

    def sample(work, repeats):
        repeated.append(repeats)
        return 2.0

    monkeypatch.setattr(measuring, "_cpu_sample", sample)
    interleaved([lambda: None], 2, CPU.device, sample_ms=21)
    # one to warm up, one to learn how long a call takes, then rounds
    assert repeated == [1, 1, 11, 11]


@pytest.mark.parametrize("suite", ["ops", "linear"])
def test_variants_of_a_suite_do_the_job_they_are_named_after(suite):
    torch.manual_seed(0)
    case = SUITES[suite].build(Shape(1, 2, 12, 4), CPU)
    outputs = {variant.name: variant.forward() for variant in case.variants}
    plain = outputs.pop("plain")
    for name, output in outputs.items():
        assert output.shape == plain.shape, name
        assert not torch.allclose(output, plain, atol=1e-3), name
    for variant in case.variants:
        gradients = variant.step()
        assert all(bool(each.abs().sum() > 0) for each in gradients), variant.name
    if suite == "ops":
        torch.testing.assert_close(outputs["gfsa"], outputs["gfsa sdpa"])


def test_rows_compare_with_the_first_variant():
    def busy(seconds, size):
        def work():
            time.sleep(seconds)
            return mib(size)

        return work

    case = Case(
        "one",
        [
            Variant("plain", "torch", busy(0.011, 1), busy(0.011, 2)),
            Variant("twice", "torch", busy(0.022, 1), busy(0.033, 5)),
        ],
    )
    plain, twice = measure(case, "ops", CPU, rounds=3)
    assert (plain.fwd_ratio, plain.fwd_bwd_ratio, plain.extra_mib) == (1.0, 1.0, 0.0)
    assert twice.fwd_ratio == pytest.approx(2, rel=0.3)
    assert twice.fwd_bwd_ratio == pytest.approx(3, rel=0.3)
    assert twice.extra_mib == pytest.approx(3, abs=0.01)


def test_graphs_are_refused_on_a_cpu():
    with pytest.raises(ValueError, match="graphs are for CUDA"):
        Setting(torch.device("cpu"), torch.float32, graphs=True)
    with pytest.raises(ValueError, match="choose one"):
        Setting(torch.device("cuda"), torch.float32, compiled="model", graphs=True)


def small_rows():
    case = SUITES["ops"].build(Shape(1, 1, 16, 4), CPU)
    return measure(case, "ops", CPU, rounds=1)


def test_csv_grows_under_one_header(tmp_path):
    path = tmp_path / "results" / "bench.csv"
    rows = small_rows()
    append(rows, path)
    append(rows, path)
    with path.open(newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert len(lines) == 2 * len(rows)
    assert {len(line) for line in lines} == {len(COLUMNS)}


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1x12x1024x64", Shape(1, 12, 1024, 64)),
        ("8x2x10x4:causal", Shape(8, 2, 10, 4, True)),
        ("8x4/2x10x4:padded", Shape(8, 4, 10, 4, padded=True, key_heads=2)),
        ("8x2x10x4:causal:dropout=0.2", Shape(8, 2, 10, 4, True, dropout=0.2)),
    ],
)
def test_shapes_are_written_as_they_are_read(text, shape):
    assert Shape.parse(text) == shape
    assert str(shape) == text


def test_grouped_heads_are_for_operators_and_caches():
    case = SUITES["ops"].build(Shape(1, 4, 12, 4, True, key_heads=2), CPU)
    assert all(torch.isfinite(variant.forward()).all() for variant in case.variants)
    assert all(SUITES[name].grouped for name in ("attention", "decode", "decode-static", "prefill"))
    with pytest.raises(ValueError, match="grouped heads"):
        run_suite("linear", CPU, ["1x4/2x6x4"], 1, [], None, Console())


def test_dropout_is_for_operators(monkeypatch):
    """Every variant drops what it is asked to, plain attention too."""
    torch.manual_seed(0)
    shape = Shape(1, 2, 12, 4, True, dropout=0.5)
    case = SUITES["ops"].build(shape, CPU)
    names = [variant.name for variant in case.variants]
    assert names == ["plain", "gfsa degree 1", "gfsa", "gfsa sdpa", "published"]
    for variant in case.variants:
        first, second = variant.forward(), variant.forward()
        assert torch.isfinite(first).all(), variant.name
        assert not torch.equal(first, second), variant.name
    with pytest.raises(ValueError, match="only the suite ops takes dropout"):
        run_suite("linear", CPU, [str(shape)], 1, [], None, Console())
    # torch draws one mask for two passes outside of graphs alone
    monkeypatch.setattr(Setting, "__post_init__", lambda setting: None)
    captured = dataclasses.replace(CPU, graphs=True)
    assert "gfsa sdpa" not in [v.name for v in SUITES["ops"].build(shape, captured).variants]


def test_a_deterministic_variant_asks_torch_for_it_while_it_runs():
    asked = torch.are_deterministic_algorithms_enabled

    def fail():
        assert asked()
        raise RuntimeError("no such algorithm")

    ordered = deterministic(Variant("gfsa deterministic", "fused", asked, fail))
    assert (ordered.name, ordered.backend) == ("gfsa deterministic", "fused")
    assert ordered.forward()
    assert not asked()
    with pytest.raises(RuntimeError, match="no such algorithm"):
        ordered.step()
    assert not asked()
    assert deterministic(Variant("gfsa", "sdpa", asked, None)).step is None


def test_fused_kernels_are_timed_where_they_take_the_call(monkeypatch):
    """Whatever auto chooses, as masks of heads of 128 features."""
    shape = Shape.parse("2x4/2x16x8:causal:padded")
    names = [variant.name for variant in SUITES["ops"].build(shape, CPU).variants]
    assert "gfsa fused" not in names
    asked = []
    by_torch = suites.graph_filter_attention

    def on_a_gpu(*tokens, backend, **options):
        asked.append((backend, torch.are_deterministic_algorithms_enabled()))
        return by_torch(*tokens, backend="auto" if backend == "fused" else backend, **options)

    def chosen(*tokens, backend, **options):
        name = "fused" if backend == "fused" else "sdpa"
        return Decision(name, name, "", "a GPU")

    monkeypatch.setattr(suites, "graph_filter_attention", on_a_gpu)
    monkeypatch.setattr(suites, "which_backend", chosen)
    case = SUITES["ops"].build(shape, CPU)
    named = {variant.name: variant for variant in case.variants}
    assert list(named)[-3:] == ["gfsa fused", "gfsa deterministic", "published"]
    for name, in_order in (("gfsa fused", False), ("gfsa deterministic", True)):
        assert named[name].backend == "fused"
        # the first step computes the shape of the gradient that it begins with
        named[name].step()
        asked.clear()
        torch.testing.assert_close(named[name].forward(), named["gfsa sdpa"].forward())
        named[name].step()
        assert asked == [("fused", in_order), ("sdpa", False), ("fused", in_order)]


def tokens(heads=2, n=5, dim=3):
    return [torch.randn(1, heads, n, dim, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_gfsa(is_causal):
    q, k, v = tokens()
    f = gfsa.GFSA(2, K=3, w0=[0.1, -0.3], w1=[0.8, 1.2], wK=[0.1, 0.4]).double()
    weights = [f.weights()[name] for name in ("w0", "w1", "wK")]
    expected = gfsa.graph_filter_attention(q, k, v, f.coefficients(), is_causal=is_causal)
    got = published_attention(q, k, v, *weights, K=3, is_causal=is_causal)
    # the filter's own parameters are float32 numbers
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


runner = CliRunner()


def bench(*arguments):
    return runner.invoke(build(), ["bench", "--device", "cpu", "--rounds", "1", *arguments])


def test_ops_end_to_end(tmp_path):
    path = tmp_path / "bench.csv"
    shown = bench("--shapes", "1x2x16x4,2x1x8x4:causal", "--csv", str(path))
    assert shown.exit_code == 0, shown.output
    assert "10 rows added" in shown.output
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["variant"] for row in rows[:5]] == [
        "plain",
        "gfsa degree 1",
        "gfsa",
        "gfsa sdpa",
        "published",
    ]
    assert {row["shape"] for row in rows} == {"1x2x16x4", "2x1x8x4:causal"}
    assert {row["dtype"] for row in rows} == {"float32"}
    for row in rows:
        assert float(row["fwd_ms"]) > 0
        assert float(row["fwd_bwd_ms"]) > 0
        assert float(row["peak_mib"]) > 0


def test_linear_end_to_end_keeps_nothing_when_told_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = bench("--suite", "linear", "--shapes", "1x1x16x4,1x1x32x4", "--no-append")
    assert shown.exit_code == 0, shown.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "speed"], "expected a suite of"),
        (["--dtype", "int8"], "expected a dtype of"),
        (["--shapes", "large"], "BATCHxHEADSxTOKENSxDIM"),
        (["--suite", "linear", "--shapes", "1x1x8x4:causal"], "neither causal nor padded"),
        (["--device", "toaster"], "expected a device"),
        (["--device", "meta"], "cpu and cuda"),
        (["--graphs", "--shapes", "1x1x8x4"], "graphs are for CUDA"),
        (["--compile"], "nothing to compile"),
        (["--suite", "models", "--compile", "--compile-blocks"], "whole models"),
        (["--variants", "plain,fast", "--shapes", "1x1x8x4"], "expected variants of plain, gfsa"),
        (["--suite", "decode", "--shapes", "1x1x8x4:padded"], "no padded shapes"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    shown = bench(*arguments, "--no-append")
    assert shown.exit_code == 2
    # the message is boxed and broken into lines
    words = shown.output.replace("│", " ").split()
    assert " ".join(message.split()) in " ".join(words)


def test_the_commit_of_a_row_is_named_or_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFSA_COMMIT", "abc1234")
    assert commit() == "abc1234"
    monkeypatch.delenv("GFSA_COMMIT")
    monkeypatch.setattr(gfsa, "__file__", str(tmp_path / "src" / "gfsa" / "__init__.py"))
    assert commit() == ""
