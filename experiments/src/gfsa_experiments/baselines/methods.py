"""The comparison methods: their formulas, the state they keep during a forward, their options.

AttnScale and NeuTRENO act on the attention map and are plugged like filters; ContraNorm, FeatScale
and LayerScale change tokens inside a block.
"""

from __future__ import annotations

import difflib
import inspect
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter, Polynomial
from gfsa.filters.spec import check_number
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.operators.base import at_least_float32, repeat_heads
from gfsa.operators.visibility import Visibility
from gfsa_experiments.baselines.visibility import mean_matrix, mean_of_visible

if TYPE_CHECKING:
    from typing_extensions import Self


class Scope:
    """The state of one block while it runs: opened before its forward, closed after it.

    A copied model has its own scopes, and so has each thread.

    Args:
        name: the block's name in errors.
        places: at how many places of the block a method acts: fewer visits are an error.
    """

    def __init__(self, name: str, places: int = 0) -> None:
        self.name = name
        self.places = places
        self._now = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Scope, (self.name, self.places)

    def open(self, visible: Visibility | None, tokens: int) -> None:
        self._now.open = True
        self._now.visible = visible
        self._now.tokens = tokens
        self._now.visits = 0

    def close(self) -> None:
        """End the forward; raises if the method was not called at all its places."""
        now = self._now
        if getattr(now, "open", False) and now.visits < self.places:
            self._forget()
            raise RuntimeError(
                f"{self.name} ran, but the method applied to it was called at {now.visits} of "
                f"{self.places} places: the block took a code path that bypasses it. "
                "gfsa.baselines.remove(model), or leave it out with apply(..., layers=...)"
            )
        self._forget()

    def _forget(self) -> None:
        self._now.open = False
        self._now.visible = None

    @property
    def visible(self) -> Visibility:
        """Which tokens each token of the block sees."""
        if not getattr(self._now, "open", False):
            raise RuntimeError(
                f"a part of {self.name} ran outside of the block's forward, so its masks are not "
                "known (a checkpoint that recomputes it alone?): checkpoint whole blocks"
            )
        seen = self._now.visible
        assert isinstance(seen, Visibility)
        return seen

    def visit(self) -> None:
        self._now.visits = getattr(self._now, "visits", 0) + 1

    def check_tokens(self, x: Tensor) -> None:
        """Raise unless ``x`` has all of the block's tokens: a part of them has another mean."""
        found = x.numel() // x.shape[-1]
        if found != self._now.tokens:
            raise RuntimeError(
                f"{self.name} was called with {self._now.tokens} tokens, but processes {found} at "
                "a time (chunk_size_feed_forward?); the method needs all of them together"
            )


class BaselineFilter(GraphFilter):
    """A method that is plugged like a filter but is not a polynomial of A."""

    is_polynomial = False

    def __init__(
        self, num_heads: int, basis: Tensor | None = None, lr_multiplier: float = 1.0
    ) -> None:
        attention = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")
        super().__init__(num_heads, attention, basis, lr_multiplier=lr_multiplier)

    def coefficients(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is not a polynomial of the attention map, so it has "
            "no coefficients"
        )

    def fold(self) -> Polynomial:
        return self.coefficients()

    def check_dropout_place(self) -> None:
        """Raise unless dropout acts on A: H is never built, so its entries cannot be dropped."""
        if self.dropout_after != "attention":
            raise ValueError(
                f"{type(self).__name__} drops entries of A; plug(..., dropout_after='attention')"
            )


class AttnScale(BaselineFilter):
    r"""AttnScale (Wang et al., 2022): scale the high-pass part of the map, head by head.

    .. math:: H = M + (1 + λ)(A - M), \qquad y = A v + λ\,(A v - M v)

    M averages the keys that a query sees: all of them, or those up to the query in a causal
    model, without padding. The code averages tokens (a running mean if causal) and builds no n×n
    matrix. λ starts at 0, which is exactly ordinary attention.

    Attention dropout acts on A, not on M; the published code drops entries of H.

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
        y = mixed + self._lambda() * (mixed - repeat_heads(mean, mixed))
        return y.to(mixed.dtype)

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
            visible = self.scope.visible
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
        y = mixed + repeat_heads(pull, mixed)
        return y.to(mixed.dtype)

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
        similar = attend_alike(x[:, None], seen, self.temperature)[:, 0]
        # summed in float32: s is about as small as the rounding of bfloat16
        own = x.to(at_least_float32(x.dtype))
        kept = 1.0 + self.scale if self.form == "bert" else 1.0
        return (kept * own - self.scale * similar).to(x.dtype)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, form={self.form!r}, temperature={self.temperature}"


def attend_alike(x: Tensor, seen: Visibility, temperature: float) -> Tensor:
    r""":math:`\mathrm{softmax}(\hat x \hat x^\top / τ)\,x` over what each token sees.

    :math:`\hat x` has rows of length one. By torch's attention kernels: no n×n matrix is made
    that the masks have not made.

    Args:
        x: ``(B, 1, N, D)``.
    """
    # a row of zeros stays one
    direction = x / x.norm(dim=-1, keepdim=True, dtype=at_least_float32(x.dtype)).clamp(min=1e-12)
    direction = direction.to(x.dtype)
    return AttentionOperator(
        direction,
        direction,
        # pairs include keys and causality, and torch takes them as they are
        attn_mask=seen.pairs,
        visible=seen if seen.pairs is None else None,
        scale=1 / temperature,
        backend="sdpa",
    ).apply(x)


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


def _method(kind: type[nn.Module], formula: str, identity: bool, *options: str) -> Method:
    parameters = inspect.signature(kind).parameters
    return Method(kind, formula, {name: parameters[name].default for name in options}, identity)


METHODS: dict[str, Method] = {
    "attnscale": _method(AttnScale, "A·v + λ(A·v − M·v)", True, "lr_multiplier"),
    "contranorm": _method(
        ContraNorm,
        "bert: (1+s)x − s·S·x; vit: x − s·S·x; S = softmax(x̂x̂ᵀ/τ)",
        False,
        "scale",
        "form",
        "temperature",
    ),
    "featscale": _method(FeatScale, "y + λ1⊙mean(y) + λ2⊙(y − mean(y))", True),
    "layerscale": _method(LayerScale, "γ⊙f(x)", False, "init"),
    "neutreno": _method(NeuTRENO, "A·v + α(v⁰ − v)", False, "alpha"),
}

# methods that are filters, and how to plug each
_FILTERS = {
    "gfsa": "gfsa.plug(model)",
    "twicing": "gfsa.plug(model, filter=gfsa.Twicing)",
    "laplacian": "gfsa.plug(model, filter=gfsa.Laplacian)",
    "pagerank": "gfsa.plug(model, filter=gfsa.PageRank)",
    "polynomial": "gfsa.plug(model, filter=gfsa.Polynomial)",
}


def method_named(name: str, options: dict[str, Any]) -> Method:
    """The method called ``name``; raises if it or one of its options does not exist."""
    if name in _FILTERS:
        raise ValueError(f"{name!r} is a filter of the attention map: {_FILTERS[name]}")
    if name not in METHODS:
        similar = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
        raise ValueError(
            f"there is no method {name!r}; the methods are {', '.join(METHODS)}"
            + (f". Did you mean {similar[0]!r}?" if similar else "")
        )
    method = METHODS[name]
    unknown = [option for option in options if option not in method.options]
    if unknown:
        has = ", ".join(f"{key}={value!r}" for key, value in method.options.items())
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}; "
            + (f"it has {has}" if has else "it has none")
        )
    return method
