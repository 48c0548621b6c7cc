"""The rows of gfsa.models in docs/supported.md; tests/models tests the models themselves."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from torch import nn

import gfsa
from gfsa_experiments.models import Encoder, Graphormer, GraphViT
from support.graphs import ATOMS, BONDS
from support.supported import Supported

MODELS: dict[str, Callable[[], nn.Module]] = {
    "Graphormer": lambda: Graphormer((ATOMS,), (BONDS,), dim=12, depth=2, num_heads=3, ffn_dim=12),
    "Graph-ViT, Hadamard attention": lambda: GraphViT(
        (ATOMS,), (BONDS,), dim=12, num_heads=3, gnn_depth=1
    ),
    "Encoder, softmax": lambda: Encoder(11, 5, 9, "softmax", dim=12, num_heads=3, ffn_dim=12),
    "Encoder, Efficient Attention": lambda: Encoder(
        11, 5, 9, "efficient", dim=12, num_heads=3, ffn_dim=12
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_plugs(name: str, supported: Supported) -> None:
    report = gfsa.plug(MODELS[name]())
    assert report.plugged
    assert not report.skipped
    supported("gfsa.models", name, report)


def test_linformer_is_refused(supported: Supported) -> None:
    model = Encoder(11, 5, 9, "linformer", dim=12, num_heads=3, ffn_dim=12)
    why = "Linformer's map is not square (tokens × projected rows): it has no powers"
    with pytest.raises(ValueError, match=re.escape(why)):
        gfsa.plug(model)
    supported.refused("gfsa.models", "Encoder, Linformer", why)
