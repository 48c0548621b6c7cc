"""The paper's own figures, transcribed from its tables to ``paper.csv``: not measured here.

Choi et al., *Graph Convolutions Enrich the Self-Attention in Transformers!*, NeurIPS 2024. A line
of the file is one cell of one table. Cells with an apparent misprint are kept as printed, with a
note.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

SOURCE = "Choi et al., Graph Convolutions Enrich the Self-Attention in Transformers!, NeurIPS 2024"

TRAINING_TIMES = ("seconds per epoch", "seconds per 1,000 steps")
MEMORY = "GB of GPU memory"
COSTS = {
    *TRAINING_TIMES,
    MEMORY,
    "seconds of inference",
    "GFLOPs",
    "throughput",
}
LOWER_IS_BETTER = ("mae", "wer", "perplexity")

PROTOCOLS = {
    "glue": "pretrained encoders fine-tuned 5 epochs, the best K of each task reported, no spread "
    "over seeds given",
    "causal_lm": "pretrained GPT-2 fine-tuned (10 epochs on WikiText-2, 15 on PTB, 4 on "
    "WikiText-103), no spread over seeds given",
    "code": "pretrained models fine-tuned, at most 10 epochs on Devign, no spread over seeds given",
    "image": "ImageNet-1k at 224 pixels, trained from scratch, no spread over seeds given",
    "graph": "full data sets and the backbones' own settings, 4 seeds for Graphormer",
    "speech": "LibriSpeech, 100 and 960 hours, no spread over seeds given",
    "lra": "Long Range Arena, no spread over seeds given",
}

# data sets of ours that the paper does not have, and its most similar one
STAND_INS = {
    ("image", "cifar10"): "ImageNet-1k",
    ("image", "cifar100"): "ImageNet-1k",
    ("image", "folder"): "ImageNet-1k",
    # the name of any folder in rows of earlier versions
    ("image", "imagenetstyle"): "ImageNet-1k",
    ("speech", "an4"): "LibriSpeech 100h",
}
OTHER_NAMES = {
    "defect": "devign",
    "clone": "bigclonebench",
    "bcb": "bigclonebench",
    "librispeech": "librispeech100h",
    "cifar10grey": "image",
    "cifar10image": "image",
    "lraimage": "image",
}
BACKBONE_NAMES = {
    "DeiT-T": ("deittiny", "deitt"),
    "DeiT-S": ("deitsmall", "deits"),
    "CaiT-S": ("caits",),
    "Swin-S": ("swinsmall", "swins"),
    "Graphormer-slim": ("graphormer",),
    "Transformer": ("transformer", "softmax"),
    "Efficient Attention": ("efficient", "linear"),
    "BERT-base": ("bertbase",),
    "GPT-2": ("gpt2",),
}
# the paper's code learns wK alone, so its GFSA is also our gfsa-published
SAME_METHOD = {"gfsa-published": "gfsa"}


@dataclass(frozen=True)
class PaperFigure:
    """One cell of one table of the paper."""

    table: int
    recipe: str
    data: str
    backbone: str
    parameters: str
    method: str
    options: str
    metric: str
    value: float
    std: float | None
    note: str


@dataclass(frozen=True)
class PaperLine:
    """A figure of the paper, compared with the paper's own plain model."""

    figure: PaperFigure
    difference: float | None
    time: float | None
    """Training time relative to plain, if the paper gives it."""
    memory: float | None
    """GPU memory, likewise."""


@dataclass(frozen=True)
class Counterpart:
    """The paper's figures on a task of ours."""

    data: str
    same_data: bool
    same_backbone: bool
    protocol: str
    lines: tuple[PaperLine, ...]

    def differences(self, method: str, options: str = "") -> list[PaperLine]:
        """The paper's differences for a method of ours, one per backbone."""
        name = SAME_METHOD.get(method, method)
        ours = set(options.split())
        chosen: list[PaperLine] = []
        with_our_K: list[PaperLine] = []
        for line in self.lines:
            figure, theirs = line.figure, set(line.figure.options.split())
            if figure.method != name or line.difference is None or not theirs <= ours:
                continue
            # "mae (train)" and the like accompany the main metric
            if " " in figure.metric or ("power=exact" in ours) != ("power=exact" in theirs):
                continue
            (with_our_K if theirs else chosen).append(line)
        # figures with the same K are preferred to those with the paper's best K
        return with_our_K or chosen


@lru_cache(maxsize=1)
def paper_figures() -> tuple[PaperFigure, ...]:
    """Every transcribed cell, in the order of the paper's tables."""
    text = files("gfsa_experiments.results").joinpath("paper.csv").read_text(encoding="utf-8")
    return tuple(_figure(line) for line in csv.DictReader(text.splitlines()))


def _figure(line: dict[str, Any]) -> PaperFigure:
    std = float(line["std"]) if line["std"] else None
    numbers = {"table": int(line["table"]), "value": float(line["value"]), "std": std}
    return PaperFigure(**{**line, **numbers})


def counterpart(recipe: str, task: str, options: Iterable[str] = ()) -> Counterpart | None:
    """The paper's figures on ``task`` (data set first, then the model), None if it has none.

    Args:
        options: of our runs; the paper's sweeps (``K=4``) are shown where we ran them too.
    """
    name, _, model = task.partition(" ")
    data, same_data = _data(recipe, name)
    if data is None:
        return None
    ours = [figure for figure in paper_figures() if (figure.recipe, figure.data) == (recipe, data)]
    quality = [figure for figure in ours if figure.metric not in COSTS]
    backbones = list(dict.fromkeys(figure.backbone for figure in quality))
    alike = [backbone for backbone in _alike(backbones, model) if _has_method(quality, backbone)]
    shown = alike or [backbone for backbone in backbones if _has_method(quality, backbone)]
    wanted = {word for text in options for word in text.split()}
    comparable = [
        figure
        for figure in quality
        if figure.backbone in shown and set(figure.options.split()) <= wanted
    ]
    cells = sorted(_once(comparable), key=lambda figure: backbones.index(figure.backbone))
    lines = tuple(_beside_plain(figure, ours) for figure in cells)
    return Counterpart(data, same_data, bool(alike), PROTOCOLS[recipe], lines)


def _once(figures: Iterable[PaperFigure]) -> list[PaperFigure]:
    """Each cell once, though several tables print it: the first with a spread, or the first."""
    cells: dict[tuple[str, str, str, str], PaperFigure] = {}
    for figure in figures:
        key = (figure.backbone, figure.method, figure.options, figure.metric)
        if key not in cells or (cells[key].std is None and figure.std is not None):
            cells[key] = figure
    return list(cells.values())


def lower_is_better(metric: str) -> bool:
    return metric.startswith(LOWER_IS_BETTER)


def _data(recipe: str, name: str) -> tuple[str | None, bool]:
    """The paper's name of our data set, or of its most similar one, and whether it is the same."""
    # folder=flowers is a folder of images
    wanted = _plain_text(name.partition("=")[0])
    wanted = OTHER_NAMES.get(wanted, wanted)
    for figure in paper_figures():
        if figure.recipe == recipe and _plain_text(figure.data) == wanted:
            return figure.data, True
    return STAND_INS.get((recipe, wanted)), False


def _alike(backbones: Sequence[str], model: str) -> list[str]:
    """The paper's backbones that our model is named after, of the same depth if there is one."""
    wanted = _plain_text(model)
    names = {}
    for backbone in backbones:
        name = backbone.partition(",")[0]
        keys = [key for key in BACKBONE_NAMES.get(name, (_plain_text(name),)) if key in wanted]
        if keys:
            names[backbone] = max(keys, key=len)
    longest = max(map(len, names.values()), default=0)
    alike = [backbone for backbone, key in names.items() if len(key) == longest]
    depth = re.search(r"-d(\d+)", model)
    if depth is None:
        return alike
    return [name for name in alike if f" {depth[1]} layers" in name] or alike


def _has_method(figures: Sequence[PaperFigure], backbone: str) -> bool:
    """Whether the paper compares a method with plain on a backbone."""
    return any(figure.backbone == backbone and figure.method != "plain" for figure in figures)


def _beside_plain(figure: PaperFigure, others: Sequence[PaperFigure]) -> PaperLine:
    if figure.method == "plain":
        return PaperLine(figure, None, None, None)

    def value(method: str, metric: str) -> float | None:
        for other in others:
            if (other.backbone, other.method, other.metric) == (figure.backbone, method, metric):
                return other.value
        return None

    def relative(*metrics: str) -> float | None:
        # the paper gives costs for a method, not for each of its options
        for metric in metrics if not figure.options else ():
            ours, theirs = value(figure.method, metric), value("plain", metric)
            if ours is not None and theirs is not None:
                return ours / theirs
        return None

    plain = value("plain", figure.metric)
    difference = None if plain is None else figure.value - plain
    return PaperLine(figure, difference, relative(*TRAINING_TIMES), relative(MEMORY))


def _plain_text(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
