"""The methods that change tokens inside a block: ContraNorm, FeatScale, LayerScale."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gfsa.filters.checks import check_number
from gfsa.operators import AttentionOperator
from gfsa.operators.base import at_least_float32
from gfsa.operators.visibility import Visibility

Form = Literal["bert", "vit"]


class TokenMethod(nn.Module):
    """Maps the tokens ``(B, N, D)`` at one place of a block to tokens."""

    #: whether it needs to know which tokens see each other
    needs_sight = True

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
        mean = seen.mean(x[:, None], x.shape[1])[:, 0]
        return (x + self.mean_scale * mean + self.rest_scale * (x - mean)).to(x.dtype)


class LayerScale(TokenMethod):
    r"""LayerScale (Touvron et al., 2021): :math:`x + γ ⊙ f(x)` in place of :math:`x + f(x)`.

    γ starts small, so that every block starts near the identity. This changes the outputs: a
    pretrained model loses what its blocks do until γ has grown.

    Args:
        dim: width of the tokens.
        init: where γ starts; 1e-5 for deep models, as published.
    """

    needs_sight = False

    def __init__(self, dim: int, init: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), check_number("init", init)))

    def forward(self, x: Tensor, seen: Visibility | None = None) -> Tensor:
        return (self.gamma * x).to(x.dtype)
