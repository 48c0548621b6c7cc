"""Builds the model that the settings of the graph recipe describe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from gfsa_experiments.tasks.graph.features import MAX_HOPS
from gfsa_experiments.tasks.graph.graphs import GraphSet

if TYPE_CHECKING:
    from gfsa_experiments.tasks.graph.recipe import GraphConfig


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
    from gfsa_experiments.tasks.graph.vit import PaddedGraphViT

    return PaddedGraphViT(
        *ends,
        **sizes,
        gnn_depth=config.gnn_depth,
        walk_steps=0 if config.encoding == "none" else config.encoding_size,
        patch_walk_steps=config.patch_walk_steps,
        gnn_dropout=config.dropout,
        dropout=config.attention_dropout,
    )
