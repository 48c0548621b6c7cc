"""The five things that every feature of tests/scale is shown on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gfsa
from support.zoo import VOCABULARY, ZOO, randomise

HEADS, DIM = 4, 8
Batch = dict[str, Tensor]


class Op(nn.Module):
    """``graph_filter_attention`` by itself: queries, keys and values in, tokens out."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.gfsa = gfsa.GFSA(HEADS, K=3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        coefficients = self.gfsa.coefficients()
        return gfsa.graph_filter_attention(q, k, v, coefficients, is_causal=self.causal)


TERMS: dict[str, Any] = {
    "filter": lambda heads: gfsa.GFSA(heads).exclude(0.5, learn=True),
    "depth": True,
}
"""Arguments of ``gfsa.plug`` for both terms beside the polynomial."""


@dataclass(frozen=True)
class Subject:
    """How one subject is built, plugged with filters that do something, and its inputs.

    ``inputs(batch, length)`` gives keyword arguments; images and graphs ignore the length.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Batch]

    def plugged(self, K: int = 3, terms: bool = False) -> Any:
        """``terms``: with the exclusive and the depth term."""
        torch.manual_seed(0)
        model = self.build().float().eval()
        if not isinstance(model, Op):
            gfsa.plug(model, **(TERMS if terms else {"K": K}))
        randomise(model)
        return model


def filters_of(model: nn.Module) -> list[gfsa.GraphFilter]:
    return [module for module in model.modules() if isinstance(module, gfsa.GraphFilter)]


def first(output: Any) -> Tensor:
    """The tensor that matters of what a model returns."""
    return output if isinstance(output, Tensor) else output[0]


def _tokens(batch: int, length: int) -> Batch:
    return {name: torch.randn(batch, HEADS, length, DIM) for name in ("q", "k", "v")}


def text(batch: int, length: int) -> Batch:
    """Random words; every row but the first has two tokens of padding at its end."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:, -2:] = 0
    return {
        "input_ids": torch.randint(3, VOCABULARY, (batch, length)),
        "attention_mask": mask,
    }


def _images(batch: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def gps() -> nn.Module:
    """A graph Transformer of PyTorch Geometric."""
    from torch_geometric.nn import GINConv, GPSConv, global_mean_pool

    class GPS(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                GPSConv(16, GINConv(nn.Linear(16, 16)), HEADS, norm="layer_norm") for _ in range(2)
            )

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edge_index, batch)
            return global_mean_pool(x, batch)

    return GPS()


def _rings(batch: int, length: int) -> Batch:
    """Rings of different sizes."""
    edges, owners, start = [], [], 0
    for number in range(batch):
        nodes = torch.arange(length + number)
        edges.append(torch.stack([nodes, (nodes + 1) % len(nodes)]) + start)
        owners.append(torch.full((len(nodes),), number))
        start += len(nodes)
    return {
        "x": torch.randn(start, 16),
        "edge_index": torch.cat(edges, 1),
        "batch": torch.cat(owners),
    }


SUBJECTS = {
    "op": Subject("op", Op, _tokens),
    "BERT": Subject("BERT", lambda: ZOO["bert"].model("sdpa"), text),
    "GPT-2": Subject("GPT-2", lambda: ZOO["gpt2"].model("sdpa"), text),
    "ViT": Subject("ViT", lambda: ZOO["vit"].model("sdpa"), _images),
    "GPS": Subject("GPS", gps, _rings),
}
