"""Documents and windows in the long kernels on the CPU, in Triton's interpreter.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch

from gfsa.filters import GFSA
from gfsa.kernels import two_pass
from gfsa.kernels.op import FusedOperator
from gfsa.operators import AttentionCall, DenseOperator, Visibility
from support.fused_cases import assert_agree, assert_same_bits, error, outcome
from support.packed_cases import Packed, run

assert support.triton_interpreter

# of unequal sizes, so that a border is inside of a tile of one kernel and beside one of another
SMALL = {
    "attend": two_pass.Tiles(32, 16, 4, 2),
    "combine": two_pass.Tiles(16, 32, 4, 2),
    "grad_first_pass": two_pass.Tiles(32, 16, 4, 2),
    "grad_keys": two_pass.Tiles(16, 32, 4, 2),
    "grad_queries": two_pass.Tiles(32, 16, 4, 2),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name, tiles in SMALL.items():
        monkeypatch.setitem(two_pass.TILES, name, {128: tiles})
    for table in ("CAUSAL_TILES", "PACKED_TILES"):
        monkeypatch.setattr(two_pass, table, {})


@pytest.mark.parametrize(
    "packed",
    [
        Packed([[32, 48, 16]]),
        Packed([[1, 1, 33, 1, 2, 58, 1]]),
        Packed([[5, 59], [32, 32], [64]], heads=1, projected=True, scale=-0.3),
        Packed([[70, 27]], heads=2, key_heads=1),
        Packed([[70]], window=1),
        Packed([[40]], window=1000),
        Packed([[110]], heads=1, window=37),
        Packed([[80, 3, 47], [20, 20, 90]], heads=2, key_heads=1, window=50),
        Packed([[40, 30]], heads=1, dropout_p=0.3, window=25),
        Packed([[1]]),
        # by the same kernels, with c2 = 0
        Packed([[32, 48, 16]], degree=1),
        Packed([[5, 59], [32, 32], [64]], heads=1, projected=True, scale=-0.3, degree=1),
        Packed([[80, 3, 47], [20, 20, 90]], heads=2, key_heads=1, window=50, degree=1),
        Packed([[40, 30]], heads=1, dropout_p=0.3, window=25, degree=1),
    ],
    ids=str,
)
def test_agrees_with_the_specification(packed: Packed) -> None:
    assert_agree(*run(packed))


def test_no_tile_of_another_document_is_read() -> None:
    """NaN in hidden tiles would spread into the sums, were they multiplied by zero."""
    packed = Packed([[64, 32, 32]], heads=1)
    q, k, v, coeffs, g = packed.tensors()
    for x in (q, k, v, g):
        x[:, :, :64] = float("nan")
        x[:, :, 96:] = float("nan")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = FusedOperator(packed.call(q, k)).polynomial(coeffs, v)
    for x in (y, *torch.autograd.grad(y, inputs, g)):
        assert torch.isfinite(x[:, :, 64:96]).all()
        assert x[:, :, :64].isnan().all()


def test_scores_of_another_document_are_no_maximum() -> None:
    """In a block that two documents share, the first one's scores would make the others vanish."""
    packed = Packed([[70, 27]], heads=1)
    q, k, v, coeffs, _ = packed.tensors()
    k[:, :, :70] *= 300
    y = FusedOperator(packed.call(q, k)).polynomial(coeffs, v)
    exact = DenseOperator.from_call(packed.call(q.double(), k.double()))
    assert error(y[:, :, 70:], exact.polynomial(coeffs.double(), v.double())[:, :, 70:]) <= 2e-6


@pytest.mark.parametrize("learn", [("w0", "w1"), ("w1",)], ids="-".join)
def test_a_filter_of_degree_one(learn: tuple[str, ...]) -> None:
    """The gradient of what it learns: of two numbers at most, although the kernels give three."""
    packed = Packed([[20, 13], [33]], key_heads=1, window=9, degree=1)
    q, k, v, _, g = packed.tensors()
    layer = GFSA(2, K=None, learn=learn, w0=0.4, w1=0.7)
    theta = layer.theta
    results = []
    for operator, dtype in (
        (FusedOperator, torch.float32),
        (DenseOperator.from_call, torch.float64),
    ):
        layer.to(dtype)
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        y = layer(operator(packed.call(*inputs[:2])), inputs[2])
        results.append([y, *torch.autograd.grad(y, [*inputs, theta], g.to(dtype))])
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert error(got, expected) <= 2e-6


@pytest.mark.parametrize("degree", [1, 2])
def test_compiled_whole(degree: int) -> None:
    """The spans are computed inside of the graph."""
    packed = Packed([[10, 8]], heads=1, degree=degree)
    q, k, v, coeffs, g = packed.tensors()
    inputs = [x.requires_grad_() for x in (q, k, v, coeffs)]
    documents = packed.visible().documents

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        visible = Visibility(causal=True, window=5, documents=documents, in_order=True)
        call = AttentionCall(inputs[0], inputs[1], visible=visible)
        return FusedOperator(call).polynomial(inputs[3], inputs[2])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(outcome(step, inputs, g), outcome(compiled, inputs, g))
