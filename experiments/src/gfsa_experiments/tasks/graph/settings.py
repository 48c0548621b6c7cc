"""The papers' settings for each model and data set, which become the recipe's defaults.

Sources: the appendix of the GFSA paper and Graphormer's published scripts, and the published
configurations of GPS and Graph-ViT. A data set that a paper lacks gets the settings of the most
similar one. docs/recipes/graph.md lists the differences.
"""

from __future__ import annotations

import ast
from typing import Any

Settings = dict[str, Any]

NOT_GIVEN: Any = None
"""The default of settings that follow the model and the data set."""


def _settings(text: str) -> Settings:
    """``lr=2e-4 local=gine``, as on the command line, with numbers and truth values as such."""
    return {name: _value(value) for name, value in (word.split("=") for word in text.split())}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


_GRAPHORMER = _settings("""
    epochs=300.0 batch_size=256 lr=2e-4 weight_decay=0.01 schedule=linear warmup=0.1 clip=5.0
    group_by_length=True depth=12 width=80 heads=8 ffn_width=80 gnn_depth=0
    dropout=0.0 mlp_dropout=0.1 attention_dropout=0.1
    local=gine encoding=none encoding_size=0 encoding_width=0 pooling=mean
    patch_walk_steps=0 pad_to_multiple=8
""")
_BASE = _GRAPHORMER | _settings("""
    batch_size=1024 weight_decay=0.0 warmup=0.06 width=768 heads=32 ffn_width=768
""")
_GPS = _GRAPHORMER | _settings("""
    epochs=100.0 batch_size=32 lr=1e-4 weight_decay=1e-5 schedule=cosine warmup=0.05 clip=1.0
    group_by_length=False depth=10 width=64 heads=4 ffn_width=0
    dropout=0.05 mlp_dropout=0.05 attention_dropout=0.5
    local=gated encoding=walk encoding_size=16 encoding_width=16
""")
_GPS_PCQM = _settings("""
    batch_size=256 lr=5e-4 weight_decay=0.0 depth=5 width=304 dropout=0.0 encoding_width=20
""")
_GPS_PEPTIDES = _settings("""
    epochs=200.0 batch_size=128 lr=3e-4 weight_decay=0.0 group_by_length=True depth=4 width=96
    dropout=0.0 encoding=laplacian encoding_size=10 pad_to_multiple=32
""")
_GPS_SUPERPIXELS = _settings("""
    batch_size=16 lr=1e-3 depth=3 width=52 dropout=0.0
    encoding=laplacian encoding_size=8 encoding_width=8
""")
_GRAPH_VIT = _GRAPHORMER | _settings("""
    epochs=200.0 batch_size=128 lr=1e-3 weight_decay=0.0 schedule=cosine warmup=0.0 clip=0.0
    group_by_length=False depth=4 width=128 ffn_width=0 gnn_depth=4
    mlp_dropout=0.0 attention_dropout=0.0
    encoding=walk encoding_size=16 patch_walk_steps=8 pad_to_multiple=32
""")
_VIT_PEPTIDES = _settings("depth=2 group_by_length=True")
_VIT_OGB = _settings("""
    batch_size=32 dropout=0.3 encoding=none encoding_size=0 patch_walk_steps=0
""")

# by model
_MODELS: dict[str, Settings] = {
    "graphormer-slim": _GRAPHORMER,
    "graphormer": _BASE,
    "gps": _GPS,
    "graph-vit": _GRAPH_VIT,
}
# by model and data set, where they differ from the model's
_PAIRS: dict[tuple[str, str], Settings] = {
    ("graphormer-slim", "zinc"): _settings("epochs=10000.0"),
    ("gps", "zinc"): _settings("""
        epochs=2000.0 lr=1e-3 warmup=0.025 dropout=0.0 local=gine
        encoding_size=20 encoding_width=28 pooling=sum
    """),
    ("gps", "pcqm4m"): _GPS_PCQM,
    ("gps", "pcqm4mv2"): _GPS_PCQM,
    ("gps", "qm8"): _GPS_PCQM,
    ("gps", "peptides-func"): _GPS_PEPTIDES,
    ("gps", "peptides-struct"): _GPS_PEPTIDES,
    ("gps", "mnist"): _GPS_SUPERPIXELS,
    ("gps", "cifar10"): _GPS_SUPERPIXELS,
    ("graph-vit", "zinc"): _settings("epochs=2000.0 encoding_size=20 pad_to_multiple=8"),
    ("graph-vit", "peptides-func"): _VIT_PEPTIDES | _settings("attention_dropout=0.5"),
    ("graph-vit", "peptides-struct"): _VIT_PEPTIDES,
    ("graph-vit", "molhiv"): _VIT_OGB | _settings("gnn_depth=2 depth=2"),
    ("graph-vit", "moltox21"): _VIT_OGB,
}

MODELS = tuple(_MODELS)
FOLLOWING = tuple(_GRAPHORMER)
"""The settings that follow the model and the data set."""

_GRAPHORMERS = ("graphormer-slim", "graphormer")
# settings that only some models read (graph/models.py, graph/recipe.py)
_READ_BY: dict[str, tuple[str, ...]] = {
    "ffn_width": _GRAPHORMERS,
    "mlp_dropout": _GRAPHORMERS,
    "local": ("gps",),
    "encoding": ("gps", "graph-vit"),
    "encoding_size": ("gps", "graph-vit"),
    "encoding_width": ("gps",),
    "pooling": ("gps",),
    "gnn_depth": ("graph-vit",),
    "patches": ("graph-vit",),
    "patch_hops": ("graph-vit",),
    "patch_walk_steps": ("graph-vit",),
}


def paper_settings(model: str, data: str) -> Settings:
    """The papers' settings for this model on this data set."""
    return _MODELS[model] | _PAIRS.get((model, data), {})


def unread_settings(model: str) -> dict[str, str]:
    """Settings that only other models read: name → reason."""
    return {
        name: f"model={model} does not use it; {' or '.join(readers)} would"
        for name, readers in _READ_BY.items()
        if model not in readers
    }
