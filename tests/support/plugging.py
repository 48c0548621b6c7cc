"""The checks that every plugged backbone must pass, whatever its library."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from gfsa.plugs import PlugReport

Run = Callable[[nn.Module], Tensor]
"""Runs a model on fixed inputs, in the model's precision, and gives one tensor."""


def check_backbone(
    build: Callable[[], nn.Module],
    run: Run,
    tmp_path: Any,
    identity: float = 0.0,
    reference: Callable[..., Any] | None = None,
    **arguments: Any,
) -> PlugReport:
    """Identity at init, the dense formula, gradients, copies, files, and the way back.

    Args:
        build: makes the model, without dropout or in evaluation mode.
        run: see :data:`Run`.
        identity: the largest difference at init; above zero only with a reason beside it.
        reference: a context ``(model, coefficients)`` in which the unplugged model computes with
            ``H = Σ c_k A^k``; default :func:`filtered_softmax`.
        arguments: for :func:`gfsa.plug`.
    """
    torch.manual_seed(0)
    model = build().eval()
    untouched = copy.deepcopy(model)
    report = _check_identity(model, untouched, run, identity, arguments)
    _check_copies(model, run)
    _check_files(model, untouched, run, tmp_path)
    _check_gradients(model, run)
    gfsa.unplug(model)
    _check_as_before(model, untouched, run)
    _check_dense_formula(untouched.double(), run, reference or filtered_softmax, arguments)
    return report


def randomise(model: nn.Module, scale: float = 0.3) -> Any:
    """Give every filter in ``model`` that learns a random θ, the same each time; the model."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, gfsa.GraphFilter) and module.theta is not None:
                theta = torch.randn(module.theta.shape, generator=generator)
                module.theta.copy_(theta * scale)
    return model


def disturb(model: nn.Module) -> list[Tensor]:
    """Give every filter random numbers; returns the coefficients in the model's order."""
    coefficients = []
    for filter in gfsa.filters_of(model).values():
        with torch.no_grad():
            filter.theta.copy_(torch.randn_like(filter.theta) * 0.3)
        coefficients.append(filter.coefficients().detach())
    return coefficients


@torch.no_grad()
def _check_identity(
    model: nn.Module, untouched: nn.Module, run: Run, identity: float, arguments: dict[str, Any]
) -> PlugReport:
    with slow_path():
        expected = run(untouched)
    planned = gfsa.plug(model, dry_run=True, **arguments)
    assert not gfsa.filters_of(model), "a dry run changes nothing"
    report = gfsa.plug(model, **arguments)
    assert report.plugged == planned.plugged
    assert report.skipped == planned.skipped
    assert set(gfsa.filters_of(model)) == set(report.plugged)
    assert report.parameters == sum(
        p.numel() for f in gfsa.filters_of(model).values() for p in f.parameters()
    )
    got = run(model)
    assert got.isfinite().all()
    assert (got - expected).abs().max().item() <= identity
    return report


@torch.no_grad()
def _check_copies(model: nn.Module, run: Run) -> None:
    disturb(model)
    expected = run(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run(twin), expected, rtol=0, atol=0)
        disturb(twin)
        assert not torch.equal(run(twin), expected), "the copy has filters of its own"
    torch.testing.assert_close(run(model), expected, rtol=0, atol=0)


@torch.no_grad()
def _check_files(model: nn.Module, untouched: nn.Module, run: Run, folder: Any) -> None:
    gfsa.save(model, folder)
    other = copy.deepcopy(untouched)
    gfsa.load(other, folder)
    torch.testing.assert_close(run(other), run(model), rtol=0, atol=0)


def _check_gradients(model: nn.Module, run: Run) -> None:
    model.zero_grad()
    y = run(model)
    (y * torch.randn_like(y)).sum().backward()
    for name, filter in gfsa.filters_of(model).items():
        assert filter.theta.grad is not None, name
        assert filter.theta.grad.isfinite().all(), name
        assert (filter.theta.grad != 0).all(), name


@torch.no_grad()
def _check_as_before(model: nn.Module, untouched: nn.Module, run: Run) -> None:
    assert list(model.state_dict()) == list(untouched.state_dict())
    modules = dict(untouched.named_modules())
    for name, module in model.named_modules():
        assert type(module) is type(modules[name]), name
        assert not [note for note in module.__dict__ if "gfsa" in note], name
        assert not module._forward_pre_hooks, name
        assert not module._forward_hooks, name
    torch.testing.assert_close(run(model), run(untouched), rtol=0, atol=0)


@torch.no_grad()
def _check_dense_formula(
    model: nn.Module, run: Run, reference: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    plugged = copy.deepcopy(model)
    gfsa.plug(plugged, **arguments)
    coefficients = disturb(plugged)
    with slow_path(), reference(model, coefficients):
        expected = run(model)
    attention = [torch.eye(c.shape[-1], dtype=c.dtype)[1].expand_as(c) for c in coefficients]
    with slow_path(), reference(model, attention):
        plain = run(model)
    got = run(plugged)
    assert got.dtype == torch.float64
    assert (got - plain).abs().max().item() > 1e-6, "the filters must make a difference"
    assert (got - expected).abs().max().item() <= 1e-10


@contextmanager
def slow_path() -> Iterator[None]:
    """torch's multi-head attention in Python, the path that a plugged one can equal to the bit."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def matrix_polynomial(coefficients: Tensor, matrix: Tensor) -> Tensor:
    """``H = Σ_k c_k A^k`` by powers of the matrix; ``(heads, m+1)`` and ``(..., heads, n, n)``."""
    merged = matrix.dim() == 3
    if merged:
        matrix = matrix.unflatten(0, (-1, len(coefficients)))
    axis = 1 if matrix.dim() == 5 and matrix.shape[1] == len(coefficients) else -3
    matrix = matrix.movedim(axis, -3)
    total = torch.zeros_like(matrix)
    for power, column in enumerate(coefficients.unbind(-1)):
        total += column[:, None, None] * torch.linalg.matrix_power(matrix, power)
    total = total.movedim(-3, axis)
    return total.flatten(0, 1) if merged else total


@contextmanager
def filtered_softmax(model: nn.Module, coefficients: Sequence[Tensor]) -> Iterator[None]:
    """Inside, each square softmax of ``model`` gives H in place of A, with the next coefficients.

    Nothing of the package is used: torch's own functions are replaced for the time being.
    """
    remaining = list(coefficients)
    softmax = Tensor.softmax

    def filtered(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        matrix = softmax(scores, dim, dtype=dtype)
        if matrix.shape[-1] != matrix.shape[-2]:
            return matrix
        # float32 is asked for by some models even in float64
        return matrix_polynomial(remaining.pop(0), softmax(scores, dim).nan_to_num())

    def attention(  # type: ignore[no-untyped-def]
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        assert not enable_gqa, "this reference has no groups of heads"
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = q @ k.transpose(-2, -1) * scale
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        if is_causal:
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return filtered(scores, -1) @ v

    with (
        mock.patch.object(Tensor, "softmax", filtered),
        mock.patch.object(torch, "softmax", filtered),
        mock.patch.object(F, "scaled_dot_product_attention", _by_keyword(attention)),
    ):
        yield
    assert not remaining, f"{len(remaining)} filters were not used by the reference"


def _by_keyword(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        names = ("query", "key", "value")
        ordered = [kwargs.pop(name) for name in names if name in kwargs]
        return attention(*args, *ordered, **kwargs)

    return call
