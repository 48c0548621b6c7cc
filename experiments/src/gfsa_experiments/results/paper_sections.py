"""The paper's figures as blocks of a page."""

from __future__ import annotations

from gfsa_experiments.results.number_format import NONE, Scale, percent_factor, ratio
from gfsa_experiments.results.page_blocks import Block, Grid, Text
from gfsa_experiments.results.paper import Counterpart, PaperFigure, lower_is_better


def paper_difference(match: Counterpart, method: str, options: str = "") -> str:
    """The range of the paper's differences to its plain models."""
    found = [
        (line.difference, _scale(line.figure))
        for line in match.differences(method, options)
        if line.difference is not None
    ]
    if not found:
        return NONE
    ends = [min(found, key=lambda pair: pair[0]), max(found, key=lambda pair: pair[0])]
    return " … ".join(dict.fromkeys(scale.signed(difference) for difference, scale in ends))


def paper_blocks(match: Counterpart) -> list[Block]:
    """The paper's figures on a task, compared with its own plain models."""
    same = "the same data set" if match.same_data else "other data, the nearest the paper has"
    model = "the backbone of this name" if match.same_backbone else "other models"
    rows = []
    for line in match.lines:
        figure, scale = line.figure, _scale(line.figure)
        spread = "" if figure.std is None else f" ± {scale.number(figure.std)}"
        rows.append(
            [
                figure.backbone + (f" ({figure.parameters})" if figure.parameters else ""),
                f"{figure.method} {figure.options}".strip(),
                f"{figure.metric}{' ↓' if lower_is_better(figure.metric) else ''}",
                scale.number(figure.value) + spread,
                scale.signed(line.difference),
                NONE if line.time is None else ratio([line.time]),
                NONE if line.memory is None else ratio([line.memory]),
                f"Table {figure.table}" + (f" ({figure.note})" if figure.note else ""),
            ]
        )
    words = ("model", "method", "metric", "from")
    columns = (*words[:3], "paper", "difference to plain", "time", "memory", words[3])
    return [
        Text(
            f"**Paper, not measured here**: {match.data} ({same}), {model}; {match.protocol}. "
            "Its scale is not that of the runs above."
        ),
        Grid(columns, rows, words),
    ]


def _scale(figure: PaperFigure) -> Scale:
    factor = percent_factor(figure.metric, [figure.value])
    if factor == 100:
        return Scale(factor, 2)
    return Scale(1, 3 if figure.metric == "perplexity" else 2 if figure.value > 1 else 4)
