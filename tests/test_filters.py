"""Filters: what their coefficients are, where they start, and that nothing rounds or loses them."""

import contextlib
import copy
import io
import json
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gfsa
from gfsa import GFSA, GraphFilter, Laplacian, PageRank, Polynomial, Twicing
from gfsa.filters.spec import kind_named, read_description
from gfsa.operators import AttentionOperator, DenseOperator
from support.attention import Dispatched

EVERY = {
    "GFSA": lambda: GFSA(3, K=4, w0=0.1, w1=[0.9, 1.0, 1.1], wK=-0.2),
    "GFSA exact": lambda: GFSA(3, K=4, wK=0.3, power="exact"),
    "GFSA wK alone": lambda: GFSA(3, K=5, learn=("wK",), w0=[-0.1, 0.2, 1 / 3], wK=0.1),
    "GFSA fixed": lambda: GFSA(3, learn=(), w0=1 / 3, wK=0.2),
    "GFSA degree 1": lambda: GFSA(3, K=None, w0=1 / 3),
    "GFSA own learning rate": lambda: GFSA(3, w0=0.1, lr_multiplier=7.0),
    "Polynomial": lambda: Polynomial(3, degree=4),
    "Polynomial own learning rate": lambda: Polynomial(3, lr_multiplier=0.1),
    "Twicing": lambda: Twicing(3),
    "Laplacian": lambda: Laplacian(3),
    "PageRank": lambda: PageRank(3, alpha=0.1, hops=3),
}
LEARNING = {name: make for name, make in EVERY.items() if make().theta is not None}
every_filter = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


def shift(filter: GraphFilter) -> GraphFilter:
    """Move the learned numbers somewhere else, as training would."""
    if filter.theta is not None:
        with torch.no_grad():
            filter.theta.add_(torch.linspace(-0.5, 0.5, filter.theta.numel()).view_as(filter.theta))
    return filter


def check(filter: GraphFilter, *expected: float | list[float]) -> None:
    coefficients = filter.coefficients()
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert coefficients.shape == (filter.num_heads, filter.degree + 1)
    assert coefficients.dtype == torch.float32
    torch.testing.assert_close(coefficients.double(), wanted.expand_as(coefficients))


class TestCoefficients:
    @pytest.mark.parametrize("K", [2, 3, 4, 10])
    def test_gfsa_as_the_paper_writes_it(self, K: int) -> None:
        """H = w0·I + w1·A + wK·(A + (K−1)(A² − A)): a quadratic, or with the exact power."""
        weights = {"w0": 0.1, "w1": 0.9, "wK": -0.3}
        filter = GFSA(3, K=K, **weights)
        check(filter, 0.1, 0.9 - (2 - K) * 0.3, -(K - 1) * 0.3)
        A = torch.randn(3, 6, 6, dtype=torch.float64).softmax(-1)
        published = 0.1 * torch.eye(6) + 0.9 * A - 0.3 * (A + (K - 1) * (A @ A - A))
        found = DenseOperator(A).filter(filter.double().coefficients())
        torch.testing.assert_close(found, published, rtol=0, atol=1e-7)
        check(GFSA(2, K=K, **weights, power="exact"), 0.1, 0.9, *[0.0] * (K - 2), -0.3)

    def test_other_polynomials(self) -> None:
        for degree in (1, 2, 4):
            check(Polynomial(3, degree), 0.0, 1.0, *[0.0] * (degree - 1))
        check(Twicing(3), 0.0, 2.0, -1.0)
        check(Laplacian(3), 1.0, -1.0)

    @pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0])
    @pytest.mark.parametrize("hops", [1, 4])
    def test_pagerank_is_its_recursion(self, alpha: float, hops: int) -> None:
        """z ← (1−α)·A·z + α·v, repeated."""
        A, v = torch.randn(5, 5).softmax(-1), torch.randn(5, 2)
        filter = PageRank(1, alpha=alpha, hops=hops)
        assert filter.degree == hops
        z = v
        for _ in range(hops):
            z = (1 - alpha) * A @ z + alpha * v
        torch.testing.assert_close(filter(DenseOperator(A[None]), v[None])[0], z)
        assert filter.coefficients().sum().item() == pytest.approx(1.0, abs=1e-6)

    @every_filter
    def test_calling_a_filter_filters(self, make) -> None:
        filter = shift(make())
        operator = DenseOperator(torch.randn(3, 5, 5).softmax(-1))
        v = torch.randn(3, 5, 4)
        expected = operator.filter(filter.coefficients()) @ v
        torch.testing.assert_close(filter(operator, v), expected, rtol=1e-4, atol=1e-5)

    @every_filter
    def test_stay_exact_under_autocast_and_are_not_read_on_the_host(self, make) -> None:
        filter = shift(make())
        expected = filter.coefficients()
        with torch.autocast("cpu", dtype=torch.bfloat16), Dispatched() as dispatched:
            found = filter.coefficients()
        assert torch.equal(found, expected)
        assert dispatched.count("_local_scalar_dense") == 0


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff", b"{", b"[" * 10_000])
def test_a_damaged_description_is_told(damage: bytes) -> None:
    with pytest.raises(ValueError, match="description of a filter is damaged"):
        read_description(torch.tensor(list(damage), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_state_dicts_can_be_averaged_and_cast(dtype: torch.dtype) -> None:
    first, second, mean = shift(GFSA(3)), shift(shift(GFSA(3))), GFSA(3)
    a, b = first.state_dict(), second.state_dict()
    mean.load_state_dict({key: ((a[key] + b[key]) / 2) for key in a})
    expected = (first.coefficients() + second.coefficients()) / 2
    assert torch.allclose(mean.coefficients(), expected)
    mean.load_state_dict({key: value.to(dtype) for key, value in a.items()})
    with pytest.raises(ValueError, match="take keys that end in _extra_state from one of them"):
        GFSA(3).load_state_dict({key: value / 3 for key, value in a.items()})
    # the description of another filter is no mean of both
    other = GFSA(3, K=4).state_dict()
    with pytest.raises(ValueError, match="damaged"):
        GFSA(3).load_state_dict({key: (a[key] + other[key]) / 2 for key in a})


class TestStructure:
    """What is not there costs nothing."""

    @pytest.mark.parametrize(
        "filter",
        [GFSA(3, K=None), GFSA(3, learn=("w0", "w1")), GFSA(3, learn=(), w0=0.2, power="exact")],
        ids=["K=None", "wK not learned", "nothing learned"],
    )
    def test_an_absent_power_costs_no_pass(self, filter: GFSA) -> None:
        assert filter.degree == 1
        q = torch.randn(1, 3, 8, 4)
        with Dispatched() as dispatched:
            gfsa.graph_filter_attention(q, q, q, filter.coefficients(), backend="sdpa")
        assert dispatched.count("_scaled_dot_product_flash_attention_for_cpu") == 1

    @pytest.mark.parametrize(
        ("learn", "moved"),
        [
            (("w0",), {0: [0]}),
            (("w1",), {0: [1]}),
            (("wK",), {0: [1, 2]}),
            (("wK", "w0"), {0: [0], 1: [1, 2]}),
            (("w0", "w1", "wK"), {0: [0], 1: [1], 2: [1, 2]}),
        ],
    )
    def test_what_is_learned_moves_and_nothing_else(self, learn, moved) -> None:
        """Columns of θ are in the order w0, w1, wK, however they were named."""
        filter = GFSA(2, K=4, learn=learn, wK=0.5)
        assert filter.theta.shape == (2, len(learn))
        for column, expected in moved.items():
            before = filter.coefficients()
            filter.theta.data[:, column] += 1.0
            change = filter.coefficients() - before
            assert change[0].nonzero().flatten().tolist() == expected

    def test_state_is_one_small_tensor_and_what_it_is(self) -> None:
        def shapes(made: GraphFilter) -> dict[str, tuple[int, ...]]:
            state = made.state_dict()
            assert read_description(state.pop("_extra_state")) == made.describe()
            return {name: tuple(value.shape) for name, value in state.items()}

        assert shapes(GFSA(12)) == {"theta": (12, 3)}
        assert shapes(Polynomial(12, 5)) == {"theta": (12, 6)}
        for fixed in (Twicing(12), Laplacian(12), PageRank(12)):
            assert shapes(fixed) == {}
            assert not list(fixed.parameters())

    def test_weights_by_name(self) -> None:
        filter = GFSA(2, K=4, learn=("w0", "wK"), w0=0.1, w1=0.8, wK=-0.25, lr_multiplier=2.0)
        filter.theta.data[1] += 1.0
        weights = {name: value.tolist() for name, value in filter.weights().items()}
        assert weights["w0"] == pytest.approx([0.1, 2.1])
        assert weights["w1"] == [0.8, 0.8]
        assert weights["wK"] == pytest.approx([-0.25, 1.75])
        # a copy: changing what was handed out changes nothing
        filter.weights()["w1"].zero_()
        assert filter.weights()["w1"].tolist() == [0.8, 0.8]


class TestLearning:
    @pytest.mark.parametrize("multiplier", [0.1, 1.0, 30.0])
    @pytest.mark.parametrize("make", [GFSA, Polynomial], ids=["GFSA", "Polynomial"])
    def test_adams_first_step_is_the_filters_own_learning_rate(self, make, multiplier) -> None:
        filter = make(2, lr_multiplier=multiplier)
        optimizer = torch.optim.Adam(filter.parameters(), lr=1e-3)
        before = filter.coefficients().detach()
        filter.coefficients()[:, 0].sum().backward()
        optimizer.step()
        change = filter.coefficients().detach() - before
        torch.testing.assert_close(change[:, 0], torch.full((2,), -1e-3 * multiplier))

    @pytest.mark.parametrize("make", LEARNING.values(), ids=LEARNING)
    def test_weight_decay_pulls_towards_the_unmodified_model(self, make) -> None:
        filter = shift(make())
        optimizer = torch.optim.SGD(filter.parameters(), lr=0.1, weight_decay=1.0)
        for _ in range(200):
            filter.theta.grad = torch.zeros_like(filter.theta)
            optimizer.step()
        learned = filter.basis.any(0)
        torch.testing.assert_close(filter.coefficients()[:, learned], filter.base[:, learned])
        unmodified = torch.zeros(filter.degree + 1)
        unmodified[1] = 1.0
        if getattr(filter, "learn", None) in (None, ("w0", "w1", "wK"), ("w0", "w1")):
            torch.testing.assert_close(
                filter.coefficients().detach(), unmodified.expand(3, -1), rtol=0, atol=1e-6
            )

    @every_filter
    def test_reset_parameters_goes_back_to_the_start(self, make) -> None:
        filter = shift(make())
        filter.reset_parameters()
        assert torch.equal(filter.coefficients(), make().coefficients())


class TestMoving:
    """.half(), .to() and their like round the learned numbers, never the constants."""

    @every_filter
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_low_precision_keeps_constants_exact(self, make, dtype: torch.dtype) -> None:
        filter, exact = make().to(dtype), make()
        assert filter.base.dtype == filter.basis.dtype == torch.float32
        assert torch.equal(filter.base, exact.base)
        assert torch.equal(filter.basis, exact.basis)
        assert filter.coefficients().dtype == torch.float32
        assert filter.theta is None or filter.theta.dtype == dtype
        # in float64 not what float32 holds, but the numbers as given
        filter = filter.double()
        assert filter.coefficients().dtype == torch.float64
        assert torch.equal(filter.base, filter._exact_base)
        if isinstance(filter, PageRank):
            assert filter.coefficients()[0, 1].item() == 0.1 * 0.9
        assert filter.float().coefficients().dtype == torch.float32

    @every_filter
    def test_built_without_data_and_filled_in_later(self, make) -> None:
        with torch.device("meta"):
            filter = make()
        assert all(x.device.type == "meta" for x in (*filter.parameters(), *filter.buffers()))
        assert filter.coefficients().device.type == "meta"
        filter.reset_parameters()  # there is nothing to fill yet
        assert all(parameter.is_meta for parameter in filter.parameters())
        with _garbage_in_new_memory():
            filter.to_empty(device="cpu")
        assert torch.equal(filter.coefficients(), make().coefficients())

    @every_filter
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_meta_and_assign(self, make, dtype: torch.dtype) -> None:
        """How large models are loaded: no data at first, then the tensors of a checkpoint."""
        trained = shift(make()).to(dtype)
        with torch.device("meta"):
            filter = make().to(dtype)
        filter.load_state_dict(trained.state_dict(), assign=True)
        heads, tokens = filter.num_heads, 5
        operator = DenseOperator(torch.randn(2, heads, tokens, tokens, dtype=dtype).softmax(-1))
        v = torch.randn(2, heads, tokens, 8, dtype=dtype)
        assert torch.equal(filter(operator, v), trained(operator, v))
        assert torch.equal(filter.coefficients(), trained.coefficients())

    @every_filter
    def test_runs_without_data_after_a_cast(self, make) -> None:
        filter = make().to("meta").double()
        matrix = torch.empty(2, filter.num_heads, 5, 5, dtype=torch.float64, device="meta")
        assert filter(DenseOperator(matrix), matrix[..., :3]).shape == (2, filter.num_heads, 5, 3)


@contextlib.contextmanager
def _garbage_in_new_memory() -> Iterator[None]:
    """``torch.empty_like`` gives what no test could mistake for an initial value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *a, **k: torch.full_like(*a, 1e26, **k))
        yield


class TestCopies:
    @every_filter
    def test_copies(self, make) -> None:
        """Also one that is built of the config and of the state."""
        filter = shift(make())
        before = filter.coefficients().detach().clone()
        file = io.BytesIO()
        torch.save(filter.state_dict(), file)
        file.seek(0)
        built = type(filter)(**json.loads(json.dumps(filter.config())))
        built.load_state_dict(torch.load(file, weights_only=True), strict=True)
        for twin in (copy.deepcopy(filter), pickle.loads(pickle.dumps(filter)), built):
            assert torch.equal(twin.coefficients(), before)
            assert twin.config() == filter.config()
            assert repr(twin) == repr(filter)
            assert torch.equal(shift(twin).half().base, filter.base)
        assert torch.equal(filter.coefficients(), before)

    @every_filter
    def test_fold(self, make) -> None:
        filter = shift(make())
        filter.dropout_after = "filter"
        folded = filter.fold()
        assert folded.dropout_after == "filter"
        assert type(folded) is Polynomial
        assert folded.degree == filter.degree
        # θ counts from (0, 1, 0 …) in float32, so that is what the rounding is relative to
        torch.testing.assert_close(
            folded.coefficients(), filter.coefficients(), rtol=3e-7, atol=1.2e-7
        )
        assert folded.theta.shape == (3, filter.degree + 1)

    def test_set_coefficients(self) -> None:
        filter = Polynomial(2, lr_multiplier=4.0)
        filter.set_coefficients(torch.tensor([0.5, 0.25, -1.0]))
        check(filter, 0.5, 0.25, -1.0)
        filter.set_coefficients(torch.tensor([[0.5, 0.25, -1.0], [0.0, 1.0, 2.0]]))
        check(filter, [0.5, 0.25, -1.0], [0.0, 1.0, 2.0])
        with pytest.raises(ValueError, match=r"shape \(2, 3\) or \(3,\), got \(2, 2\)"):
            filter.set_coefficients(torch.zeros(2, 2))


def test_a_filter_of_ones_own() -> None:
    """A subclass gives a base and a basis; learning, moving and folding come with it."""

    class HighPass(GraphFilter):
        """H = I + θ·(I − A)."""

        def __init__(self, num_heads: int) -> None:
            super().__init__(num_heads, torch.tensor([1.0, 0.0]), torch.tensor([[1.0, -1.0]]))

    filter = HighPass(2)
    check(filter, 1.0, 0.0)
    filter.theta.data += 0.5
    check(filter, 1.5, -0.5)
    check(filter.fold(), 1.5, -0.5)
    assert filter.config() == {"num_heads": 2}


def test_an_engine_puts_its_own_base_under_a_filter() -> None:
    """As torchtitan needs it: files name the kind that the library has, and build that one."""

    class Base(nn.Module):
        pass

    names = {"__module__": GFSA.__module__, "__qualname__": GFSA.__qualname__}
    for _ in range(2):
        filter = kind_named("GFSA")(2)
        assert type(filter) is GFSA
        filter.__class__ = type("GFSA", (Base, GFSA), names)
        assert filter.describe()["kind"] == "GFSA"


class Bounded(GFSA):
    """Coefficients that are not affine in θ."""

    def coefficients(self) -> torch.Tensor:
        return super().coefficients().tanh()


class Halved:
    """A mixin, which knows nothing of filters."""

    def coefficients(self) -> torch.Tensor:
        return 0.5 * super().coefficients()  # type: ignore[misc]


class HalvedPolynomial(Halved, Polynomial):
    pass


class HalvedBounded(Halved, Bounded):
    pass


@pytest.mark.parametrize("kind", [Bounded, HalvedPolynomial, HalvedBounded])
@pytest.mark.parametrize("operator", ["dense", "attention"])
def test_coefficients_of_ones_own_are_applied(kind: type[GraphFilter], operator: str) -> None:
    """A filter that overrides ``coefficients`` is applied with them, however it is derived."""
    filter = shift(kind(2))
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    applied = (DenseOperator.from_qk if operator == "dense" else AttentionOperator)(q, k)
    own, affine = filter.coefficients(), GraphFilter.coefficients(filter)
    assert not torch.allclose(own, affine)
    y = filter(applied, v)
    torch.testing.assert_close(y, applied.polynomial(own, v), rtol=0, atol=0)
    assert torch.autograd.grad(y.sum(), filter.theta)[0].abs().sum() > 0


REFUSED = {
    "num_heads must be an integer of at least 1, got 0": lambda: GFSA(0),
    "num_heads must be an integer.*got True": lambda: Twicing(True),
    "K must be an integer of at least 2, or None.*got 1": lambda: GFSA(2, K=1),
    "K must be an integer of at least 2.*got 2.0": lambda: GFSA(2, K=2.0),
    "'extrapolated' or 'exact', got 'true'": lambda: GFSA(2, power="true"),
    r"learn takes each of \('w0', 'w1', 'wK'\) at most once, got \('w0', 'w2'\)": lambda: GFSA(
        2, learn=("w0", "w2")
    ),
    r"at most once, got \('w0', 'w0'\)": lambda: GFSA(2, learn=("w0", "w0")),
    r"no wK to learn, but learn=\('wK',\) was given": lambda: GFSA(2, K=None, learn=("wK",)),
    "leaves no high-order term .*, but wK=0.1 was given": lambda: GFSA(2, K=None, wK=0.1),
    r"w0 must be a number or one number for each of 2 heads, got shape \(3,\)": lambda: GFSA(
        2, w0=[0.1, 0.2, 0.3]
    ),
    r"w1 must be.*shape \(1, 2\)": lambda: GFSA(2, w1=[[1.0, 1.0]]),
    "wK must be finite, got nan": lambda: GFSA(2, wK=float("nan")),
    r"base \+ θ·basis.* must be finite in float32, got 2\.97e\+40": lambda: GFSA(2, wK=3e38, K=100),
    # of one head
    "θ·basis.* must be finite in float32": lambda: GFSA(2, wK=[0.0, -3e38], K=100),
    "lr_multiplier must be a positive number.*got 0.0": lambda: GFSA(2, lr_multiplier=0.0),
    "lr_multiplier.*got inf": lambda: Polynomial(2, lr_multiplier=float("inf")),
    "degree must be an integer of at least 0, got -1": lambda: Polynomial(2, degree=-1),
    "degree must be.*got True": lambda: Polynomial(2, degree=True),
    "expected 0 ≤ alpha ≤ 1, got 1.5": lambda: PageRank(2, alpha=1.5),
    "hops must be an integer of at least 1, got 0": lambda: PageRank(2, hops=0),
    r"for 2 heads .* \(2, degree\+1\), .*got the shapes {'base': \(3, 2\)}": lambda: GraphFilter(
        2, torch.ones(3, 2)
    ),
    r"'base': \(0,\)}": lambda: GraphFilter(2, torch.ones(0)),
    r"'base': \(\)}": lambda: GraphFilter(2, torch.tensor(1.0)),
    r"'basis': \(1, 3\)}": lambda: GraphFilter(2, torch.ones(2), torch.ones(1, 3)),
    r"'basis': \(2,\)}": lambda: GraphFilter(2, torch.ones(2), torch.ones(2)),
    r"'basis': \(\)}": lambda: GraphFilter(2, torch.ones(2), torch.tensor(1.0)),
    r"'theta': \(3,\)}": lambda: GraphFilter(2, torch.ones(2), torch.ones(1, 2), torch.ones(3)),
    r"'theta': \(1,\)}": lambda: GraphFilter(2, torch.ones(2), theta=torch.ones(1)),
}


@pytest.mark.parametrize(("message", "make"), REFUSED.items())
def test_refuses(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_list_is_no_base() -> None:
    with pytest.raises(TypeError, match=r"base of a filter must be a tensor, got list; torch"):
        GraphFilter(2, [0.0, 1.0])  # type: ignore[arg-type]


@every_filter
def test_a_process_computes_the_coefficients_of_its_own_heads(make) -> None:
    """Three heads over three processes, as Megatron has θ: a plain tensor of the own rows."""
    whole = make()
    for rank in range(3):
        part = shift(make())
        own = part.keep_heads(rank, 3, theta_is_cut=True)
        assert own == slice(rank, rank + 1)
        if part.theta is not None:
            part.theta = nn.Parameter(part.theta.detach()[own].clone())
        assert torch.equal(part.coefficients(), shift(make()).coefficients()[own])
        part.double().float().reset_parameters()
        assert torch.equal(part.coefficients(), whole.coefficients()[own])
