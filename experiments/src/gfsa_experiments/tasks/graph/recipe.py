"""Properties of whole graphs with Graphormer, GPS and Graph-ViT."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from gfsa_experiments.engine.task import Recipe, Split, Task, as_it_is
from gfsa_experiments.tasks.graph.batches import DenseItems, GraphItems, PairItems, PatchItems
from gfsa_experiments.tasks.graph.features import (
    MAX_HOPS,
    laplacian_encoding,
    pair_features,
    patch_features,
    walk_encoding,
)
from gfsa_experiments.tasks.graph.graphs import TEST, TRAIN, VALID, GraphSet, Tensors
from gfsa_experiments.tasks.graph.readers import (
    DATA_NAMES,
    EXPECTED,
    is_own,
    own_name,
    read_graphs,
)

Settings = dict[str, Any]

NOT_GIVEN: Any = None
"""The default of settings that follow the model and the data set."""


def _settings(line: dict[str, str]) -> Settings:
    """The settings that a line gives, with numbers and truth values as such."""
    given = {name: text for name, text in line.items() if text and name not in ("model", "data")}
    return {name: _value(text) for name, text in given.items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


_SETTINGS = {
    (line["model"], line["data"]): _settings(line)
    for line in table("gfsa_experiments.tasks.graph", "settings.csv")
}
MODELS = tuple(dict.fromkeys(model for model, _ in _SETTINGS))
FOLLOWING = tuple(_SETTINGS[MODELS[0], ""])
"""The settings that follow the model and the data set."""

_GRAPHORMERS = ("graphormer-slim", "graphormer")
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ffn_width", "mlp_dropout"), _GRAPHORMERS),
    **dict.fromkeys(("local", "encoding_width", "pooling"), ("gps",)),
    **dict.fromkeys(("encoding", "encoding_size"), ("gps", "graph-vit")),
    **dict.fromkeys(("gnn_depth", "patches", "patch_hops", "patch_walk_steps"), ("graph-vit",)),
}
"""Settings that only some models read."""


def paper_settings(model: str, data: str) -> Settings:
    """The papers' settings for this model on this data set."""
    return _SETTINGS[model, ""] | _SETTINGS.get((model, data), {})


def unread_settings(model: str) -> dict[str, str]:
    """Settings that only other models read: name → reason."""
    return {
        name: f"model={model} does not use it; {' or '.join(readers)} would"
        for name, readers in _READ_BY.items()
        if model not in readers
    }


def build_model(config: GraphConfig, graphs: GraphSet) -> nn.Module:
    """A model for these graphs' features and labels; torch's global generator initialises it."""
    ends = graphs.node_features, graphs.edge_features, graphs.outputs
    sizes = {"dim": config.width, "depth": config.depth, "num_heads": config.heads}
    if config.model.startswith("graphormer"):
        from gfsa_experiments.models import Graphormer

        make = Graphormer.slim if config.model == "graphormer-slim" else Graphormer.base
        return make(
            *ends,
            **sizes,
            ffn_dim=config.ffn_width,
            max_hops=MAX_HOPS,
            dropout=config.dropout,
            mlp_dropout=config.mlp_dropout,
            attention_dropout=config.attention_dropout,
        )
    if config.model == "gps":
        from gfsa_experiments.tasks.graph.gps import GPS

        return GPS(
            *ends,
            **sizes,
            local=config.local,
            encoding=config.encoding,
            encoding_size=config.encoding_size,
            encoding_dim=config.encoding_width,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            pooling=config.pooling,
        )
    from gfsa_experiments.tasks.graph.gps import PaddedGraphViT

    return PaddedGraphViT(
        *ends,
        **sizes,
        gnn_depth=config.gnn_depth,
        walk_steps=0 if config.encoding == "none" else config.encoding_size,
        patch_walk_steps=config.patch_walk_steps,
        gnn_dropout=config.dropout,
        dropout=config.attention_dropout,
    )


ModelName = Literal["graphormer-slim", "graphormer", "gps", "graph-vit"]
Encoding = Literal["walk", "laplacian", "none"]

_LENS_GRAPHS = 32


@dataclass(frozen=True, kw_only=True)
class GraphConfig(TrainConfig):
    """Settings that are not given follow the model and the data set, as in the papers.

    The constructor fills them in, so ``dataclasses.replace`` with another model would keep those of
    the first: construct a new config instead.
    """

    in_label = ("data", "model")

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
    """Width inside Graphormer's MLPs; those of GPS and Graph-ViT have twice the model's width."""
    gnn_depth: CountOrZero = NOT_GIVEN
    """Graph-ViT: GINE layers within patches."""
    dropout: ShareBelowOne = NOT_GIVEN
    """On the branches of the layers; in Graph-ViT, within patches."""
    mlp_dropout: ShareBelowOne = NOT_GIVEN
    """Graphormer: inside the MLPs; GPS and Graph-ViT use ``dropout`` there."""
    attention_dropout: ShareBelowOne = NOT_GIVEN
    """On entries of A; in Graph-ViT, in the whole Transformer over patches."""
    local: Literal["gine", "gated"] = NOT_GIVEN
    """GPS: its message passing."""
    encoding: Encoding = NOT_GIVEN
    """GPS and Graph-ViT (walk only): the encoding of a node's position in its graph."""
    encoding_size: CountOrZero = NOT_GIVEN
    """Random-walk steps or eigenvectors."""
    encoding_width: CountOrZero = NOT_GIVEN
    """GPS: the part of the width that the encoding takes."""
    pooling: Literal["sum", "mean"] = NOT_GIVEN
    """GPS: pooling of nodes."""
    patches: Count = 32
    """Graph-ViT: the largest number of patches per graph."""
    patch_hops: CountOrZero = 1
    """Graph-ViT: each patch contains the neighbours of its nodes up to this distance."""
    patch_walk_steps: CountOrZero = NOT_GIVEN
    """Graph-ViT: random-walk steps of the patches' encoding."""
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
        unused = super().unused() | unread_settings(self.model)
        if self.data in DATA_NAMES:
            unused["labels"] = f"those of {self.data} are known; data= of your own has others"
        if self.encoding == "none":
            for name in ("encoding_size", "encoding_width"):
                unused.setdefault(name, "encoding=none has no size")
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
            if not 0 < self.encoding_width < self.width:
                raise ValueError(
                    f"encoding_width must lie between 0 and width {self.width}, "
                    f"got {self.encoding_width}"
                )
        if self.model == "graph-vit":
            if self.encoding == "laplacian":
                raise ValueError("graph-vit takes encoding=walk or none; laplacian is GPS's")
            if not self.gnn_depth:
                raise ValueError("graph-vit needs a gnn_depth above 0")
        if self.model.startswith("graphormer") and self.encoding != "none":
            raise ValueError("graphormer has encodings of its own; leave encoding=none")

    def label(self) -> str:
        own = "" if self.data in DATA_NAMES else f"data={own_name(self.data)}"
        return f"{own or self.data} {self.model}"


class GraphTask(Task):
    """A graph model and its data set, measured by the data set's customary metric."""

    def __init__(self, model: nn.Module, graphs: GraphSet, items: dict[str, GraphItems]) -> None:
        self.model = model
        self.kind = graphs.kind
        self.metric = graphs.metric
        self.own_data = graphs.own
        self.higher_is_better = self.metric not in ("mae", "rmse")
        self.inputs = items["train"].inputs
        self.splits = {
            name: Split(part, as_it_is, part.graphs.nodes[part.chosen].tolist())
            for name, part in items.items()
        }

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        output, y = model(self.inputs(batch)).float(), batch["y"]
        if self.kind == "classes":
            return F.cross_entropy(output, y[:, 0].long())
        if self.kind == "regression":
            return F.mse_loss(output, y) if self.metric == "rmse" else F.l1_loss(output, y)
        # missing labels have no weight
        known = ~y.isnan()
        target = torch.where(known, y, 0.0)
        loss = F.binary_cross_entropy_with_logits(output, target, weight=known, reduction="sum")
        return loss / known.sum().clamp(min=1)

    def predict(self, model: nn.Module, batch: Tensors) -> Tensors:
        return {"output": model(self.inputs(batch)).float(), "y": batch["y"]}

    def score(self, predictions: list[Tensors]) -> dict[str, float]:
        output = torch.cat([batch["output"] for batch in predictions])
        y = torch.cat([batch["y"] for batch in predictions])
        if self.kind == "classes":
            right = output.argmax(1) == y[:, 0].long()
            return {"accuracy": 100 * right.double().mean().item()}
        if self.kind == "regression":
            error = (output - y).double()
            return {
                "mae": error.abs().mean().item(),
                "rmse": error.square().mean().sqrt().item(),
            }
        return _label_scores(output, y)

    def example(self) -> Any:
        """Some validation graphs, for the lens."""
        return (self.inputs(self.first_examples(_LENS_GRAPHS)),)

    def identity(self, split: str, index: int) -> Any:
        """The graph as it was read: eigenvectors and walks are computed on each machine."""
        items: Any = self.splits[split].dataset
        return items.graphs.source(int(items.chosen[index]))


def _label_scores(output: Tensor, y: Tensor) -> dict[str, float]:
    """Mean over labels of average precision and area under the ROC curve, as in OGB, ×100.

    A label counts if both answers occur among the graphs where it is known.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    precisions, areas = [], []
    for column in range(y.shape[1]):
        known = ~y[:, column].isnan()
        truth, score = y[known, column].numpy(), output[known, column].numpy()
        if 0 < truth.sum() < len(truth):
            precisions.append(average_precision_score(truth, score))
            areas.append(roc_auc_score(truth, score))
    if not areas:
        raise ValueError("no label has both answers in this split: its ranking cannot be scored")
    count = len(areas)
    return {"ap": 100 * sum(precisions) / count, "rocauc": 100 * sum(areas) / count}


def build(config: GraphConfig, data_dir: Path) -> GraphTask:
    """Read the graphs, compute the model's features of them (once), build the model."""
    data_dir = Path(data_dir).absolute()
    graphs = read_graphs(config.data, data_dir, config.labels)
    features = _features(config, data_dir)
    kinds: dict[str, type[GraphItems]] = {"gps": DenseItems, "graph-vit": PatchItems}
    kind = kinds.get(config.model, PairItems)
    items = {
        name: kind(graphs, features, _in_order(graphs, which), config.pad_to_multiple)
        for name, which in (("train", TRAIN), ("valid", VALID), ("test", TEST))
    }
    return GraphTask(build_model(config, graphs), graphs, items)


def _in_order(graphs: GraphSet, which: int) -> Tensor:
    chosen = graphs.part(which)
    if which == TRAIN:
        return chosen
    # sorted by size for less padding: scores do not depend on the order of graphs
    return chosen[torch.argsort(graphs.nodes[chosen], stable=True)]


def _features(config: GraphConfig, data_dir: Path) -> Tensors:
    """The features that the model needs, cached for later runs of this process."""
    wanted: dict[str, tuple[int, ...]] = {}
    if config.model.startswith("graphormer"):
        wanted["pairs"] = ()
    elif config.encoding != "none":
        wanted[config.encoding] = (config.encoding_size,)
    elif config.model == "graph-vit":
        # a walk of no steps: each node has an encoding, which is empty
        wanted["walk"] = (0,)
    if config.model == "graph-vit":
        wanted["patches"] = (config.patches, config.patch_hops, config.patch_walk_steps)
    features: Tensors = {}
    for what, sizes in wanted.items():
        features |= _cached_features(config.data, data_dir, config.labels, what, sizes)
    return features


@lru_cache(maxsize=6)
def _cached_features(
    data: str, data_dir: Path, labels: Wanted, what: str, sizes: tuple[int, ...]
) -> Tensors:
    """One kind of features."""
    kinds: dict[str, Callable[..., Tensors]] = {
        "pairs": pair_features,
        "walk": walk_encoding,
        "laplacian": laplacian_encoding,
        "patches": patch_features,
    }
    return kinds[what](read_graphs(data, data_dir, labels), *sizes)


RECIPE = Recipe(
    name="graph",
    title="Graphormer, GPS and Graph-ViT on molecules, peptides, or graphs of your own",
    config=GraphConfig,
    build=build,
    extra="graph",
)
assert {field.name for field in dataclasses.fields(GraphConfig)} >= set(FOLLOWING)
