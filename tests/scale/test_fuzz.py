"""Random arguments of public functions: every error is one that gfsa raises on purpose."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gfsa
from gfsa.filters import PartialPolynomial
from gfsa.functional import which_backend
from gfsa.plugs import FilterNotCalledError, SwapClass, registry
from support.tiny import TinyEncoder

MEANT = (ValueError, TypeError, FileNotFoundError, FilterNotCalledError)
"""What the docstrings promise; anything else is a bug."""

numbers = st.one_of(
    st.integers(-3, 9), st.floats(width=32), st.sampled_from([10**400, -(10**400), 1e308, True])
)
shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64]
)
tensors = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)
anything = st.recursive(
    st.one_of(
        st.none(),
        numbers,
        st.text(max_size=6),
        st.binary(max_size=4),
        tensors,
        st.sampled_from([object(), nn.Linear(2, 2), gfsa.Twicing(2), gfsa.Twicing, len]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=4,
)


@contextlib.contextmanager
def only_what_was_meant() -> Any:
    with contextlib.suppress(*MEANT):
        yield


# a call that is right, so that one wrong argument at a time reaches the code behind the checks
RIGHT: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    gfsa.graph_filter_attention: lambda: {
        **{name: torch.ones(2, 4, 5, 3) for name in ("q", "k", "v")},
        "coeffs": torch.ones(4, 3),
    },
    which_backend: lambda: {
        **{name: torch.ones(2, 4, 5, 3) for name in ("q", "k", "v")},
        "coeffs": torch.ones(4, 3),
    },
    gfsa.linear_graph_filter_attention: lambda: {
        **{name: torch.ones(2, 4, 5, 3) for name in ("q", "k", "v")},
        "coeffs": torch.ones(4, 3),
    },
    gfsa.GFSA: lambda: {"num_heads": 4},
    gfsa.Polynomial: lambda: {"num_heads": 4},
    PartialPolynomial: lambda: {"num_heads": 4, "degree": 2, "high": [1]},
    gfsa.Twicing: lambda: {"num_heads": 4},
    gfsa.Laplacian: lambda: {"num_heads": 4},
    gfsa.PageRank: lambda: {"num_heads": 4},
    gfsa.plug: lambda: {"model": TinyEncoder(depth=1)},
    gfsa.unplug: lambda: {"model": plugged()},
    gfsa.filters_of: lambda: {"model": plugged()},
    gfsa.parameter_groups: lambda: {"model": plugged(), "lr": 1e-3},
    gfsa.prune: lambda: {"model": plugged()},
    gfsa.register_adapter: lambda: {
        "cls": nn.Identity,
        "adapter": SwapClass(nn.Identity, lambda module: 1),
    },
}


def plugged() -> nn.Module:
    model = TinyEncoder(depth=1)
    gfsa.plug(model)
    return model


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
@settings(max_examples=60)
@given(data=st.data())
def test_one_wrong_argument(function: Callable[..., Any], data: st.DataObject) -> None:
    arguments = RIGHT[function]()
    names = [name for name in inspect.signature(function).parameters if name != "inputs"]
    name = data.draw(st.sampled_from(names))
    arguments[name] = data.draw(anything)
    with only_what_was_meant(), mock.patch.dict(registry._registered):
        function(**arguments)


@pytest.mark.parametrize(
    "function",
    [gfsa.graph_filter_attention, which_backend, gfsa.linear_graph_filter_attention],
    ids=lambda function: function.__name__,
)
@settings(max_examples=150)
@given(data=st.data())
def test_any_tensors(function: Callable[..., Any], data: st.DataObject) -> None:
    names = list(inspect.signature(function).parameters)
    masks = [name for name in names if name in ("attn_mask", "key_padding_mask")]
    arguments = {name: data.draw(tensors) for name in ("q", "k", "v", "coeffs")}
    arguments |= {name: data.draw(st.none() | tensors) for name in masks}
    with only_what_was_meant():
        function(**arguments)


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_the_right_call_is_right(function: Callable[..., Any]) -> None:
    """What the tests above would not notice: a call that fails whatever it is given."""
    with mock.patch.dict(registry._registered):
        function(**RIGHT[function]())


@settings(max_examples=40)
@given(thing=anything)
def test_folders_and_models(thing: Any, tmp_path: Path) -> None:
    model = plugged()
    with only_what_was_meant():
        gfsa.load(model, thing)
    for function in (gfsa.load, gfsa.save, gfsa.from_pretrained):
        with only_what_was_meant():
            function(thing, tmp_path)


@settings(max_examples=40)
@given(thing=anything)
def test_diagnose(thing: Any) -> None:
    with only_what_was_meant():
        gfsa.diagnose(thing, torch.ones(1, 3, 16))
