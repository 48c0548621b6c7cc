"""GFSA: the filter of the paper, a low-order polynomial with one high-order term."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gfsa.filters.base import GraphFilter, monomial
from gfsa.filters.spec import as_number, check_heads, check_multiplier, check_order, per_head

Power = Literal["extrapolated", "exact"]
NAMES = ("w0", "w1", "wK")
# ordinary attention
_UNMODIFIED = {"w0": 0.0, "w1": 1.0, "wK": 0.0}


class GFSA(GraphFilter):
    r"""Graph-filter self-attention, a low-order polynomial with one high-order term.

    .. math:: H = w_0 I + w_1 A + w_K\,(A + (K-1)(A^2 - A))

    The bracket extrapolates :math:`A^K` from its first two powers; ``power="exact"`` takes the
    true :math:`A^K` and pays for it with K passes. Folded, the filter is a quadratic with
    :math:`c_0 = w_0,\; c_1 = w_1 + (2-K) w_K,\; c_2 = (K-1) w_K`.

    With the default initial values it starts as ordinary attention, exactly.

    Args:
        num_heads: heads of the layer.
        K: order of the high-order term, at least 2; ``None`` leaves the term out:
            :math:`H = w_0 I + w_1 A` needs no second pass.
        learn: which of ``"w0"``, ``"w1"``, ``"wK"`` are learned; the others stay fixed.
            The published code learns ``("wK",)`` alone.
        w0, w1, wK: initial (or fixed) values, a number or one per head.
        power: ``"extrapolated"`` as published, or ``"exact"``.
        lr_multiplier: see :class:`GraphFilter`.

    Raises:
        ValueError: if an argument is out of its range, or ``K=None`` is given with a ``wK``.

    Examples:
        >>> gfsa.GFSA(num_heads=4, K=3).coefficients()[0].tolist()          # ordinary attention
        [0.0, 1.0, 0.0]
        >>> gfsa.GFSA(num_heads=4, K=3, wK=0.5).coefficients()[0].tolist()
        [0.0, 0.5, 1.0]
        >>> gfsa.GFSA(num_heads=4, K=None).degree                           # one pass
        1
    """

    def __init__(
        self,
        num_heads: int,
        K: int | None = 3,
        learn: Sequence[str] = NAMES,
        w0: float | Sequence[float] = 0.0,
        w1: float | Sequence[float] = 1.0,
        wK: float | Sequence[float] = 0.0,
        power: Power = "extrapolated",
        lr_multiplier: float = 1.0,
    ) -> None:
        check_heads(num_heads)
        if K is not None:
            check_order("K", K, least=2, otherwise=", or None for w0·I + w1·A alone")
        check_multiplier(lr_multiplier)
        if power not in ("extrapolated", "exact"):
            raise ValueError(f"power must be 'extrapolated' or 'exact', got {power!r:.80}")
        given = {"w0": w0, "w1": w1, "wK": wK}
        values = {name: per_head(name, value, num_heads) for name, value in given.items()}
        learn = _in_order(learn)
        if K is None:
            wrong = f"learn={learn!r}" if "wK" in learn and learn != NAMES else ""
            wrong = f"wK={wK!r:.80}" if bool(values["wK"].any()) else wrong
            if wrong:
                raise ValueError(
                    f"K=None leaves no high-order term and no wK to learn, but {wrong} was given; "
                    "leave wK out of it, or pass an integer K of at least 2"
                )
            learn = tuple(name for name in learn if name != "wK")

        # the polynomials that w0, w1 and wK multiply; a high-order term that is fixed at zero is
        # left out, and costs no pass
        order = K if "wK" in learn or bool(values["wK"].any()) else None
        degree = 1 if order is None else order if power == "exact" else 2
        terms = {"w0": monomial(0, degree), "w1": monomial(1, degree)}
        if order is not None:
            a, last = terms["w1"], monomial(degree, degree)
            terms["wK"] = last if power == "exact" else a + (order - 1) * (last - a)
        # θ is the difference to the unmodified model
        base = sum(
            (_UNMODIFIED[name] if name in learn else values[name][:, None]) * term
            for name, term in terms.items()
        )
        assert isinstance(base, Tensor)
        theta = [(values[name] - _UNMODIFIED[name]) / lr_multiplier for name in learn]
        super().__init__(
            num_heads,
            base,
            torch.stack([terms[name] for name in learn]) if learn else None,
            torch.stack(theta, dim=-1) if learn else None,
            lr_multiplier,
        )
        self.K = K
        self.power = power
        self.learn = learn
        self._values = values

    def weights(self) -> dict[str, Tensor]:
        """The current ``w0``, ``w1`` and ``wK``, each ``(heads,)``, detached."""
        current = {name: value.clone() for name, value in self._values.items()}
        for column, name in enumerate(self.learn):
            assert self.theta is not None
            theta = self.theta.detach()[:, column].double().cpu()
            current[name] = _UNMODIFIED[name] + self.lr_multiplier * theta
        return current

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "K": self.K,
            "learn": list(self.learn),
            "power": self.power,
            "lr_multiplier": self.lr_multiplier,
            # θ holds the learned values; only fixed ones are written down
            **{name: as_number(self._values[name]) for name in NAMES if name not in self.learn},
        }


def _in_order(learn: Any) -> tuple[str, ...]:
    """Names of what is learned, checked, in the order of :data:`NAMES`."""
    names = (learn,) if isinstance(learn, str) else learn
    names = tuple(names) if isinstance(names, Iterable) else (names,)
    if any(name not in NAMES for name in names) or len(set(names)) != len(names):
        raise ValueError(f"learn takes each of {NAMES} at most once, got {learn!r:.80}")
    return tuple(name for name in NAMES if name in names)
