"""Filters: a few learnable numbers per head that become the coefficients of a polynomial.

Every filter here is affine in its parameters,

    coefficients = base + lr_multiplier · θ · basis,      θ: (heads, learned numbers)

so that weight decay pulls towards θ = 0, which is the unmodified model, and one small tensor per
layer is all there is to save, shard or freeze.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from gfsa.filters import spec
from gfsa.filters.depth import FirstValues
from gfsa.operators import Coefficients, DenseOperator, Operator
from gfsa.operators.call import DropoutPlace, check_dropout_place
from gfsa.operators.operator import columns_of, own_share, runs_of, take_heads, value_of

if TYPE_CHECKING:
    from typing_extensions import Self


class GraphFilter(nn.Module):
    """A learnable polynomial per head, applied by calling ``y = filter(operator, v)``.

    A subclass passes the polynomial at θ = 0 (``base``) and the polynomial that each learned number
    multiplies (``basis``). One whose coefficients are not affine in θ overrides
    :meth:`coefficients`, and is applied with what that returns.

    Args:
        num_heads: how many heads, each with its own numbers.
        base: ``(degree+1,)`` or ``(heads, degree+1)``: the coefficients at θ = 0.
        basis: ``(L, degree+1)``: one polynomial for each of the L learned numbers.
        theta: initial θ, ``(L,)`` or ``(heads, L)``; zeros if not given.
        lr_multiplier: the coefficients change by ``lr_multiplier·Δθ``. Optimisers such as Adam
            take steps of about the learning rate whatever the gradient's size, so this sets a
            learning rate for the filter without parameter groups.

    Raises:
        TypeError: if ``base``, ``basis`` or ``theta`` is not a tensor.
        ValueError: if shapes do not fit together, or a number is out of its range.
    """

    base: Tensor
    basis: Tensor
    theta: nn.Parameter | None
    base_share: Tensor | None
    #: where a plugged layer's attention dropout acts: on entries of A before its powers
    #: ("attention"), or on entries of H ("filter")
    dropout_after: DropoutPlace = "attention"
    #: whether the filter is a polynomial of A; if it is not, it has no coefficients
    is_polynomial = True
    #: whether this process holds only some of the heads (tensor parallel)
    heads_are_sharded = False
    #: whether the k-th learned number changes the k-th coefficient alone
    basis_is_diagonal = False
    #: whether the layer adds the first layer's values to its own, with a learned r per head
    has_depth = False
    #: where the filters of a stack with a depth term keep those values; None without one
    first_values: FirstValues | None = None
    #: which layer of the stack this is
    place = 0
    #: whether the share of the exclusive term is learned
    learns_share = False

    def __init__(
        self,
        num_heads: int,
        base: Tensor,
        basis: Tensor | None = None,
        theta: Tensor | None = None,
        lr_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        spec.check_shapes(num_heads, base, basis, theta)
        spec.check_multiplier(lr_multiplier)
        self.num_heads = num_heads
        self.lr_multiplier = float(lr_multiplier)
        basis = base.new_zeros(0, base.shape[-1]) if basis is None else basis
        learned = len(basis)
        theta = base.new_zeros(learned) if theta is None else theta
        # exact copies that neither .half() rounds nor device="meta" empties; the buffers and the
        # parameter, on torch's default device as in any module, are made from them. None of them
        # is an inference tensor, which could not be trained afterwards
        with torch.inference_mode(False):
            self._exact_base = base.detach().double().cpu().expand(num_heads, -1).clone()
            self._exact_basis = basis.detach().double().cpu() * self.lr_multiplier
            self._exact_share: Tensor | None = None
            self._start = theta.detach().double().cpu().expand(num_heads, learned).clone()
            spec.check_finite(self._exact_base, self._exact_basis, self._start)
            basis = self._exact_basis
            is_square = basis.shape[0] == basis.shape[1]
            self.basis_is_diagonal = is_square and torch.equal(basis, basis.diagonal().diag())
            for constant in ("base", "basis", "base_share"):
                self.register_buffer(constant, None, persistent=False)
            # torch 2.6's get_default_device does not see `with torch.device(…)`; a new tensor does
            device = torch.empty(0).device
            self._place_constants(device, torch.float32)
            start = self._start.to(device, torch.float32)
            self.register_parameter("theta", nn.Parameter(start) if learned else None)

    @property
    def degree(self) -> int:
        """The highest power of A, which is the number of attention passes."""
        return self._exact_base.shape[-1] - 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # an engine's subclass may go under the name of one of ours
        if spec.is_ours(cls):
            spec.KINDS.setdefault(cls.__name__, cls)

    def coefficients(self) -> Tensor:
        """``(heads, degree+1)``, lowest power first, differentiable in θ.

        In float32, or float64 in a float64 model. The stored ``basis`` includes ``lr_multiplier``.
        """
        return value_of(self._affine())

    def polynomial_coefficients(self) -> Tensor | Coefficients:
        """The coefficients as an operator takes them: with θ, so that a kernel can compute them."""
        if type(self).coefficients is GraphFilter.coefficients:
            return self._affine()
        return self.coefficients()

    def _affine(self) -> Tensor | Coefficients:
        theta: Any = self.theta
        base, powers = self.base, self._exact_basis.shape[-2]
        if theta is None or not powers:
            return base
        # a plain parameter first: a module's attributes are slow, and a decoded token reads them in
        # each layer
        if type(theta) is not nn.Parameter or base.is_meta:
            theta, base = self._learned(theta), self.base
        if theta.shape[1] > powers:
            theta = theta[:, :powers]
        return Coefficients(theta, base, self.basis, self.basis_is_diagonal)

    def exclude(self, share: float | Sequence[float] | Tensor = 1.0, learn: bool = False) -> Self:
        r"""Take the part along a token's own v out of its output, :math:`H - a\,diag(p)`.

        See :class:`gfsa.Exclusive`, which has the arguments. It returns the filter itself, to be
        plugged by ``gfsa.plug(model, filter=lambda heads: gfsa.GFSA(heads).exclude())``.
        """
        self._refuse_term("an exclusive", self._exact_share is not None)
        if self.has_depth:
            raise ValueError("exclude comes before add_depth: this filter has a depth term already")
        self._exact_share = spec.per_head("share", share, self.num_heads)
        self.learns_share = bool(learn)
        self._place_constants(self.base.device, self.base.dtype)
        if learn:
            self._learn_one_more()
        return self

    @property
    def starts_exclusive(self) -> bool:
        """Whether the exclusive term changes the model before anything is learned."""
        return self._exact_share is not None and bool(self._exact_share.any())

    def share(self) -> Tensor | None:
        """The share a of the exclusive term, ``(heads,)``; None for a filter without one."""
        self._fill_constants()
        if not self.learns_share:
            return self.base_share
        assert self.base_share is not None
        column = self._exact_basis.shape[-2]
        return self.base_share + self.lr_multiplier * self._learned(self.theta)[:, column]

    def add_depth(self) -> Self:
        """Let the layer add the first layer's values to its own, and return the filter.

        ``plug(depth=True)`` calls this.
        """
        self._refuse_term("a depth", self.has_depth)
        self.has_depth = True
        self._learn_one_more()
        return self

    def depth(self) -> Tensor | None:
        """r of the depth term, ``(heads,)``; None for a filter without one."""
        return self.lr_multiplier * self._learned(self.theta)[:, -1] if self.has_depth else None

    def _refuse_term(self, term: str, has_it: bool) -> None:
        if has_it:
            raise ValueError(f"this filter has {term} term already")
        if not self.is_polynomial:
            raise ValueError(
                f"{type(self).__name__} is not a polynomial of A and would ignore {term} term; use "
                "one of the filters of gfsa"
            )

    def _learn_one_more(self) -> None:
        """Append a learned number per head to θ; it starts at 0."""
        with torch.inference_mode(False), torch.no_grad():
            self._start = torch.nn.functional.pad(self._start, (0, 1))
            like = self.base if self.theta is None else self.theta
            old = like.new_zeros(len(like), 0) if self.theta is None else self.theta
            self.theta = nn.Parameter(torch.nn.functional.pad(old, (0, 1)))

    def _take_terms_of(self, other: GraphFilter) -> None:
        """Give this filter the terms of another, as they are now, and all that is not learned."""
        self.first_values, self.place = other.first_values, other.place
        self.dropout_after = other.dropout_after
        share, depth = other.share(), other.depth()
        if share is not None:
            self.exclude(share.detach(), other.learns_share)
        if depth is not None:
            self.add_depth()
            assert self.theta is not None
            with torch.no_grad():
                self.theta[:, -1] = depth / self.lr_multiplier

    def _learned(self, theta: Any) -> Any:
        """θ as this process uses it."""
        self._fill_constants()
        if not hasattr(theta, "full_tensor"):
            return theta
        # sharded by heads, each process uses its own rows; sharded otherwise (outside of an FSDP
        # model's forward, say), θ is gathered
        return theta.to_local() if self.heads_are_sharded else theta.full_tensor()

    def keep_heads(self, rank: int, processes: int, *, theta_is_cut: bool) -> slice:
        """Cut the constants to the heads of one process (tensor parallel), and return these heads.

        θ is the caller's to cut, or to shard. Where it is cut, it becomes a plain tensor of these
        heads' rows; a DTensor's rows are initialised from all rows, which therefore stay whole.
        """
        count = self.num_heads // processes
        heads = slice(rank * count, (rank + 1) * count)
        self._exact_base = self._exact_base[heads].clone()
        if self._exact_share is not None:
            self._exact_share = self._exact_share[heads].clone()
        self._place_constants(self.base.device, self.base.dtype)
        if theta_is_cut:
            self._start = self._start[heads].clone()
        self.heads_are_sharded = True
        return heads

    def _fill_constants(self) -> None:
        """Give the constants values where load_state_dict(assign=True) has left them without.

        Without a θ they are on the host until a forward shows where the model is.
        """
        if not self.base.is_meta:
            return
        if self.theta is None:
            self._place_constants(torch.device("cpu"), self.base.dtype)
        elif not self.theta.is_meta:
            dtype = torch.promote_types(self.theta.dtype, torch.float32)
            self._place_constants(self.theta.device, dtype)

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        r"""Filter the tokens: :math:`y = \sum_k c_k A^k v` on the graph of ``operator``."""
        if (self.first_values is not None or self.has_depth) and not operator.values_are_mixed:
            v = self.mix_values(v)
        coefficients = self.polynomial_coefficients()
        if type(coefficients) is Tensor and coefficients.device != v.device:
            # built on the meta device, without a θ whose device would tell where the model is now
            self._place_constants(v.device, torch.promote_types(v.dtype, self.base.dtype))
            coefficients = self.polynomial_coefficients()
        if self._exact_share is None:
            return operator.polynomial(coefficients, v)
        return operator.polynomial(coefficients, v, self.share())

    def mix_values(self, v: Tensor) -> Tensor:
        """``v + r·V⁰`` in a layer with a depth term; the first layer's v becomes V⁰."""
        if self.first_values is None:
            if self.has_depth:
                raise ValueError(
                    "this filter has a depth term, but is not connected to the first layer: "
                    "gfsa.plug(model, depth=True) and gfsa.load connect the filters of a model"
                )
            return v
        r = self.depth()
        if r is not None:
            return self.first_values.add(v, r, self.place)
        self.first_values.keep(v)
        return v

    def mixed(self, operator: Operator, v: Tensor) -> Tensor:
        """The values that :meth:`forward` filters; it takes them as they are from ``operator``."""
        if (self.first_values is not None or self.has_depth) and not operator.values_are_mixed:
            v = self.mix_values(v)
            operator.values_are_mixed = True
        return v

    def map(self, operator: DenseOperator, v: Tensor | None = None) -> Tensor:
        """The matrix that replaces A, ``(..., H, N, N)``; to look at it, not for speed.

        That of an exclusive filter depends on ``v``, the values as :meth:`mixed` gives them.
        """
        return operator.filter(self.coefficients(), self.share(), v)

    def fold(self) -> Polynomial:
        """A :class:`Polynomial` with the present coefficients, each of which can be learned."""
        with torch.inference_mode(False):
            coefficients = self.coefficients().detach()
            folded = Polynomial(self.num_heads, degree=self.degree).to(coefficients)
            folded.set_coefficients(coefficients)
            folded._take_terms_of(self)
        return folded

    def config(self) -> dict[str, Any]:
        """The arguments that build this filter again (its learned numbers are in θ)."""
        return {"num_heads": self.num_heads}

    def describe(self) -> dict[str, Any]:
        """What this filter is, as plain data."""
        description: dict[str, Any] = {"kind": spec.kind_of(type(self)), "arguments": self.config()}
        description["dropout_after"] = self.dropout_after
        if self._exact_share is not None and "share" not in description["arguments"]:
            description["exclusive"] = self._describe_share()
        if self.has_depth:
            description["depth"] = True
        return description

    def _describe_share(self) -> dict[str, Any]:
        """The arguments of :meth:`exclude`."""
        assert self._exact_share is not None
        return {"share": spec.as_number(self._exact_share), "learn": self.learns_share}

    def get_extra_state(self) -> Tensor:
        return spec.write_description(self.describe())

    def set_extra_state(self, state: Tensor) -> None:
        saved, own = spec.read_description(state), self.describe()
        if not self.heads_are_sharded and not spec.is_same_filter(saved, own):
            raise ValueError(
                f"the checkpoint has a filter {spec.shown(saved)}, this one is {spec.shown(own)}; "
                "plug the model as it was plugged"
            )
        self.dropout_after = check_dropout_place(saved.get("dropout_after", "attention"))
        # torch calls this after it has loaded θ
        self._fill_constants()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # module.half(), .to(), .to_empty() … call this: the constants keep full precision on any
        # device (float64 only if the model is in float64)
        had_no_values = self.theta is not None and self.theta.device.type == "meta"
        # what has no values cannot be moved
        self._fill_constants()
        super()._apply(fn, recurse)
        if self.training:
            _warn_of_half(self.theta)
        dtype = torch.float64 if self.base.dtype == torch.float64 else torch.float32
        self._place_constants(self.base.device, dtype)
        if had_no_values:
            # to_empty() leaves memory as it was found
            self.reset_parameters()
        return self

    def train(self, mode: bool = True) -> Self:
        # a model that from_pretrained returns is cast in evaluation mode, and trained later
        if mode and not self.training:
            _warn_of_half(self.theta)
        return super().train(mode)

    def _place_constants(self, device: torch.device, dtype: torch.dtype) -> None:
        # inference tensors cannot be used in training, which may follow
        with torch.inference_mode(False):
            self.base = self._exact_base.to(device, dtype)
            self.basis = self._exact_basis.to(device, dtype)
            if self._exact_share is not None:
                self.base_share = self._exact_share.to(device, dtype)

    def reset_parameters(self) -> None:
        """Set θ back to its initial value; deferred initialisation calls this."""
        if self.theta is None or self.theta.device.type == "meta":
            return
        theta: Any = self.theta
        start = self._start.to(theta.device, theta.dtype)
        if hasattr(theta, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            # every process has all of them: nothing is sent
            start = distribute_tensor(
                start, theta.device_mesh, theta.placements, src_data_rank=None
            )
        with torch.no_grad():
            theta.copy_(start)

    def __prepare_scriptable__(self) -> NoReturn:
        """Torch asks each module of a model for it before torch.jit.script compiles the model."""
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}: a filter takes an attention "
            "operator, which is not a tensor. Use torch.export or torch.jit.trace, or "
            "gfsa.unplug(model)"
        )

    def extra_repr(self) -> str:
        arguments = [str(self.num_heads)]
        arguments += [f"{k}={v!r}" for k, v in self.config().items() if k != "num_heads"]
        terms = [term for term in ("exclusive", "depth") if term in self.describe()]
        return "; ".join([", ".join(arguments), f"degree {self.degree}", *terms])


class Polynomial(GraphFilter):
    r"""Any polynomial, every coefficient learned: :math:`H = \sum_{k=0}^{m} c_k A^k`.

    Starts as ordinary attention, :math:`c = (0, 1, 0, …)`. Degree 1 is :math:`c_0 I + c_1 A`,
    which costs no second pass.

    Args:
        num_heads: heads of the layer.
        degree: the highest power m; degree m costs m passes. Degree 0 has no power of A, and
            starts as the identity.
        lr_multiplier: see :class:`GraphFilter`.

    Examples:
        >>> filter = gfsa.Polynomial(num_heads=4, degree=3)
        >>> filter.coefficients()[0].tolist()               # ordinary attention
        [0.0, 1.0, 0.0, 0.0]
        >>> filter.set_coefficients(torch.tensor([0.0, 1.0, 0.25, -0.25]))
        >>> filter.coefficients()[3].tolist()
        [0.0, 1.0, 0.25, -0.25]
    """

    def __init__(self, num_heads: int, degree: int = 2, lr_multiplier: float = 1.0) -> None:
        spec.check_order("degree", degree, least=0)
        # without a power of A there is no ordinary attention: it starts as the identity
        base = monomial(min(1, degree), degree)
        basis = torch.eye(degree + 1, dtype=torch.float64, device="cpu")
        super().__init__(num_heads, base, basis, lr_multiplier=lr_multiplier)

    @torch.no_grad()
    def set_coefficients(self, coefficients: Tensor) -> None:
        """Set the coefficients by setting θ.

        Args:
            coefficients: ``(heads, degree+1)`` or ``(degree+1,)``, lowest power first.

        Raises:
            ValueError: if they have another shape.
        """
        assert self.theta is not None
        shape = (self.num_heads, self.degree + 1)
        if coefficients.shape not in (shape, shape[1:]):
            raise ValueError(
                f"expected coefficients of shape {shape} or {shape[1:]}, "
                f"got {tuple(coefficients.shape)}"
            )
        wanted = coefficients.detach().double().cpu().expand(shape)
        self.theta[:, : shape[1]] = (wanted - self._exact_base) / self.lr_multiplier

    def config(self) -> dict[str, Any]:
        return {**super().config(), "degree": self.degree, "lr_multiplier": self.lr_multiplier}


class PartialPolynomial(Polynomial):
    r"""A polynomial of full degree on some heads, of degree 1 on the others.

    .. math:: H_h = c_{h,0} I + c_{h,1} A_h + [h \in high] \sum_{k \ge 2} c_{h,k} A_h^k

    All heads do the first pass, only the heads in ``high`` do the others. Under attention dropout,
    and with operators that cannot be split by head, every head does every pass.

    Args:
        num_heads: heads of the layer.
        degree: of the heads in ``high``, at least 2.
        high: heads counted from 0, in order.
        lr_multiplier: see :class:`gfsa.GraphFilter`.
    """

    def __init__(
        self, num_heads: int, degree: int, high: Sequence[int], lr_multiplier: float = 1.0
    ) -> None:
        super().__init__(num_heads, degree, lr_multiplier)
        # the basis of a pruned filter differs from head to head
        spec.check_size(num_heads, degree + 1, degree + 1)
        self.high = list(high)
        if not all(type(head) is int for head in self.high):
            raise TypeError(f"high must be a list of heads, numbers from 0, got {high!r:.80}")
        in_order = all(low < up for low, up in pairwise([-1, *self.high, num_heads]))
        if degree < 2 or not self.high or not in_order:
            raise ValueError(
                f"expected a degree of at least 2 and heads among 0 … {num_heads - 1} in order, "
                f"got degree={degree} and high={self.high!r:.80}"
            )
        # the learned numbers that low heads do not use multiply zeros, so they are not trained
        with torch.inference_mode(False):
            kept = torch.zeros(num_heads, 1, degree + 1, dtype=torch.float64, device="cpu")
            kept[:, :, :2] = kept[self.high] = 1.0
            self._exact_basis = self._exact_basis * kept
        self._place_constants(self.basis.device, self.basis.dtype)

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        some = operator.second_pass(self.high)
        if some is None:
            return super().forward(operator, v)
        if not operator.values_are_mixed:
            v = self.mix_values(v)
        identity, first, *columns = columns_of(self.coefficients())
        tokens, mixed = operator.powers(v, 1)
        _, *higher = some.further(take_heads(mixed, self.high), self.degree - 1)
        # summed in the coefficients' precision and rounded once, as in operators.operator.combine
        share = self.share()
        if share is not None:
            identity = identity - own_share(share, mixed, tokens)
        y = identity * tokens + first * mixed
        terms = (take_heads(c, self.high) * u for c, u in zip(columns, higher, strict=True))
        extra: Any = sum(terms)
        done = 0
        for start, length in runs_of(self.high):
            y.narrow(-3, start, length).add_(extra.narrow(-3, done, length))
            done += length
        return y.to(mixed.dtype)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "high": self.high}


def polynomial(*coefficients: float) -> Tensor:
    """The coefficients of a polynomial of A, lowest power first."""
    # constants are computed on the host, whatever torch's default device is
    return torch.tensor(coefficients, dtype=torch.float64, device="cpu")


def monomial(k: int, degree: int) -> Tensor:
    """The coefficients of A^k among polynomials of a degree."""
    return polynomial(*[0.0] * k, 1.0, *[0.0] * (degree - k))


def _warn_of_half(theta: Tensor | None) -> None:
    """Half precision loses what a filter learns, but FSDP 2 and DeepSpeed may need the cast."""
    if theta is not None and theta.requires_grad and theta.element_size() < 4:
        warnings.warn(
            f"filters were cast to {theta.dtype}, in which small steps of their numbers are lost "
            "unless the optimizer keeps float32 copies: cast the model first, then plug it",
            stacklevel=2,
        )
