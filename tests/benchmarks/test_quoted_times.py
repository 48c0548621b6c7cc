"""The times that README.md quotes are those of the rows of results/bench.csv."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BERT, VIT, GPT2 = "32x12x128x64", "256x6x197x64", "8x12x1024x64:causal"
WIDE, WIDER = "64x8x1024x64:causal", "32x12x1024x64:causal"


class Timed(NamedTuple):
    """Rows of one kind on the H200; of several the newest unless a commit is named."""

    suite: str
    shape: str
    timing: str
    variant: str = "gfsa"
    commit: str = ""
    column: str = "fwd_bwd_ratio"
    device: str = "NVIDIA H200"


def models(shape: str, timing: str, commit: str = "") -> Timed:
    return Timed("models", shape, timing, commit=commit)


def step(shape: str, timing: str) -> list[Timed]:
    """With GFSA, then with degree 1."""
    return [Timed("pretrain-step", shape, timing, v) for v in ("gfsa", "gfsa degree 1")]


# by the first words of a line; its cells in the order of the columns
TABLE: dict[str, list[list[Timed]]] = {
    "BERT-base": [
        # two hosts
        [models(BERT, "eager", "1bbd671"), models(BERT, "eager", "df94caf")],
        [models(BERT, "compiled", "1bbd671")],
        [models(BERT, "compiled blocks")],
        [models(BERT, "graph")],
    ],
    "ViT-S/16": [
        [models(VIT, "eager")],
        [models(VIT, "compiled", "1bbd671")],
        [models(VIT, "compiled blocks")],
        [models(VIT, "graph")],
    ],
    "GPT-2": [
        [models(GPT2, "eager")],
        [models(GPT2, "compiled")],
        [models(GPT2, "compiled blocks")],
        [models(GPT2, "graph")],
    ],
    "Qwen3-type, width 512": [[], step(WIDE, "compiled"), step(WIDE, "compiled blocks"), []],
    "Qwen3-type, width 768": [[], step(WIDER, "compiled"), step(WIDER, "compiled blocks"), []],
}


def decoded(suite: str, timing: str, batch: int, variant: str = "gfsa kernel") -> Timed:
    return Timed(suite, f"{batch}x12x1023x64", timing, variant, column="fwd_ratio")


def on_a_cpu(variant: str) -> Timed:
    device = "AMD EPYC (2 cores), 2 threads"
    return Timed("ops", "1x12x1024x64", "eager", variant, device=device)


# words with a place for each number
PROSE: dict[str, list[Timed]] = {
    "and takes {}× now": [Timed("ops", GPT2, "graph")],
    "and {}× at a head dim of 80": [Timed("ops", "8x12x1500x80", "graph", "gfsa degree 1")],
    "attention takes {}× plain's time with degree 2": [on_a_cpu("gfsa")],
    "{}× with\ndegree 1": [on_a_cpu("gfsa degree 1")],
    "{}× in the published form": [on_a_cpu("published")],
    "takes {} to {}× in a CUDA graph": [
        decoded("decode-static", "graph", 1),
        decoded("decode-static", "graph", 16),
    ],
    "{} to {}× in eager mode": [
        # later rows were timed beside training
        decoded("decode", "eager", 16)._replace(commit="c361bcd"),
        Timed("decode", "1x12x512x64", "eager", "gfsa kernel", column="fwd_ratio"),
    ],
    "{}× compiled with a static cache": [decoded("decode-static", "compiled", 1)],
}


def ratio_of(timed: Timed) -> Decimal:
    with (ROOT / "results/bench.csv").open(encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["suite"], row["shape"], row["timing"]) == timed[:3]
            and (row["variant"], row["device"]) == (timed.variant, timed.device)
            and row["commit"].startswith(timed.commit)
        ]
    return Decimal(max(rows, key=lambda row: row["date"])[timed.column])


def is_quoted(ratio: Decimal, quoted: str) -> bool:
    """Whether a number is a ratio with fewer decimals; either way from the middle."""
    decimals = len(quoted.partition(".")[2])
    return abs(Decimal(quoted) - ratio) <= Decimal(5).scaleb(-decimals - 1)


def wrong(quoted: list[str], timed: list[Timed]) -> list[str]:
    pairs = [(said, ratio_of(one)) for said, one in zip(quoted, timed, strict=True)]
    return [f"{said}, the row has {ratio}" for said, ratio in pairs if not is_quoted(ratio, said)]


def section() -> str:
    return (
        (ROOT / "README.md").read_text("utf-8").partition("\n## How fast?\n")[2].split("\n## ")[0]
    )


def cells() -> Iterator[tuple[str, list[str], list[Timed]]]:
    for name, expected in TABLE.items():
        (line,) = [line for line in section().splitlines() if line.startswith(f"| {name}")]
        own = line.strip("|").split("|")[1:]
        for cell, timed in zip(own, expected, strict=True):
            yield f"{name}:{cell}", re.findall(r"\d\.\d+", cell), timed


def test_every_line_of_the_table_is_compared() -> None:
    shown = [line for line in section().splitlines() if line.startswith("| ") and "×" in line]
    assert len(shown) == len(TABLE)


@pytest.mark.parametrize(
    ("where", "quoted", "timed"), [*cells()], ids=lambda value: str(value)[:40]
)
def test_a_cell_has_the_numbers_of_its_rows(
    where: str, quoted: list[str], timed: list[Timed]
) -> None:
    assert not wrong(quoted, timed), where


@pytest.mark.parametrize("words", PROSE)
def test_a_sentence_has_the_numbers_of_its_rows(words: str) -> None:
    pattern = re.escape(words).replace(r"\{\}", r"(\d+\.\d+)")
    (match,) = re.findall(pattern, section())
    quoted = [match] if isinstance(match, str) else list(match)
    assert not wrong(quoted, PROSE[words])


def test_degree_1_takes_no_longer_than_said() -> None:
    """Of the shapes of results/kernels.md: the least and the most of its table."""
    page = (ROOT / "results/kernels.md").read_text("utf-8")
    table = page.partition("## Degree 1 in one pass")[2].partition("\n\nThe rows' commit")[0]
    ratios = [float(found) for found in re.findall(r"\| \*\*(\d\.\d+)\*\* \|", table)]
    assert len(ratios) > 10
    said = f"takes {min(ratios):.2f} to {max(ratios):.2f}× plain's on the H200"
    assert said in section()


def test_another_number_is_noticed() -> None:
    assert is_quoted(Decimal("1.065"), "1.06")
    assert is_quoted(Decimal("1.065"), "1.07")
    assert not is_quoted(Decimal("1.0651"), "1.06")
    assert not is_quoted(Decimal("12.79"), "12.7")


def test_sixteen_sequences_are_those_of_the_page_and_of_the_row() -> None:
    """benchmarks/decode_host.py times them and writes no rows; the bench does."""
    page = (ROOT / "results/kernels.md").read_text("utf-8").partition("**Sixteen sequences**")[2]
    (line,) = re.findall(r"\| ms a token, calls one after another \|(.*)\|", page)
    plain, _, ours = (re.findall(r"\d+\.\d+", cell) for cell in line.split("|"))
    alone = f"{Decimal(ours[0]) / Decimal(plain[0]):.2f}"
    assert ours[1] == alone
    timed = ratio_of(decoded("decode-static", "compiled", 16))
    assert f"(sixteen at once: {alone} to {timed:.2f}×)" in section()
