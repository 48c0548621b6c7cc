"""The graph recipe's settings: the papers' for each model and data set, and what is given."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest

from gfsa_experiments.engine.config import from_text
from gfsa_experiments.tasks.graph.data_sets import DataName
from gfsa_experiments.tasks.graph.recipe import GraphConfig, ModelName
from gfsa_experiments.tasks.graph.settings import paper_settings

MODELS = get_args(ModelName)


def test_settings_follow_the_model_and_the_data() -> None:
    slim = GraphConfig()
    assert (slim.lr, slim.batch_size, slim.epochs, slim.warmup) == (2e-4, 256, 10_000, 0.1)
    gps = from_text(GraphConfig, {"model": "gps"})
    assert (gps.lr, gps.batch_size, gps.depth, gps.width, gps.heads) == (1e-3, 32, 10, 64, 4)
    assert (gps.encoding, gps.encoding_size, gps.local, gps.pooling) == ("walk", 20, "gine", "sum")
    peptides = from_text(GraphConfig, {"model": "gps", "data": "peptides-func"})
    assert (peptides.encoding, peptides.width, peptides.depth) == ("laplacian", 96, 4)
    assert (gps.group_by_length, peptides.group_by_length) == (False, True)


def test_what_is_given_stays_even_if_it_is_the_default_of_another_model() -> None:
    given = from_text(GraphConfig, {"lr": "0.0002", "model": "gps"})
    assert given.lr == 2e-4
    given = from_text(GraphConfig, {"model": "gps", "group_by_length": "true"})
    assert given.group_by_length is True
    # nor does anything change that is settled
    assert dataclasses.replace(given, seed=3) == GraphConfig(
        model="gps", group_by_length=True, seed=3
    )


@pytest.mark.parametrize(("data", "model"), list(itertools.product(get_args(DataName), MODELS)))
def test_every_model_has_settings_for_every_data_set(data: str, model: str) -> None:
    chosen = GraphConfig(data=data, model=model)  # type: ignore[arg-type]
    chosen.check()
    for name, value in paper_settings(model, data).items():
        assert getattr(chosen, name) == value
        # compilers stop at numbers of other types
        assert type(getattr(chosen, name)) is type(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "width 80 must be a multiple of heads 3"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"attention_dropout": 1.0}, "attention_dropout must lie in"),
        ({"encoding": "walk"}, "graphormer has encodings of its own"),
        ({"model": "gps", "encoding_size": 0}, "needs an encoding_size above 0"),
        ({"model": "gps", "encoding_width": 64}, "encoding_width must lie between 0 and width 64"),
        ({"model": "graph-vit", "encoding": "laplacian"}, "laplacian is GPS's"),
        ({"model": "graph-vit", "gnn_depth": 0}, "needs a gnn_depth above 0"),
        ({"patch_hops": -1}, "patch_hops must be at least 0"),
        ({"lr": 0.0}, "lr must be above 0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphConfig(**settings).check()
