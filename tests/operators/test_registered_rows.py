"""Compiled attention by blocks of queries: one operator that keeps no mask for its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gfsa.operators import AttentionOperator, DenseOperator, Visibility, blocked

B, H, KV, D = 2, 4, 2, 4
# a mask of all sequences has more entries than four times the queries, which are kept anyway
LONG = 4 * B * H * D + 3


def padding(length: int, batch: int = B) -> Tensor:
    """``(B, 1, N)``: the first sequence is padded on the left."""
    keys = torch.ones(batch, 1, length, dtype=torch.bool)
    keys[0, :, : length // 3] = False
    return keys


def documents(length: int) -> Tensor:
    return torch.arange(length)[None] // 7


CASES: dict[str, Callable[[int], Visibility]] = {
    "causal padding": lambda n: Visibility(padding(n), causal=True),
    "documents": lambda n: Visibility(causal=True, documents=documents(n), in_order=True),
    "padding and window": lambda n: Visibility(padding(n), causal=True, window=6),
    "window to both sides": lambda n: Visibility(window=3),
    "all": lambda n: Visibility(padding(n), causal=True, window=5, documents=documents(n)),
}


def tokens(
    length: int, dtype: torch.dtype = torch.float64, batch: int = B, heads: int = H, kv: int = KV
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and coefficients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, h, length, D, dtype=dtype) for h in (heads, kv, kv))
    coeffs = torch.tensor([[0.3, 0.9, -0.4]] * heads, dtype=torch.promote_types(dtype, torch.float))
    return tuple(x.requires_grad_() for x in (q, k, v, coeffs))  # type: ignore[return-value]


def attention(visible: Visibility, scale: float | None = None) -> Callable[..., Tensor]:
    """The filtered attention as a function of tensors alone; the description is closed over."""

    def attend(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        operator = AttentionOperator(q, k, scale=scale, enable_gqa=True, visible=visible)
        return operator.polynomial(coeffs, v)

    return attend


class Recorded:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph

    def passes(self) -> int:
        """Calls of the operator in the newest graph."""
        operator = torch.ops.gfsa.attend_by_rows.default
        # the compiler calls it by the object that the decorator returned, or by its name
        return sum(
            node.target in (operator, blocked.attend_operator)
            for node in self.graphs[-1].graph.nodes
        )


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("entries", [64, 2**25])
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_map_and_its_gradients_are_the_dense_ones(
    name: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block and with many, grouped heads, gradients of the coefficients too."""
    monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
    length = LONG
    visible, given = CASES[name](length), tokens(length)
    q, k, v, coeffs = given
    dense = DenseOperator.from_qk(q, k, visible.rows(0, length, length, q.device), scale=-0.7)
    expected = dense.polynomial(coeffs, v)
    recorded = Recorded()
    seen = torch.compile(attention(visible, -0.7), fullgraph=True, backend=recorded)(*given)
    assert recorded.passes() == 2
    torch.testing.assert_close(seen, expected)
    y = torch.compile(attention(visible, -0.7), fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad(y, given, g), torch.autograd.grad(expected, given, g), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def saved_bytes(y: Tensor) -> int:
    """Bytes that the graph behind ``y`` keeps for its gradient."""
    storages: dict[int, int] = {}
    todo, done = [y.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        for x in getattr(node, "saved_tensors", ()):
            if x is not None:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        todo += [earlier for earlier, _ in node.next_functions]
    assert storages
    return sum(storages.values())


@pytest.mark.parametrize("entries", [16 * 1024, 2**25])
@pytest.mark.parametrize("name", ["causal padding", "documents", "padding and window"])
def test_a_compiled_step_keeps_no_mask(
    name: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
    length = 1024
    visible = CASES[name](length)
    given = tokens(length, torch.float32, heads=2, kv=2)
    # the partitioner that torch's default backend has, too
    compiled = torch.compile(
        attention(visible), fullgraph=True, backend="aot_eager_decomp_partition"
    )
    y = compiled(*given)
    # q, k, v, A·v and A²·v, and what describes the mask; a mask alone has N bytes for each query
    described = sum(part.nbytes for part in visible._parts() if part is not None)
    assert saved_bytes(y) <= 6 * given[0].nbytes + described < length * length
    y.sum().backward()


def test_a_small_mask_is_part_of_the_graph() -> None:
    """The compiler fuses it, and torch's attention need not run twice."""
    for length, passes in ((4 * H * D, 0), (4 * H * D + 1, 2)):
        torch._dynamo.reset()
        recorded = Recorded()
        attend = attention(CASES["causal padding"](length))
        torch.compile(attend, fullgraph=True, backend=recorded)(*tokens(length))
        assert recorded.passes() == passes


def test_without_gradients_the_operator_is_there_for_many_blocks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = 40
    given, attend = tokens(length), attention(CASES["causal padding"](length))
    expected = attend(*given)
    for entries, passes in ((2**25, 0), (64, 2)):
        torch._dynamo.reset()
        monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
        recorded = Recorded()
        with torch.no_grad():
            y = torch.compile(attend, fullgraph=True, backend=recorded)(*given)
        assert recorded.passes() == passes
        torch.testing.assert_close(y, expected)


def test_one_graph_serves_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 64)

    def attend(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, keys: Tensor) -> Tensor:
        visible = Visibility(keys, causal=True, window=5)
        return AttentionOperator(q, k, enable_gqa=True, visible=visible).polynomial(coeffs, v)

    recorded = Recorded()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=recorded)
    for length in (30, 41, 57):
        given = (*tokens(length), padding(length))
        torch.testing.assert_close(compiled(*given), attend(*given))
    assert len(recorded.graphs) == 1


def test_autocast_decides_the_precision_as_in_eager_mode() -> None:
    length = LONG
    given = tokens(length, torch.float32)
    attend = attention(CASES["causal padding"](length))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(*given), attend(*given)
    assert y.dtype == torch.bfloat16
    # rounded in the same places: one step of bfloat16 at most, from kernels of other block sizes
    torch.testing.assert_close(y, expected)
    y.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in given)


def test_an_exported_program_has_torchs_operations_alone() -> None:
    length = LONG

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
            return attention(CASES["causal padding"](length))(q, k, v, coeffs)

    given = tokens(length)
    for strict in (False, True):
        program = torch.export.export(Layer(), given, strict=strict)
        assert "gfsa" not in str(program.graph)
        torch.testing.assert_close(program.module()(*given), Layer()(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_finds_the_operator_well_behaved(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake results of the right layout, gradients traced; values of another width."""
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 64)
    length = 21
    q, k, _, _ = tokens(length, dtype)
    # tokens before heads, as models have them
    q = q.detach().mT.contiguous().mT.requires_grad_()
    x = torch.randn(B, length, KV, 6, dtype=dtype).transpose(1, 2).requires_grad_()
    description = (None, padding(length), None, True, 5, documents(length))
    torch.library.opcheck(blocked.attend_operator, (*detached(q, k, x), *description))
    # modes that look at storages cannot look into the tensors of torch.func in the gradient
    traced = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(blocked.attend_operator, (q, k, x, *description), test_utils=traced)
    g = torch.randn(B, H, length, 6, dtype=dtype)
    for gradient, of in zip(
        blocked.attend_operator_backward(g, *detached(q, k, x), *description),
        (q, k, x),
        strict=True,
    ):
        # as the compiler is told
        assert gradient.shape == of.shape
        assert gradient.dtype == of.dtype
        assert gradient.is_contiguous()


def detached(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in tensors)
