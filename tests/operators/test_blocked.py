"""Described visibility: the dense operator's map without a tensor of N×N entries, compiled or not.

Compiled attention is one operator that keeps no mask for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gfsa.operators import (
    AttentionCall,
    AttentionOperator,
    DenseOperator,
    SDPAOperator,
    Visibility,
    blocked,
)
from support.measuring import LargestTensor

B, H, KV, N, D = 2, 4, 2, 23, 4
# a mask of all sequences has more entries than four times the queries, which are kept anyway
LONG = 4 * B * H * D + 3


def padding(length: int) -> Tensor:
    """``(B, 1, N)``: the first sequence is padded on the left, the other one on the right."""
    keys = torch.ones(B, 1, length, dtype=torch.bool)
    keys[0, :, : length // 3] = False
    keys[1, :, 2 * length // 3 :] = False
    return keys


def documents(length: int) -> Tensor:
    places = torch.arange(length)
    return torch.stack([places // 7, (places > 3).long() + (places > 4)])[:, None]


COMPILED: dict[str, Callable[[int], Visibility]] = {
    "causal padding": lambda n: Visibility(padding(n), causal=True),
    "causal documents": lambda n: Visibility(causal=True, documents=documents(n), in_order=True),
    "causal padded window": lambda n: Visibility(padding(n), causal=True, window=6),
    "window": lambda n: Visibility(window=3),
    "all": lambda n: Visibility(padding(n), causal=True, window=5, documents=documents(n)),
}
CASES: dict[str, Callable[[int], Visibility]] = {
    **COMPILED,
    "padding": lambda n: Visibility(padding(n)),
    "causal": lambda n: Visibility(causal=True),
    "causal window": lambda n: Visibility(causal=True, window=4),
    "causal window of one token": lambda n: Visibility(causal=True, window=1),
    "documents": lambda n: Visibility(documents=documents(n)),
    "pairs": lambda n: Visibility(pairs=torch.rand(B, 1, n, n) < 0.6),
}


def tokens(
    length: int = N, dtype: torch.dtype = torch.float64, heads: int = H, kv: int = KV
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and coefficients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, h, length, D, dtype=dtype) for h in (heads, kv, kv))
    coeffs = torch.tensor([[0.3, 0.9, -0.4]] * heads, dtype=torch.promote_types(dtype, torch.float))
    return tuple(x.requires_grad_() for x in (q, k, v, coeffs))  # type: ignore[return-value]


def attention(visible: Visibility, scale: float | None = None) -> Callable[..., Tensor]:
    """The filtered attention as a function of tensors alone; the description is closed over."""

    def attend(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        operator = AttentionOperator(q, k, scale=scale, enable_gqa=True, visible=visible)
        return operator.polynomial(coeffs, v)

    return attend


def formula(visible: Visibility) -> Tensor:
    """True where a query sees a key, entry by entry."""
    allowed = torch.ones(B, 1, N, N, dtype=torch.bool)
    for b in range(B):
        for i in range(N):
            for j in range(N):
                seen = visible.keys is None or bool(visible.keys[b, 0, j])
                seen &= not visible.causal or j <= i
                seen &= visible.window is None or abs(i - j) < visible.window
                own = visible.documents
                seen &= own is None or bool(own[b, 0, i] == own[b, 0, j])
                allowed[b, 0, i, j] = seen
    return allowed if visible.pairs is None else visible.pairs


@pytest.mark.parametrize("entries", [1, 200, 2**25])
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_any_size_give_the_dense_map(
    name: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
    visible, given = CASES[name](N), tokens()
    q, k, v, coeffs = given
    dense = DenseOperator.from_qk(q, k, formula(visible))
    expected = dense.polynomial(coeffs, v)
    operator = AttentionOperator(q, k, enable_gqa=True, visible=visible)
    y = operator.polynomial(coeffs, v)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(operator.dense(), dense.matrix)
    torch.testing.assert_close(SDPAOperator(operator.call).apply(v), dense.apply(v))
    g = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(z, given, g) for z in (y, expected))
    torch.testing.assert_close(found, wanted)
    some, x = operator.second_pass([0, 3]), torch.randn(B, 2, N, D, dtype=torch.float64)
    torch.testing.assert_close(some.apply(x), dense.matrix[:, [0, 3]] @ x)


def test_a_key_mask_with_causality_needs_no_square_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 2048
    q, coeffs = torch.randn(1, 1, length, 8), torch.tensor([0.3, 0.9, -0.4])
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
    mask[..., :100] = False
    monkeypatch.setattr(blocked, "MOST_ENTRIES", length * 64)
    with LargestTensor() as largest:
        y = AttentionOperator(q, q, mask, is_causal=True).polynomial(coeffs, q)
    # a mask in float32, which torch makes of a bool one, and nothing above
    assert largest.bytes <= 4 * 64 * length
    expected = DenseOperator.from_qk(q, q, mask, is_causal=True).polynomial(coeffs, q)
    torch.testing.assert_close(y, expected)


def test_gradients_keep_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 4 * N)
    q, k, v, _ = tokens(kv=H)
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes())
        return x

    visible = CASES["causal padding"](N)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        SDPAOperator(AttentionCall(q, k, visible=visible)).apply(v)
    assert saved
    assert max(saved) <= q.untyped_storage().nbytes()


def test_dropout_drops_the_same_entries_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 4 * N)
    q, k, *_ = tokens(kv=H)
    call = AttentionCall(q, k, dropout_p=0.4, visible=CASES["causal padding"](N))
    eye = torch.eye(N, dtype=torch.float64).expand(B, H, N, N)
    torch.manual_seed(1)
    _, once, twice = SDPAOperator(call).powers(eye, 2)
    torch.testing.assert_close(twice, once @ once)


def test_what_takes_its_place_is_refused() -> None:
    q, k, v, coeffs = tokens(kv=H)
    with pytest.raises(ValueError, match="visible takes the place of attn_mask"):
        AttentionOperator(q, k, is_causal=True, visible=CASES["window"](N)).polynomial(coeffs, v)


@pytest.mark.parametrize("name", CASES)
def test_there_may_be_no_tokens(name: str) -> None:
    q, k, v, coeffs = tokens(0)
    assert attention(CASES[name](0))(q, k, v, coeffs).shape == q.shape


def test_keys_and_causality_are_a_key_mask() -> None:
    q, k, *_ = tokens()
    simple = AttentionCall(q, k, visible=CASES["causal padding"](N)).with_key_mask()
    assert (simple.is_causal, simple.visible) == (True, None)
    assert simple.attn_mask.shape == (B, 1, 1, N)


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
@pytest.mark.parametrize("name", COMPILED)
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
    found, wanted = (torch.autograd.grad(z, given, g) for z in (y, expected))
    torch.testing.assert_close(found, wanted)


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
@pytest.mark.parametrize("name", ["causal padding", "causal documents", "causal padded window"])
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
    plain = [y.detach() for y in (q, k, x)]
    torch.library.opcheck(blocked.attend_operator, (*plain, *description))
    # modes that look at storages cannot look into the tensors of torch.func in the gradient
    traced = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(blocked.attend_operator, (q, k, x, *description), test_utils=traced)
    g = torch.randn(B, H, length, 6, dtype=dtype)
    gradients = blocked.attend_operator_backward(g, *plain, *description)
    for gradient, of in zip(gradients, plain, strict=True):
        # as the compiler is told
        assert gradient.shape == of.shape
        assert gradient.dtype == of.dtype
        assert gradient.is_contiguous()
