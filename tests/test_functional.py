"""The functional entry: ordinary attention at init, what it refuses, how it compiles."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gfsa
from gfsa import graph_filter_attention, linear_graph_filter_attention
from gfsa.functional import which_backend
from gfsa.operators import AttentionOperator
from support.attention import BACKENDS, Dispatched, relative_error, tokens

LENGTH = 16
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PADDING = (torch.arange(LENGTH) < torch.tensor([[12], [16]]))[:, None, None, :]
EMPTY_ROWS = CAUSAL & PADDING & (torch.arange(LENGTH) > 2)[:, None]

AT_INIT = {
    "GFSA": gfsa.GFSA(4),
    "GFSA, K=10": gfsa.GFSA(4, K=10),
    "GFSA, wK alone": gfsa.GFSA(4, K=4, learn=("wK",)),
    "GFSA, exact power": gfsa.GFSA(4, K=4, power="exact"),
    "GFSA, degree 1": gfsa.GFSA(4, K=None),
    "GFSA, own learning rate": gfsa.GFSA(4, lr_multiplier=30.0),
    "Polynomial": gfsa.Polynomial(4),
    "Polynomial, degree 1": gfsa.Polynomial(4, degree=1),
    "Polynomial, degree 4": gfsa.Polynomial(4, degree=4),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": PADDING},
    "bool mask with empty rows": {"attn_mask": EMPTY_ROWS},
    "additive mask": {"attn_mask": torch.linspace(-2, 2, LENGTH**2).reshape(LENGTH, LENGTH)},
    "head groups": {"enable_gqa": True},
    "head groups, causal": {"enable_gqa": True, "is_causal": True},
    "scale": {"scale": 0.7},
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
DTYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16}


def draw(dtype: torch.dtype, enable_gqa: bool = False, **_: object) -> list[Tensor]:
    kv_heads = 2 if enable_gqa else 4
    shapes = (2, 4, LENGTH, 8), (2, kv_heads, LENGTH, 8), (2, kv_heads, LENGTH, 8)
    return [tokens(*shape, dtype=dtype, layout="projected").requires_grad_() for shape in shapes]


class TestIdentityAtInit:
    """A filter that has learned nothing gives the very bits of torch's attention."""

    @pytest.mark.parametrize("filter", AT_INIT.values(), ids=AT_INIT)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_same_bits(self, filter: gfsa.GraphFilter, options: dict, dtype: torch.dtype) -> None:
        q, k, v = draw(dtype, **options)
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            options = {**options, "attn_mask": mask.to(dtype)}
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        y = graph_filter_attention(q, k, v, filter.coefficients(), **options)
        assert y.dtype == dtype
        assert torch.equal(y, expected)
        assert torch.equal(filter(AttentionOperator(q, k, **options), v), expected)
        assert torch.equal(AttentionOperator(q, k, **options).apply(v), expected)

    @pytest.mark.parametrize("filter", AT_INIT.values(), ids=AT_INIT)
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_same_bits_in_the_first_gradients(
        self, filter: gfsa.GraphFilter, dtype: torch.dtype
    ) -> None:
        """So the first optimiser step is the unmodified model's, but for the filter itself."""
        inputs, cotangent = draw(dtype), tokens(2, 4, LENGTH, 8, dtype=dtype)
        plain = F.scaled_dot_product_attention(*inputs)
        filtered = graph_filter_attention(*inputs, filter.coefficients())
        ours, theirs = (torch.autograd.grad(y, inputs, cotangent) for y in (filtered, plain))
        assert all(map(torch.equal, ours, theirs))

    @pytest.mark.parametrize("filter", AT_INIT.values(), ids=AT_INIT)
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_same_bits_with_dropout(self, filter: gfsa.GraphFilter, dtype: torch.dtype) -> None:
        q, k, v = draw(dtype)
        torch.manual_seed(7)
        expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        generator = torch.get_rng_state()
        torch.manual_seed(7)
        y = graph_filter_attention(q, k, v, filter.coefficients(), dropout_p=0.2, is_causal=True)
        assert torch.equal(y, expected)
        # and whatever is drawn next is what plain attention's model would draw
        assert torch.equal(torch.get_rng_state(), generator)

    @pytest.mark.parametrize("filter", AT_INIT.values(), ids=AT_INIT)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16])
    def test_same_bits_under_autocast(
        self, filter: gfsa.GraphFilter, dtype: torch.dtype, given: torch.dtype
    ) -> None:
        q, k, v = draw(given)
        mask = OPTIONS["additive mask"]["attn_mask"].to(given)
        with torch.autocast("cpu", dtype=dtype):
            expected = F.scaled_dot_product_attention(q, k, v, mask)
            y = graph_filter_attention(q, k, v, filter.coefficients(), mask)
            assert torch.equal(filter(AttentionOperator(q, k, mask), v), expected)
        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_powers_and_matrix(backend: str) -> None:
    q, k, v = draw(torch.float64)
    operator = AttentionOperator(q, k, is_causal=True, backend=backend)
    matrix = operator.dense()
    assert relative_error(matrix.sum(-1), torch.ones(2, 4, LENGTH)) <= 1e-12
    assert not matrix.triu(1).any()
    for exponent, power in enumerate(operator.powers(v, 3)):
        assert relative_error(power, torch.linalg.matrix_power(matrix, exponent) @ v) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_coefficients_of_any_precision(dtype: torch.dtype, backend: str) -> None:
    """Sums are kept in float32 at least, and the output is in the values' dtype."""
    q, k, v = draw(torch.float32)
    coeffs = torch.tensor([0.25, 0.5, -2.0])
    expected = graph_filter_attention(q, k, v, coeffs, backend=backend)
    y = graph_filter_attention(q, k, v, coeffs.to(dtype), backend=backend)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("given", [torch.float64, torch.bfloat16])
def test_a_float32_mask_serves_every_dtype(given: torch.dtype) -> None:
    q, k, v = draw(given)
    bias = torch.randn(4, LENGTH, LENGTH, requires_grad=True)
    results = {}
    for backend in BACKENDS:
        y = graph_filter_attention(q, k, v, torch.tensor([0.0, 0.5, 0.5]), bias, backend=backend)
        results[backend] = y, *torch.autograd.grad(y.float().square().sum(), bias)
    room = 1e-6 if given == torch.float64 else 0.05
    assert all(e <= room for e in map(relative_error, results["sdpa"], results["dense"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_can_be_inferred_without_data(backend: str) -> None:
    q = torch.empty(2, 4, 16, 8, device="meta")
    coeffs = torch.empty(4, 3, device="meta")
    y = graph_filter_attention(q, q, q, coeffs, backend=backend)
    assert (y.device.type, y.shape) == ("meta", q.shape)
    assert linear_graph_filter_attention(q, q, q, coeffs).shape == q.shape


class TestNoHostSync:
    """Nothing in a forward or a backward reads a number back from the device."""

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_attention(self, options: dict, backend: str) -> None:
        q, k, v = draw(torch.float32, **options)
        filter = gfsa.GFSA(4)
        with Dispatched() as dispatched:
            operator = AttentionOperator(q, k, **options, backend=backend)
            filter(operator, v).sum().backward()
        assert filter.theta.grad is not None
        assert dispatched.count("_local_scalar_dense") == dispatched.count("is_nonzero") == 0

    def test_linear_attention(self) -> None:
        q, k, v = draw(torch.float32)
        padding = ~PADDING[:, 0, 0]
        # a filter checks its numbers on the host when it is built
        filter = gfsa.PageRank(4)
        with Dispatched() as dispatched:
            coeffs = filter.coefficients()
            linear_graph_filter_attention(q, k, v, coeffs, padding).sum().backward()
        assert dispatched.count("_local_scalar_dense") == 0


@pytest.mark.parametrize("name", ["causal", "bool mask with empty rows", "head groups"])
def test_compiles_into_one_graph(name: str) -> None:
    options = OPTIONS[name]
    torch._dynamo.reset()
    filter = gfsa.GFSA(4, w0=0.1, wK=-0.2)
    q, k, v = draw(torch.float64, **options)

    def attend(q, k, v):
        return graph_filter_attention(q, k, v, filter.coefficients(), **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    y, expected = compiled(q, k, v), attend(q, k, v)
    assert relative_error(y, expected) <= 1e-12
    inputs = (q, k, v, filter.theta)
    ours, theirs = (torch.autograd.grad(z.sum(), inputs) for z in (y, expected))
    assert all(e <= 1e-6 for e in map(relative_error, ours, theirs))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


X, Y, FLAT = zeros(2, 4, 5, 3), zeros(2, 4, 7, 3), zeros(5, 3)
C = torch.tensor([0.0, 1.0, 0.0])
GROUPED = {"enable_gqa": True}
# what is wrong → the error's words, the arguments, and options
WRONG_TYPES: dict[str, tuple] = {
    "mixed dtypes": (
        r"one floating-point dtype, got torch\.float32, torch\.float16 and torch\.float32; cast",
        (X, X.half(), X, C),
    ),
    "integers": (r"one floating-point dtype, got torch\.int64", (X.long(),) * 3 + (C,)),
    "integer mask": (
        r"bool \(True takes part\).*got torch\.int64; .* 0/1 mask with attn_mask\.bool",
        (X, X, X, C, torch.ones(5, 5, dtype=torch.long)),
    ),
    "mask of a third dtype": (
        r"float32 or q's torch\.float32 \(added\), got torch\.float64.*attn_mask\.to\(q\.dtype\)",
        (X, X, X, C, zeros(5, 5).double()),
    ),
    "integer coefficients": (
        r"coeffs must be floating point, best float32, got torch\.int64",
        (X, X, X, torch.tensor([0, 1])),
    ),
}
WRONG_VALUES: dict[str, tuple] = {
    "too few dimensions": (
        r"shape \(\.\.\., H, N, D\).*got \(3,\), \(3,\) and \(3,\)",
        (FLAT[0], FLAT[0], FLAT[0], C),
    ),
    "different dimensions": (
        r"same number of dimensions, got \(2, 4, 5, 3\), \(4, 5, 3\) and",
        (X, X[0], X, C),
    ),
    "head dims": ("q and k differ in head dim: 3 and 6", (X, zeros(2, 4, 5, 6), X, C)),
    "lengths": ("k and v differ in length: 5 and 7 tokens", (X, X, Y, C)),
    "cross-attention": (
        r"5 queries attend to 7 keys: cross-attention has no powers.*decode with a cache.*\.plug",
        (X, Y, Y, C),
    ),
    "a suffix of queries": (
        "1 queries attend to 5 keys: cross-attention has no powers",
        (X[..., -1:, :], X, X, C),
        {"is_causal": True},
    ),
    "heads without enable_gqa": (
        r"differ in their batch or head.*\(2, 2, 5, 3\).*expand them, or pass enable_gqa=True",
        (X, X[:, :2], X[:, :2], C),
    ),
    "batches": ("differ in their batch or head dimensions", (X, X[:1], X, C)),
    "no heads": ("enable_gqa needs inputs with a head dim", (FLAT, FLAT, FLAT, C), GROUPED),
    "none of them": ("enable_gqa needs heads in k and v", (X[:, :0],) * 3 + (C,), GROUPED),
    "heads of k and v": (
        "k and v must have the same heads, q a multiple of them",
        (X, X[:, :2], X, C),
        GROUPED,
    ),
    "not a multiple": (
        "k and v must have the same heads, q a multiple of them",
        (X, X[:, :3], X[:, :3], C),
        GROUPED,
    ),
    "dropout": (r"0 ≤ dropout_p ≤ 1, got 1\.5", (X, X, X, C), {"dropout_p": 1.5}),
    "dropout nan": ("got nan", (X, X, X, C), {"dropout_p": float("nan")}),
    # torch's attention gives finite numbers for it on a CPU
    "scale nan": ("scale must be a finite number", (X, X, X, C), {"scale": float("nan")}),
    "scale inf": ("scale must be a finite number", (X, X, X, C), {"scale": -float("inf")}),
    "mask that does not broadcast": (
        r"shape \(2, 5\) does not broadcast.*\(2, 4, 5, 5\).*as attn_mask\[:, None, None, :\]",
        (X, X, X, C, torch.ones(2, 5, dtype=torch.bool)),
    ),
    "mask with too many dimensions": (
        r"shape \(1, 2, 4, 5, 5\) does not broadcast",
        (X, X, X, C, torch.ones(1, 2, 4, 5, 5, dtype=torch.bool)),
    ),
    "coefficients of other heads": (
        r"row for each query head \(H = 4 here\), lowest power first; got \(3, 2\)",
        (X, X, X, zeros(3, 2)),
    ),
    "coefficients without heads": ("H = none here", (FLAT, FLAT, FLAT, zeros(3, 2))),
    "no coefficients": (r"got \(4, 0\)", (X, X, X, zeros(4, 0))),
    "coefficients elsewhere": (
        "q is on cpu, coeffs on meta; move one of them",
        (X, X, X, torch.zeros(2, device="meta")),
    ),
}
REFUSED = {name: (TypeError, *given) for name, given in WRONG_TYPES.items()}
REFUSED |= {name: (ValueError, *given) for name, given in WRONG_VALUES.items()}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("call", [graph_filter_attention, which_backend])
def test_refuses(call, given: tuple) -> None:
    """By what it expected, what it got and what to do; the backend makes no difference."""
    error, message, arguments, *options = given
    for backend in ("auto", *BACKENDS):
        with pytest.raises(error, match=message):
            call(*arguments, **(options[0] if options else {}), backend=backend)
