"""The measurements of one layer, averaged over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.lens import measure
from gfsa.lens.readings import AttentionReading, FeatureReading, OwnValue, Spectrum
from gfsa.operators import Operator
from gfsa.operators.base import own_share, repeat_heads

# points of the axis on which singular values of several lengths are averaged
POINTS = 64


@dataclass
class LensOptions:
    """What to measure."""

    features: bool = True
    attention: bool = True
    spectral: bool = True
    spectral_samples: int = 8
    """Spectra are averaged over this many samples: they vary little, and are costly."""
    most_frequencies: int = 33
    most_tokens: int = 1024
    """For longer sequences no n×n map is built, so there are no singular values."""


class Mean:
    """A running mean over samples that ignores NaN, element by element."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.count = torch.zeros(())

    def add(self, values: Tensor) -> None:
        """``values``: ``(samples, ...)``."""
        values = values.detach().double().cpu()
        known = ~values.isnan()
        self.total = self.total + torch.where(known, values, 0.0).sum(0)
        self.count = self.count + known.sum(0)

    def value(self) -> Any:
        """A float, or nested lists of them."""
        return torch.where(self.count > 0, self.total / self.count, math.nan).tolist()


class LayerRecord:
    """The measurements of one layer so far."""

    def __init__(self, depth: int, options: LensOptions) -> None:
        self.depth = depth
        self.options = options
        self.features: dict[str, Mean] = {}
        self.heads: dict[str, Mean] = {}
        self.frequencies: Tensor | None = None
        self.spectral_samples = 0

    def add_features(self, x: Tensor, valid: Tensor | None) -> None:
        """Measure tokens ``(B, N, D)`` with their mask ``(B, N)``."""
        most = measure.token_count(x, valid).clamp(max=x.shape[-1])
        values = measure.singular_values(x, valid)
        found = {
            "cosine": measure.cosine_similarity(x, valid),
            "effective_rank": measure.effective_rank(values),
            "most_rank": most,
            "residual": measure.rank_one_residual(x, valid),
            "norm": measure.token_norm(x, valid),
            "singular_values": _profile(self.features, "singular_values", values, most),
        }
        for name, value in found.items():
            self.features.setdefault(name, Mean()).add(value)

    def add_attention(
        self, filter: GraphFilter, operator: Operator, v: Tensor, y: Tensor, valid: Tensor | None
    ) -> None:
        """Measure a map, the values ``(..., H, N, D)`` and the filter's output.

        ``valid``: ``(..., N)`` or None.
        """
        options, found = self.options, dict[str, Tensor]()
        is_short = v.shape[-2] <= options.most_tokens
        of_heads = None if valid is None else valid[..., None, :]
        if options.attention:
            smoothed = operator.apply(v)
            spread = repeat_heads(v, smoothed)
            found |= {
                "energy_before": measure.dirichlet_energy(spread, smoothed, of_heads),
                "energy_after": measure.dirichlet_energy(y, operator.apply(y), of_heads),
            }
            # a map that is known only by its products takes n/D products to build
            if is_short or measure.has_rows(operator):
                entropy, share = measure.attention_entropy(operator, v, valid)
                found |= {"entropy": entropy, "entropy_share": share}
            if filter.share() is not None:
                own = {
                    "own_part": own_share(v.new_ones(()), smoothed, spread).squeeze(-1),
                    "own_cosine": nn.functional.cosine_similarity(
                        y.double(), spread.double(), dim=-1
                    ),
                }
                if is_short:
                    matrix = measure.dense_map(operator, v)
                    own["own_weight"] = matrix.diagonal(dim1=-2, dim2=-1)
                for name, value in own.items():
                    hidden = value if of_heads is None else value.masked_fill(~of_heads, math.nan)
                    found[name] = hidden.nanmean(-1)
        if options.spectral and self.spectral_samples < options.spectral_samples:
            self.spectral_samples += v.shape[:-3].numel()
            found |= self._responses(filter, operator, v, valid)
            if is_short:
                matrix = measure.dense_map(operator, v).double()
                most = measure.token_count(matrix, of_heads)
                values = measure.map_singular_values(matrix, valid)
                profile = _profile(self.heads, "map_values", values, most)
                found["map_values"] = profile * values[..., :1]
        for name, value in found.items():
            lead = v.dim() - 3
            self.heads.setdefault(name, Mean()).add(
                value.flatten(0, lead - 1) if lead else value[None]
            )

    def _responses(
        self, filter: GraphFilter, operator: Operator, v: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        share, own = filter.share(), None
        if share is not None:
            share = share.detach()
            own = own_share(share, operator.apply(v), repeat_heads(v, share[:, None, None]))
        if self.frequencies is None:
            most = self.options.most_frequencies
            self.frequencies = measure.frequency_grid(v.shape[-2], most)
        on_map, on_filter = measure.frequency_response(
            operator, v, filter.coefficients().detach(), valid, self.frequencies, own
        )
        return {"map_response": on_map, "filter_response": on_filter}

    def feature_reading(self, name: str) -> FeatureReading:
        values = {what: mean.value() for what, mean in self.features.items()}
        return FeatureReading(depth=self.depth, name=name, **values)

    def attention_reading(self, name: str, filter: GraphFilter, bare: bool) -> AttentionReading:
        """The reading; ``bare``: the layer has no filter besides the one the lens plugged."""
        coefficients = filter.coefficients().detach().double().cpu()
        missing = [math.nan] * filter.num_heads
        means = {what: mean.value() for what, mean in self.heads.items()}
        scalars = ("entropy", "entropy_share", "energy_before", "energy_after")
        spectrum = own = None
        if self.frequencies is not None:
            spectrum = Spectrum(
                frequencies=self.frequencies.tolist(),
                map_response=means["map_response"],
                filter_response=means["filter_response"],
                map_values=means.get("map_values", []),
            )
        if "own_part" in means:
            weight = means.get("own_weight", missing)
            own = OwnValue(means["own_part"], weight, means["own_cosine"])
        return AttentionReading(
            depth=self.depth,
            name=name,
            filter=None if bare else repr(filter),
            coefficients=coefficients.tolist(),
            verdict=measure.verdicts(coefficients),
            spectrum=spectrum,
            own=own,
            **{what: means.get(what, missing) for what in scalars},
        )


def _profile(means: dict[str, Mean], name: str, values: Tensor, most: Tensor) -> Tensor:
    """Singular values on the axis of the first batch: later ones may be longer or shorter."""
    points = means[name].total.shape[-1] if name in means else min(values.shape[-1], POINTS)
    return measure.singular_profile(values, most, points)
