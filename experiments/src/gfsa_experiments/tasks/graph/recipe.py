"""Properties of whole graphs with Graphormer and GPS."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

from gfsa_experiments.data.files import table
from gfsa_experiments.data.own import Wanted
from gfsa_experiments.engine.config import (
    Count,
    CountOrZero,
    Schedule,
    ShareBelowOne,
    TrainConfig,
    check_multiple,
)
from gfsa_experiments.engine.task import Split, Task
from gfsa_experiments.models import Graphormer, GraphormerCollator
from gfsa_experiments.models.graphs import Collator, Prepared
from gfsa_experiments.tasks.graph.data import (
    DATA_NAMES,
    EXPECTED,
    KINDS,
    GraphSet,
    is_own,
    own_name,
    read_graphs,
)

NOT_GIVEN: Any = None
"""The default of the settings that follow the model and the data set."""


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


_SETTINGS = {
    (line["model"], line["data"]): {
        name: _value(text) for name, text in line.items() if text and name not in ("model", "data")
    }
    for line in table("gfsa_experiments.tasks.graph", "settings.csv")
}
FOLLOWING = tuple(_SETTINGS["gps", ""])

_GRAPHORMERS = ("graphormer-slim", "graphormer")


def paper_settings(model: str, data: str) -> dict[str, Any]:
    """The papers' settings for this model on this data set."""
    return _SETTINGS[model, ""] | _SETTINGS.get((model, data), {})


ModelName = Literal["graphormer-slim", "graphormer", "gps"]

# a pair takes 12 bytes: beyond this, GPS is the right model
_MOST_PAIRS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class GraphConfig(TrainConfig):
    """Settings that are not given follow the model and the data set, as in the papers.

    The constructor fills them in, so ``dataclasses.replace`` with another model would keep those of
    the first: construct a new config instead.
    """

    in_label = ("data", "model")
    used_if = (
        ("model=graphormer-slim,graphormer", "ffn_width mlp_dropout"),
        ("model=gps", "local pooling encoding encoding_size encoding_width"),
        ("encoding=walk,laplacian", "encoding_size encoding_width"),
    )

    data: str = "zinc"
    """A data set of ours, or graphs of the caller's own: a .npz or .pt file, ``pyg:CLASS:NAME`` or
    ``MODULE:CLASS:NAME`` (without ``:NAME`` if it takes none)."""
    labels: Wanted = "auto"
    """What the labels of own graphs are; ``auto``: decided by what they look like, and printed."""
    model: ModelName = "graphormer-slim"

    epochs: float = NOT_GIVEN
    batch_size: int = NOT_GIVEN
    lr: float = NOT_GIVEN
    weight_decay: float = NOT_GIVEN
    schedule: Schedule = NOT_GIVEN
    warmup: float = NOT_GIVEN
    clip: float = NOT_GIVEN
    group_by_length: bool = NOT_GIVEN
    best: bool = True

    depth: Count = NOT_GIVEN
    """Attention layers."""
    width: Count = NOT_GIVEN
    heads: Count = NOT_GIVEN
    ffn_width: int = NOT_GIVEN
    """Width inside Graphormer's MLPs; those of GPS have twice the model's width."""
    dropout: ShareBelowOne = NOT_GIVEN
    """On the branches of the layers."""
    mlp_dropout: ShareBelowOne = NOT_GIVEN
    """Graphormer: inside the MLPs; GPS uses ``dropout`` there."""
    attention_dropout: ShareBelowOne = NOT_GIVEN
    """On entries of A."""
    local: Literal["gine", "gated"] = NOT_GIVEN
    """GPS: its message passing."""
    encoding: Literal["walk", "laplacian", "none"] = NOT_GIVEN
    """GPS: the encoding of a node's position in its graph."""
    encoding_size: CountOrZero = NOT_GIVEN
    """Random-walk steps or eigenvectors."""
    encoding_width: CountOrZero = NOT_GIVEN
    """GPS: the part of the width that the encoding takes."""
    pooling: Literal["sum", "mean"] = NOT_GIVEN
    """GPS: pooling of nodes."""
    pad_to_multiple: Count = NOT_GIVEN
    """Graphs are padded to a multiple of this many nodes, so that few shapes occur."""

    def __post_init__(self) -> None:
        paper = paper_settings(self.model, self.data)
        for name in FOLLOWING:
            if getattr(self, name) is NOT_GIVEN:
                # a frozen dataclass can only be completed this way
                object.__setattr__(self, name, paper[name])

    def usual(self) -> GraphConfig:
        """The papers' settings for this model and data set, which themselves are the defaults."""
        return GraphConfig(**paper_settings(self.model, self.data))

    def unused(self) -> dict[str, str]:
        unused = super().unused()
        if self.data in DATA_NAMES:
            unused["labels"] = f"those of {self.data} are known; data= of your own has others"
        return unused

    def check(self) -> None:
        super().check()
        if self.data not in DATA_NAMES and not is_own(self.data):
            raise ValueError(
                f"data must be one of {', '.join(DATA_NAMES)}, or graphs of your own ({EXPECTED}), "
                f"got {self.data!r}"
            )
        check_multiple(self, "width", "heads")
        if self.model == "gps" and self.encoding != "none":
            if not self.encoding_size:
                raise ValueError(f"encoding={self.encoding} needs an encoding_size above 0")
            if not 0 < (part := self.encoding_width) < self.width:
                raise ValueError(
                    f"encoding_width must lie between 0 and width {self.width}, got {part}"
                )
        if self.model.startswith("graphormer") and self.encoding != "none":
            raise ValueError("graphormer has encodings of its own; leave encoding=none")

    def label(self) -> str:
        data = self.data if self.data in DATA_NAMES else f"data={own_name(self.data)}"
        return f"{data} {self.model}"


class GraphTask(Task):
    """A graph model and its data set, measured by the data set's customary metric."""

    def __init__(self, config: GraphConfig, data_dir: Path) -> None:
        given = config.data, Path(data_dir).absolute(), config.labels
        self.graphs = graphs = read_graphs(*given)
        self.metric, self.own_data = graphs.metric, graphs.own
        self.kind = KINDS.get(self.metric, "numbers")
        self.higher_is_better = self.metric not in ("mae", "rmse")
        pairs = sum(graph.num_nodes**2 for graph in graphs.graphs)
        if config.model in _GRAPHORMERS and pairs > _MOST_PAIRS:
            raise ValueError(
                f"{graphs.name} has {pairs:,} pairs of nodes, whose paths would take "
                f"{12 * pairs >> 30} GiB. Use model=gps"
            )
        self.model, collate = _model_and_collator(config, graphs)
        prepared = _prepared(*given, collate)
        self.splits = {}
        for part, rows in graphs.parts.items():
            size = {row: len(prepared[row].x) for row in rows}
            # sorted by size for less padding: scores do not depend on the order of graphs
            chosen = rows if part == "train" else sorted(rows, key=size.__getitem__)
            items: Any = Subset(prepared, chosen)  # type: ignore[arg-type]
            self.splits[part] = Split(items, collate, [size[row] for row in chosen])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output, y = model(batch).float(), batch.y
        if self.kind == "classes":
            return F.cross_entropy(output, y[:, 0].long())
        if self.kind == "numbers":
            return F.mse_loss(output, y) if self.metric == "rmse" else F.l1_loss(output, y)
        # missing labels have no weight
        known = ~y.isnan()
        target = torch.where(known, y, 0.0)
        loss = F.binary_cross_entropy_with_logits(output, target, weight=known, reduction="sum")
        return loss / known.sum().clamp(min=1)

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"output": model(batch).float(), "y": batch.y}

    def score(self, predictions: list[dict[str, Tensor]]) -> dict[str, float]:
        output = torch.cat([batch["output"] for batch in predictions])
        y = torch.cat([batch["y"] for batch in predictions])
        if self.kind == "classes":
            right = output.argmax(1) == y[:, 0].long()
            return {"accuracy": 100 * right.double().mean().item()}
        if self.kind == "numbers":
            error = (output - y).double()
            rmse = error.square().mean().sqrt()
            return {"mae": error.abs().mean().item(), "rmse": rmse.item()}
        return _label_scores(output, y)

    def example(self) -> Any:
        return (self.first_examples(32),)

    def identity(self, split: str, index: int) -> Any:
        """The graph as it was read: eigenvectors and walks are computed on each machine."""
        items: Any = self.splits[split].dataset
        return self.graphs.graphs[items.indices[index]].to_dict()


def _label_scores(output: Tensor, y: Tensor) -> dict[str, float]:
    """Mean over labels of average precision and area under the ROC curve, as in OGB, ×100.

    A label counts if both answers occur among the graphs where it is known.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    precisions, areas = [], []
    for truth, score in zip(y.T, output.T, strict=True):
        known = ~truth.isnan()
        if len(truth[known].unique()) == 2:
            precisions.append(average_precision_score(truth[known], score[known]))
            areas.append(roc_auc_score(truth[known], score[known]))
    if not areas:
        raise ValueError("no label has both answers in this split: its ranking cannot be scored")
    return {"ap": 100 * sum(precisions) / len(areas), "rocauc": 100 * sum(areas) / len(areas)}


def _model_and_collator(config: GraphConfig, graphs: GraphSet) -> tuple[nn.Module, Collator]:
    """A model for these graphs, initialised by torch's global generator, and what batches it."""
    ends: Any = graphs.node_features, graphs.edge_features, graphs.outputs
    sizes: dict[str, Any] = {"dim": config.width, "depth": config.depth, "num_heads": config.heads}
    padded = config.pad_to_multiple
    encoding_size = 0 if config.encoding == "none" else config.encoding_size
    if config.model == "gps":
        from gfsa_experiments.tasks.graph.gps import GPS, GPSCollator

        return GPS(config, *ends), GPSCollator(config.encoding, encoding_size, padded)
    make = Graphormer.slim if config.model == "graphormer-slim" else Graphormer.base
    names = "dropout", "mlp_dropout", "attention_dropout"
    options = sizes | {name: getattr(config, name) for name in names}
    graphormer = make(*ends, ffn_dim=config.ffn_width, **options)
    return graphormer, GraphormerCollator(pad_to_multiple=padded)


@lru_cache(maxsize=2)
def _prepared(data: str, data_dir: Path, labels: Wanted, collate: Collator) -> dict[int, Prepared]:
    """What the batches need of each graph, for this and later runs of the process."""
    found = read_graphs(data, data_dir, labels)
    rows = (row for part in found.parts.values() for row in part)
    return {row: collate.prepare(found.graphs[row]) for row in rows}
