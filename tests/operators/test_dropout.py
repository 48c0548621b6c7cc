"""Attention dropout: one mask for all passes of a call."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from gfsa import graph_filter_attention
from gfsa.functional import which_backend
from gfsa.operators import AttentionOperator, DenseOperator, sdpa
from support.attention import BACKENDS, relative_error, tokens

COEFFS = torch.tensor([0.3, 0.8, -0.5, 0.4], dtype=torch.float64)

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.7},
    "additive mask": {"attn_mask": torch.linspace(-1, 1, 64).double().reshape(8, 8)},
    "head groups": {"enable_gqa": True},
}


def inputs(enable_gqa: bool = False, **_: object) -> list[torch.Tensor]:
    kv_heads = 2 if enable_gqa else 4
    shapes = (2, 4, 8, 6), (2, kv_heads, 8, 6), (2, kv_heads, 8, 5)
    return [tokens(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sdpa_is_dense_under_the_same_seed(options: dict, degree: int) -> None:
    """Exactly the map that was dropped once, in values and gradients."""
    q, k, v = inputs(**options)
    results = {}
    for backend in BACKENDS:
        torch.manual_seed(5)
        y = graph_filter_attention(
            q, k, v, COEFFS[: degree + 1], dropout_p=0.4, **options, backend=backend
        )
        results[backend] = [y, *torch.autograd.grad(y.square().sum(), (q, k, v))]
    for fast, dense in zip(results["sdpa"], results["dense"], strict=True):
        assert relative_error(fast, dense) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_powers_are_taken_of_the_dropped_map(backend: str) -> None:
    """The map is recovered from its action on the identity; its square has the same holes."""
    q, k, _ = inputs()
    identity = torch.eye(8, dtype=torch.float64).expand(2, 4, 8, 8)

    def power(exponent: int) -> torch.Tensor:
        torch.manual_seed(5)
        coeffs = torch.eye(3, dtype=torch.float64)[exponent]
        return graph_filter_attention(q, k, identity, coeffs, dropout_p=0.5, backend=backend)

    dropped = power(1)
    assert 0.3 < (dropped == 0).double().mean() < 0.7
    assert relative_error(power(2), dropped @ dropped) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_reproducible_and_moves_on(backend: str) -> None:
    q, k, v = inputs()

    def call() -> torch.Tensor:
        return graph_filter_attention(q, k, v, COEFFS, dropout_p=0.3, backend=backend)

    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_generator_ends_where_plain_attention_leaves_it(degree: int) -> None:
    q, k, v = inputs()
    torch.manual_seed(3)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    expected = torch.get_rng_state()
    for backend in BACKENDS:
        torch.manual_seed(3)
        graph_filter_attention(q, k, v, torch.ones(degree + 1), dropout_p=0.3, backend=backend)
        assert torch.equal(torch.get_rng_state(), expected)


def test_after_the_filter_drops_entries_of_the_filtered_map() -> None:
    q, k, v = inputs()
    operator = DenseOperator.from_qk(q, k, dropout_p=0.4, dropout_after="filter")
    # the map itself stays whole
    whole = DenseOperator.from_qk(q, k)
    assert torch.equal(operator.dense(), whole.dense())
    torch.manual_seed(2)
    y = operator.polynomial(COEFFS, v)
    torch.manual_seed(2)
    expected = F.dropout(whole.filter(COEFFS), 0.4) @ v
    assert relative_error(y, expected) <= 1e-12
    # the attention operator goes to the dense one, says so, and refuses another by name
    operator = AttentionOperator(q, k, dropout_p=0.4, dropout_after="filter")
    torch.manual_seed(2)
    assert relative_error(operator.polynomial(COEFFS, v), expected) <= 1e-12
    choice = operator.which(COEFFS, v)
    assert choice.backend == "dense"
    assert "entries of H can only be dropped where H is built" in choice.reason
    operator.backend = "sdpa"
    with pytest.raises(ValueError, match="backend='sdpa' cannot serve this call: entries of H"):
        operator.polynomial(COEFFS, v)
    # without dropout its place does not matter
    assert AttentionOperator(q, k, dropout_after="filter").which(COEFFS, v).backend != "dense"
    with pytest.raises(ValueError, match="'attention' or 'filter', got 'values'"):
        AttentionOperator(q, k, dropout_after="values")  # type: ignore[arg-type]


def test_a_compiled_graph_drops_densely_and_says_why() -> None:
    """No compiled graph can set the generator back, so one mask means one matrix."""
    q, k, v = (x.detach() for x in inputs())

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(q, k, v):
        choice = which_backend(q, k, v, COEFFS, dropout_p=0.4)
        y = graph_filter_attention(q, k, v, COEFFS, dropout_p=0.4)
        return y, choice.backend, choice.reason

    torch.manual_seed(5)
    y, backend, reason = compiled(q, k, v)
    torch.manual_seed(5)
    expected = DenseOperator.from_qk(q, k, dropout_p=0.4).polynomial(COEFFS, v)
    assert relative_error(y, expected) <= 1e-12
    assert backend == "dense"
    assert "one dropout mask for all passes" in reason
    assert which_backend(q, k, v, COEFFS, dropout_p=0.4).backend != "dense"


def test_other_devices_generators_are_asked_of_their_own_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's generator is its own: its state is taken and put back there, not on the CPU."""
    calls = []

    class Module:
        @staticmethod
        def get_rng_state(device):
            return calls.append(("get", device)) or "state"

        @staticmethod
        def set_rng_state(state, device):
            calls.append(("set", state, device))

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    device = torch.device("cuda:1")
    v = SimpleNamespace(device=device)
    sdpa.powers_with_one_mask(lambda x: x, v, 2)
    assert calls == [("get", device), ("set", "state", device)]
