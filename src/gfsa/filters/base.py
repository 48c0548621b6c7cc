"""Filters: a few learnable numbers per head that become the coefficients of a polynomial.

Every filter here is affine in its parameters,

    coefficients = base + lr_multiplier · θ · basis,      θ: (heads, learned numbers)

so that θ = 0 is the model nobody touched, weight decay pulls towards that model, and one small
tensor per layer is all there is to save, shard or freeze.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.operators import DenseOperator, Operator
from gfsa.operators.base import affine
from gfsa.operators.dense import DropoutPlace, check_dropout_place

# beyond these nothing is meant: a filter from a file must not be able to ask for all memory
_MOST_HEADS = 65536
_MOST_POWERS = 1000
_LARGEST = 1e30


class GraphFilter(nn.Module):
    """A learnable polynomial per head, applied to an attention map by calling the filter.

    .. code-block:: python

        y = filter(operator, v)                               # an attention map and its tokens
        y = graph_filter_attention(q, k, v, filter.coefficients())      # the same, by function

    A subclass says what its polynomial is without any learning (``base``), and which polynomial
    each learned number multiplies (``basis``); everything else is done here.

    Args:
        num_heads: how many heads, each with numbers of its own.
        base: ``(degree+1,)`` or ``(heads, degree+1)``: the coefficients at θ = 0.
        basis: ``(L, degree+1)``: one polynomial for each of the L learned numbers.
        theta: initial θ, ``(L,)`` or ``(heads, L)``; zeros if not given.
        lr_multiplier: the coefficients move by ``lr_multiplier·Δθ``. Optimisers of Adam's kind
            take steps of about the learning rate whatever the gradient's size, so this is a
            learning rate of the filter's own that needs no parameter groups.
    """

    base: Tensor
    basis: Tensor
    theta: nn.Parameter | None

    #: where a plugged layer's attention dropout acts: on entries of A before its powers
    #: ("attention"), or on entries of H ("filter")
    dropout_after: DropoutPlace = "attention"

    #: whether the filter is a polynomial of A; what is none has no coefficients
    is_polynomial = True

    #: whether this process has some of the heads only (tensor parallel)
    heads_are_sharded = False

    #: whether the k-th learned number moves the k-th coefficient alone
    basis_is_diagonal = False

    def __init__(
        self,
        num_heads: int,
        base: Tensor,
        basis: Tensor | None = None,
        theta: Tensor | None = None,
        lr_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive_int("num_heads", num_heads)
        check_multiplier(lr_multiplier)
        self.num_heads = num_heads
        self.lr_multiplier = float(lr_multiplier)
        if basis is None:
            basis = base.new_zeros(0, base.shape[-1])
        learned = len(basis)
        if theta is None:
            theta = base.new_zeros(learned)
        # exact copies that no .half() rounds and no device="meta" empties; the buffers and the
        # parameter, on torch's default device as any module's, are made from them
        self._exact_base = base.detach().double().cpu().expand(num_heads, -1).clone()
        self._exact_basis = basis.detach().double().cpu() * self.lr_multiplier
        self._start = theta.detach().double().cpu().expand(num_heads, learned).clone()
        self.basis_is_diagonal = _is_diagonal(self._exact_basis)
        device = torch.get_default_device()
        self.register_buffer("base", self._exact_base.to(device, torch.float32), persistent=False)
        self.register_buffer("basis", self._exact_basis.to(device, torch.float32), persistent=False)
        start = self._start.to(device, torch.float32)
        self.register_parameter("theta", nn.Parameter(start) if learned else None)

    @property
    def degree(self) -> int:
        """The highest power of A, which is the number of attention passes."""
        return self._exact_base.shape[-1] - 1

    def coefficients(self) -> Tensor:
        """``(heads, degree+1)`` in float32 (float64 in a float64 model), differentiable in θ."""
        theta = self._learned()
        if theta is None:
            return self.base
        if self.basis_is_diagonal:
            # one kernel instead of three, which counts where single tokens are decoded
            return torch.addcmul(self.base, theta, self.basis.diagonal(dim1=-2, dim2=-1))
        return affine(theta, self.base, self.basis)

    def _learned(self) -> Tensor | None:
        """θ as this process uses it."""
        theta: Any = self.theta
        if theta is None:
            return None
        if self.base.is_meta and not theta.is_meta:
            # built without memory, then given numbers by load_state_dict(assign=True)
            self._place_constants(theta.device, torch.promote_types(theta.dtype, torch.float32))
        if hasattr(theta, "full_tensor"):
            # sharded: by heads it is used where its heads are, otherwise (outside of an FSDP
            # model's forward, say) gathered
            theta = theta.to_local() if self.heads_are_sharded else theta.full_tensor()
        return theta

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        r"""Filter the tokens: :math:`y = \sum_k c_k A^k v` on the graph of ``operator``."""
        if operator.makes_coefficients and self._has_plain_coefficients():
            theta = self._learned()
            if theta is not None:
                return operator.affine(theta, self.base, self.basis, v)
        return operator.polynomial(self.coefficients(), v)

    def _has_plain_coefficients(self) -> bool:
        # a filter with coefficients of another kind says so by a method of its own
        return getattr(self.coefficients, "__func__", None) is GraphFilter.coefficients

    def map(self, operator: DenseOperator) -> Tensor:
        """``H``, the map that takes A's place, ``(..., H, N, N)``; for looking at it."""
        return operator.filter(self.coefficients())

    def fold(self) -> Polynomial:
        """The same polynomial as a plain :class:`Polynomial`, each coefficient free to learn."""
        coefficients = self.coefficients().detach()
        folded = Polynomial(self.num_heads, degree=self.degree).to(coefficients)
        folded.set_coefficients(coefficients)
        folded.dropout_after = self.dropout_after
        return folded

    def config(self) -> dict[str, Any]:
        """The arguments that build this filter again (its learned numbers are in θ)."""
        return {"num_heads": self.num_heads}

    def describe(self) -> dict[str, Any]:
        """What this filter is, as plain data."""
        return {
            "kind": type(self).__name__,
            "arguments": self.config(),
            "dropout_after": self.dropout_after,
        }

    def get_extra_state(self) -> Tensor:
        # numbers alone do not say which polynomial they belong to: a checkpoint of a whole model
        # carries the description of each filter, as bytes, beside them
        return torch.tensor(list(json.dumps(self.describe()).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        saved, mine = read_description(state), self.describe()
        if not self.heads_are_sharded and any(
            saved.get(key) != mine[key] for key in ("kind", "arguments")
        ):
            raise ValueError(
                f"the checkpoint has a filter {saved.get('kind')} {saved.get('arguments')}, this "
                f"one is {mine['kind']} {mine['arguments']}; plug the model as it was plugged"
            )
        self.dropout_after = check_dropout_place(saved.get("dropout_after", "attention"))

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # module.half(), .to(), .to_empty() … go through here: constants keep full precision on
        # whatever device they land (float64 only where the model is)
        super()._apply(fn, recurse)
        dtype = torch.float64 if self.base.dtype == torch.float64 else torch.float32
        self._place_constants(self.base.device, dtype)
        return self

    def _place_constants(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "meta":
            self.base = self._exact_base.to(device, dtype)
            self.basis = self._exact_basis.to(device, dtype)

    def reset_parameters(self) -> None:
        """Back to where the filter started; what deferred initialisation calls."""
        if self.theta is not None:
            with torch.no_grad():
                self.theta.copy_(self._start)

    def extra_repr(self) -> str:
        arguments = [str(self.num_heads)]
        arguments += [f"{k}={v!r}" for k, v in self.config().items() if k != "num_heads"]
        return ", ".join(arguments) + f"; degree {self.degree}"


class Polynomial(GraphFilter):
    r"""Any polynomial, every coefficient learned: :math:`H = \sum_{k=0}^{m} c_k A^k`.

    Starts as ordinary attention, :math:`c = (0, 1, 0, …)`. Degree 1 is :math:`c_0 I + c_1 A`,
    which costs no second pass.
    """

    def __init__(self, num_heads: int, degree: int = 2, lr_multiplier: float = 1.0) -> None:
        check_positive_int("num_heads", num_heads)
        check_order("degree", degree, least=0)
        # a constant has no A to start from: it starts as the identity
        base = monomial(min(1, degree), degree)
        basis = torch.eye(degree + 1, dtype=torch.float64, device="cpu")
        super().__init__(num_heads, base, basis, lr_multiplier=lr_multiplier)

    @torch.no_grad()
    def set_coefficients(self, coefficients: Tensor) -> None:
        """Take these coefficients, ``(heads, degree+1)`` or ``(degree+1,)``."""
        assert self.theta is not None
        shape = (self.num_heads, self.degree + 1)
        if coefficients.shape not in (shape, shape[1:]):
            raise ValueError(
                f"expected coefficients of shape {shape} or {shape[1:]}, "
                f"got {tuple(coefficients.shape)}"
            )
        wanted = coefficients.detach().double().cpu().expand(shape)
        self.theta.copy_((wanted - self._exact_base) / self.lr_multiplier)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "degree": self.degree,
            "lr_multiplier": self.lr_multiplier,
        }


def polynomial(*coefficients: float) -> Tensor:
    # constants are worked out on the host, whatever torch's default device
    return torch.tensor(coefficients, dtype=torch.float64, device="cpu")


def read_description(state: Tensor) -> dict[str, Any]:
    """A filter's description from the bytes that a checkpoint keeps."""
    try:
        description = json.loads(bytes(state.tolist()))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the description of a filter is damaged: {error}") from error
    if not isinstance(description, dict):
        raise ValueError(f"the description of a filter is damaged: {description!r:.80}")
    return description


def _is_diagonal(basis: Tensor) -> bool:
    learned, powers = basis.shape
    return learned == powers and bool((basis == basis.diagonal().diag()).all())


def monomial(k: int, degree: int) -> Tensor:
    return torch.eye(degree + 1, dtype=torch.float64, device="cpu")[k]


def check_positive_int(name: str, value: Any) -> None:
    _check_integer(name, value, least=1, most=_MOST_HEADS)


def check_order(name: str, value: Any, least: int, otherwise: str = "") -> None:
    _check_integer(name, value, least, _MOST_POWERS, otherwise)


def _check_integer(name: str, value: Any, least: int, most: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name} must be an integer of at least {least}{otherwise}, got {value!r:.40}"
        )
    if value > most:
        raise ValueError(
            f"{name} must be an integer of at most {most}{otherwise}, got {value!r:.40}"
        )


def check_multiplier(value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
        raise ValueError(f"lr_multiplier must be a positive number, got {value!r:.40}")
