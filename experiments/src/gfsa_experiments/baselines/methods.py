"""The comparison methods: their formulas, the state they keep during a forward, their options.

AttnScale and NeuTRENO act on the attention map and are plugged like filters; ContraNorm, FeatScale
and LayerScale change tokens inside a block.
"""

from __future__ import annotations

import difflib
import inspect
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter, Polynomial
from gfsa.filters.spec import check_number
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.operators.operator import at_least_float32, repeat_heads
from gfsa.operators.visibility import Visibility

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from gfsa_experiments.baselines.blocks import Reader


class _Now(threading.local):
    """What a thread knows of the forward that it runs."""

    running, tokens, visits = False, 0, 0
    visible: Visibility | None = None

    def __reduce__(self) -> Any:
        # a copy begins anew
        return _Now, ()


@dataclass(eq=False)
class Scope:
    """The state of one block while it runs; its methods ``before`` and ``after`` are hooks.

    A copied model has its own scopes, and so has each thread.
    """

    name: str
    reader: Reader | None
    """Reads the tokens, and which of them see each other, from the block's arguments."""
    places: int = 0
    """Where a method acts in the block: fewer visits are an error."""
    now: _Now = field(default_factory=_Now)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        now = self.now
        if self.reader is not None:
            tokens, now.visible = self.reader(args, kwargs)
            now.tokens = tokens.numel() // tokens.shape[-1]
        now.running, now.visits = True, 0

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget the forward; raises if the method was not called at all its places."""
        now = self.now
        missed = now.running and now.visits < self.places
        now.running, now.visible = False, None
        if missed:
            raise RuntimeError(
                f"{self.name} ran, but the method applied to it was called at {now.visits} of "
                f"{self.places} places: the block took a code path that bypasses it. "
                "gfsa.baselines.remove(model), or leave it out with apply(..., layers=...)"
            )

    def visible(self, x: Tensor | None = None) -> Visibility:
        """Which tokens each token of the block sees; ``x`` has to be all of them."""
        if not self.now.running:
            raise RuntimeError(
                f"a part of {self.name} ran outside of the block's forward, so its masks are not "
                "known (a checkpoint that recomputes it alone?): checkpoint whole blocks"
            )
        # a part of them has another mean
        found = self.now.tokens if x is None else x.numel() // x.shape[-1]
        if found != self.now.tokens:
            raise RuntimeError(
                f"{self.name} was called with {self.now.tokens} tokens, but processes {found} at "
                "a time (chunk_size_feed_forward?); the method needs all of them together"
            )
        assert self.now.visible is not None
        return self.now.visible


def mean_of_visible(visible: Visibility, x: Tensor, queries: int) -> Tensor:
    r""":math:`m_i = \frac{1}{|S_i|} \sum_{j \in S_i} x_j`, where query i sees the keys S_i.

    ``x`` is ``(B, H, N, D)``; queries are the newest tokens if there are fewer than N. The result,
    ``(B, H, queries or 1, D)``, is in float32 at least; zeros for a query that sees no key.
    """
    dtype = at_least_float32(x.dtype)
    described = visible.window is not None or visible.documents is not None
    if visible.causal or described or visible.pairs is not None:
        # weights rather than a sum to divide, which could leave the range of float16
        return (mean_matrix(visible, x.shape[-2], x, queries) @ x).to(dtype)
    if visible.keys is None:
        return x.mean(-2, keepdim=True, dtype=dtype)
    keys = visible.keys[..., None]
    count = keys.sum(-2, keepdim=True).clamp(min=1)
    return x.masked_fill(~keys, 0.0).sum(-2, keepdim=True, dtype=dtype) / count


def mean_matrix(
    visible: Visibility, length: int, like: Tensor, queries: int | None = None
) -> Tensor:
    """The matrix of the mean, broadcastable to ``(B, H, queries, N)``: row i has 1/|S_i| on S_i."""
    # pairs have the rows of the queries alone
    first = 0 if queries is None or visible.pairs is not None else length - queries
    seen = visible.rows(first, length, length, like.device)
    weights = seen.to(at_least_float32(like.dtype)) / seen.sum(-1, keepdim=True).clamp(min=1)
    return weights.to(like.dtype)


class BaselineFilter(GraphFilter):
    """A method that is plugged like a filter but is not a polynomial of A."""

    is_polynomial = False

    def __init__(
        self, num_heads: int, basis: Tensor | None = None, lr_multiplier: float = 1.0
    ) -> None:
        attention = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
        super().__init__(num_heads, attention, basis, lr_multiplier=lr_multiplier)

    def coefficients(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} is not a polynomial of the attention map: it has no coefficients")

    def fold(self) -> Polynomial:
        return self.coefficients()

    def check_dropout_place(self) -> None:
        """Raise unless dropout acts on A: H is never built, so its entries cannot be dropped."""
        if self.dropout_after != "attention":
            name = type(self).__name__
            raise ValueError(f"{name} drops entries of A; plug(..., dropout_after='attention')")


class AttnScale(BaselineFilter):
    r"""AttnScale (Wang et al., 2022): scale the high-pass part of the map, head by head.

    .. math:: H = M + (1 + λ)(A - M), \qquad y = A v + λ\,(A v - M v)

    M averages the keys that a query sees: all of them, or those up to the query in a causal
    model, without padding. λ starts at 0, which is exactly ordinary attention. Attention dropout
    acts on A, not on M; the published code drops entries of H.

    Args:
        num_heads: heads of the layer, each with its own λ.
        lr_multiplier: λ is ``lr_multiplier·θ``; see :class:`gfsa.GraphFilter`.
    """

    def __init__(self, num_heads: int, lr_multiplier: float = 1.0) -> None:
        # λ multiplies a term that is no polynomial of A, so the basis of θ is zero
        zero = torch.zeros(1, 2, dtype=torch.float64, device="cpu")
        super().__init__(num_heads, zero, lr_multiplier)
        #: has the layer's masks in each forward, where its operator is a ready-made map
        self.scope: Scope | None = None

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        """``v`` of shape ``(B, H, N, D)`` to ``A·v + λ(A·v − M·v)``."""
        self.check_dropout_place()
        _, mixed = operator.powers(v, 1)
        mean = mean_of_visible(self._visibility(operator), v, mixed.shape[-2])
        return (mixed + self._lambda() * (mixed - repeat_heads(mean, mixed))).to(mixed.dtype)

    def map(self, operator: DenseOperator, v: Tensor | None = None) -> Tensor:
        matrix = operator.dense()
        mean = mean_matrix(self._visibility(operator), matrix.shape[-1], matrix)
        return matrix + self._lambda() * (matrix - mean)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "lr_multiplier": self.lr_multiplier}

    def _lambda(self) -> Tensor:
        assert self.theta is not None
        return (self.lr_multiplier * self.theta)[..., None]

    def _visibility(self, operator: Operator) -> Visibility:
        visible = operator.visibility()
        if visible is None and self.scope is not None:
            visible = self.scope.visible()
        if visible is None:
            raise TypeError(
                "attnscale averages the keys that a query sees, which a ready-made attention map "
                "does not say: load the model with attn_implementation='sdpa'"
            )
        return visible


class NeuTRENO(BaselineFilter):
    r"""NeuTRENO (Nguyen et al., 2023): attention plus a pull towards the first layer's values.

    .. math:: y = A v + α\,(v^0 - v)

    :math:`v^0` are the values of the model's first layer in the same forward; in that layer the
    term is zero. It is not ordinary attention at initialisation, and nothing is learned.

    Args:
        num_heads: heads of the layer.
        alpha: 0.6 in vision and 0.4 in language modelling, as published.
    """

    def __init__(self, num_heads: int, alpha: float = 0.6) -> None:
        super().__init__(num_heads)
        self.alpha = check_number("alpha", alpha, least=0.0)

    def add_depth(self) -> Self:
        self.has_depth = True
        return self

    def depth(self) -> Tensor | None:
        return self.base.new_full((len(self.base),), self.alpha) if self.has_depth else None

    def mix_values(self, v: Tensor) -> Tensor:
        # the map acts on the layer's own values; those of the first layer become v⁰
        if not self.has_depth and self.first_values is not None:
            self.first_values.keep(v)
        return v

    def forward(self, operator: Operator, v: Tensor) -> Tensor:
        """``v`` of shape ``(B, H, N, D)`` to ``A·v + α(v⁰ − v)``."""
        self.check_dropout_place()
        if self.first_values is None:
            raise RuntimeError(
                "NeuTRENO needs the first layer's values: gfsa.baselines.apply(model, 'neutreno') "
                "connects the layers"
            )
        if not operator.values_are_mixed:
            v = self.mix_values(v)
        own, mixed = operator.powers(v, 1)
        alpha = self.depth()
        if alpha is None:
            return mixed
        pulled = self.first_values.add(own, alpha, self.place)
        wide = at_least_float32(mixed.dtype)
        pull = pulled.to(wide) - (1 + self.alpha) * own.to(wide)
        return (mixed + repeat_heads(pull, mixed)).to(mixed.dtype)

    def map(self, operator: DenseOperator, v: Tensor | None = None) -> Tensor:
        # the added term contains another layer's values: it is no part of this layer's map
        return operator.dense()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha}


class ResFormer(GraphFilter):
    r"""ResFormer (Zhou et al., 2024) with its fixed half-and-half of the first layer's values.

    .. math:: y = A\,(v + v^0) / 2

    In the first layer :math:`y = A v`. It is not ordinary attention at initialisation, and nothing
    is learned. ``gfsa.plug(model, filter=ResFormer, depth=True)``.
    """

    # its values are not v: coefficients alone do not describe it
    is_polynomial = False

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"))

    def add_depth(self) -> Self:
        self.has_depth = True
        return self

    def depth(self) -> Tensor | None:
        return self.base.new_ones(len(self.base)) if self.has_depth else None

    def mix_values(self, v: Tensor) -> Tensor:
        mixed = super().mix_values(v)
        return mixed / 2 if self.has_depth else mixed


Form = Literal["bert", "vit"]


class TokenMethod(nn.Module):
    """Maps the tokens ``(B, N, D)`` at one place of a block to tokens."""

    #: whether it needs to know which tokens see each other
    needs_visibility = True

    def forward(self, x: Tensor, seen: Visibility) -> Tensor:
        raise NotImplementedError


class ContraNorm(TokenMethod):
    r"""ContraNorm (Guo et al., 2023): push tokens away from those that they resemble.

    .. math::
        \text{bert:}\quad x ← (1 + s)\,x - s\,S x \qquad
        \text{vit:}\quad  x ← x - s\,S x \qquad
        S = \mathrm{softmax}(\hat x \hat x^\top / τ)

    :math:`\hat x` has rows of length one; the softmax is over the tokens that a token sees. The
    model's own LayerNorm follows. It is not the identity, and nothing is learned.

    Args:
        scale: s; 0.005 to 0.01 published for BERT.
        form: ``"bert"`` or ``"vit"``.
        temperature: τ.
    """

    def __init__(self, scale: float = 0.01, form: Form = "bert", temperature: float = 1.0) -> None:
        super().__init__()
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {get_args(Form)}, got {form!r}")
        self.scale = check_number("scale", scale, least=0.0)
        self.form = form
        self.temperature = check_number("temperature", temperature, above=0.0)

    def forward(self, x: Tensor, seen: Visibility) -> Tensor:
        wide = at_least_float32(x.dtype)
        # a row of zeros stays one
        direction = x / x.norm(dim=-1, keepdim=True, dtype=wide).clamp(min=1e-12)
        direction = direction.to(x.dtype)[:, None]
        # by torch's attention kernels: no n×n matrix is made that the masks have not made
        alike = AttentionOperator(
            direction,
            direction,
            # pairs include keys and causality, and torch takes them as they are
            attn_mask=seen.pairs,
            visible=seen if seen.pairs is None else None,
            scale=1 / self.temperature,
            backend="sdpa",
        )
        kept = 1.0 + self.scale if self.form == "bert" else 1.0
        # summed in float32: s is about as small as the rounding of bfloat16
        return (kept * x.to(wide) - self.scale * alike.apply(x[:, None])[:, 0]).to(x.dtype)


class FeatScale(TokenMethod):
    r"""FeatScale (Wang et al., 2022): scale the mean and the rest of attention's output.

    .. math:: y ← y + λ_1 ⊙ m + λ_2 ⊙ (y - m)

    m is the mean over the tokens that a token sees: those that are not padding, in a causal model
    those up to it. λ starts at 0, which is the identity.

    Args:
        dim: width of the tokens; each channel has two learned numbers.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mean_scale = nn.Parameter(torch.zeros(dim))
        self.rest_scale = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, seen: Visibility) -> Tensor:
        mean = mean_of_visible(seen, x[:, None], x.shape[1])[:, 0]
        return (x + self.mean_scale * mean + self.rest_scale * (x - mean)).to(x.dtype)


class LayerScale(TokenMethod):
    r"""LayerScale (Touvron et al., 2021): :math:`x + γ ⊙ f(x)` in place of :math:`x + f(x)`.

    γ starts small, so that every block starts near the identity. This changes the outputs: a
    pretrained model loses what its blocks do until γ has grown.

    Args:
        dim: width of the tokens.
        init: where γ starts; 1e-5 for deep models, as published.
    """

    needs_visibility = False

    def __init__(self, dim: int, init: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), check_number("init", init)))

    def forward(self, x: Tensor, seen: Visibility | None = None) -> Tensor:
        return (self.gamma * x).to(x.dtype)


@dataclass(frozen=True)
class Method:
    """A method that :func:`gfsa.baselines.apply` can apply to a model."""

    kind: type[nn.Module]
    """The module that computes it."""
    formula: str
    options: dict[str, Any]
    """The names and defaults of its options in :func:`gfsa.baselines.apply`."""
    identity_at_init: bool
    """Whether a model's outputs are unchanged when the method is applied."""


def _method(kind: type[nn.Module], formula: str, identity: bool = False) -> Method:
    # the sizes come from the model and have no default
    parameters = inspect.signature(kind).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty}
    return Method(kind, formula, options, identity)


METHODS: dict[str, Method] = {
    "attnscale": _method(AttnScale, "A·v + λ(A·v − M·v)", identity=True),
    "contranorm": _method(ContraNorm, "bert: (1+s)x − s·S·x; vit: x − s·S·x; S = softmax(x̂x̂ᵀ/τ)"),
    "featscale": _method(FeatScale, "y + λ1⊙mean(y) + λ2⊙(y − mean(y))", identity=True),
    "layerscale": _method(LayerScale, "γ⊙f(x)"),
    "neutreno": _method(NeuTRENO, "A·v + α(v⁰ − v)"),
}


def method_named(name: str, options: dict[str, Any]) -> Method:
    """The method called ``name``; raises if it or one of its options does not exist."""
    if name not in METHODS:
        similar = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
        hint = f"Did you mean {similar[0]!r}?" if similar else "gfsa.plug(model, …) takes filters"
        names = ", ".join(METHODS)
        raise ValueError(f"there is no method {name!r}; the methods are {names}. {hint}")
    method = METHODS[name]
    unknown = [option for option in options if option not in method.options]
    if unknown:
        has = ", ".join(f"{key}={value!r}" for key, value in method.options.items()) or "none"
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it has {has}")
    return method
