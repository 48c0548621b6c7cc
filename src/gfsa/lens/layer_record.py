"""Running means of one layer's measurements over samples, and the readings computed from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gfsa.filters import GraphFilter
from gfsa.lens import metrics, spectrum
from gfsa.lens.entropy import attention_entropy, has_rows
from gfsa.lens.readings import AttentionReading, FeatureReading, Spectrum
from gfsa.operators import DenseOperator, Operator
from gfsa.operators.base import repeat_heads

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


class Stopwatch:
    """Seconds spent on each kind of measurement."""

    def __init__(self) -> None:
        self.seconds = {"features": 0.0, "attention": 0.0, "spectral": 0.0}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start


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

    def __init__(self, depth: int, options: LensOptions, watch: Stopwatch) -> None:
        self.depth = depth
        self.options = options
        self.watch = watch
        self.features: dict[str, Mean] = {}
        self.heads: dict[str, Mean] = {}
        self.frequencies: Tensor | None = None
        self.spectral_samples = 0
        self.note = ""

    def add_features(self, x: Tensor, valid: Tensor | None) -> None:
        """Measure tokens ``(B, N, D)`` with their mask ``(B, N)``."""
        with self.watch.on("features"):
            most = metrics.token_count(x, valid).clamp(max=x.shape[-1])
            values = metrics.singular_values(x, valid)
            # later batches may be longer or shorter: the axis of the first batch is kept
            points = self._axis(self.features, "singular_values", values.shape[-1])
            found = {
                "cosine": metrics.cosine_similarity(x, valid),
                "effective_rank": metrics.effective_rank(values),
                "most_rank": most,
                "residual": metrics.rank_one_residual(x, valid),
                "norm": metrics.token_norm(x, valid),
                "singular_values": metrics.singular_profile(values, most, points),
            }
            for name, value in found.items():
                self.features.setdefault(name, Mean()).add(value)

    def add_attention(
        self,
        filter: GraphFilter,
        operator: Operator,
        v: Tensor,
        y: Tensor,
        valid: Tensor | None,
    ) -> None:
        """Measure a map, the values ``(..., H, N, D)`` and the filter's output.

        ``valid``: ``(..., N)`` or None.
        """
        lead = v.shape[:-3]
        if valid is not None:
            # the mask does not apply to windows and other rearrangements of the tokens
            fits = valid.shape == (*lead, v.shape[-2])
            valid = valid.to(v.device) if fits else None
        found: dict[str, Tensor] = {}
        if self.options.attention:
            with self.watch.on("attention"):
                found |= _energies(operator, v, y, valid)
                # a map that is known only by its products takes n/D products to build
                if has_rows(operator) or v.shape[-2] <= self.options.most_tokens:
                    entropy, share = attention_entropy(operator, v, valid)
                    found |= {"entropy": entropy, "entropy_share": share}
        if self.options.spectral and self.spectral_samples < self.options.spectral_samples:
            with self.watch.on("spectral"):
                found |= self._spectra(filter, operator, v, valid)
        for name, value in found.items():
            heads = self.heads.setdefault(name, Mean())
            heads.add(value.flatten(0, len(lead) - 1) if lead else value[None])

    def feature_reading(self, name: str) -> FeatureReading:
        values = {what: mean.value() for what, mean in self.features.items()}
        return FeatureReading(depth=self.depth, name=name, **values)

    def attention_reading(self, name: str, filter: GraphFilter, bare: bool) -> AttentionReading:
        """The reading; ``bare``: the layer has no filter besides the one the lens plugged."""
        coefficients = filter.coefficients().detach().double().cpu()
        missing = [math.nan] * filter.num_heads
        means = {what: mean.value() for what, mean in self.heads.items()}
        scalars = ("entropy", "entropy_share", "energy_before", "energy_after")
        return AttentionReading(
            depth=self.depth,
            name=name,
            filter=None if bare else repr(filter),
            coefficients=coefficients.tolist(),
            verdict=[spectrum.verdict(row) for row in coefficients],
            spectrum=self._spectrum_reading(means),
            **{what: means.get(what, missing) for what in scalars},
        )

    def _spectrum_reading(self, means: dict[str, Any]) -> Spectrum | None:
        if self.frequencies is None:
            return None
        return Spectrum(
            frequencies=self.frequencies.tolist(),
            map_response=means["map_response"],
            filter_response=means["filter_response"],
            map_values=means.get("map_values", []),
            filter_values=means.get("filter_values", []),
            note=self.note,
        )

    def _spectra(
        self, filter: GraphFilter, operator: Operator, v: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        length = v.shape[-2]
        coefficients = filter.coefficients().detach()
        if self.frequencies is None:
            self.frequencies = spectrum.frequency_grid(length, self.options.most_frequencies)
        self.spectral_samples += v.shape[:-3].numel()
        on_map, on_filter = spectrum.frequency_response(
            operator, v, coefficients, valid, self.frequencies
        )
        found = {"map_response": on_map, "filter_response": on_filter}
        if length > self.options.most_tokens:
            self.note = (
                f"no singular values: maps of more than {self.options.most_tokens} tokens are not "
                f"built, and these have {length} (most_tokens=)"
            )
            return found
        matrix = spectrum.dense_map(operator, v).double()
        most = metrics.token_count(matrix, None if valid is None else valid[..., None, :])
        points = self._axis(self.heads, "map_values", length)
        values = spectrum.map_singular_values(matrix, valid)
        found["map_values"] = metrics.singular_profile(values, most, points) * values[..., :1]
        found["filter_values"] = found["map_values"]
        if not _is_ordinary(coefficients):
            filtered = DenseOperator(matrix).filter(coefficients.double())
            values = spectrum.map_singular_values(filtered, valid)
            profile = metrics.singular_profile(values, most, points)
            found["filter_values"] = profile * values[..., :1]
        return found

    @staticmethod
    def _axis(means: dict[str, Mean], name: str, length: int) -> int:
        return means[name].total.shape[-1] if name in means else min(length, POINTS)


def _is_ordinary(coefficients: Tensor) -> bool:
    """Whether the filter is attention itself, head by head."""
    identity = torch.zeros_like(coefficients)
    identity[..., 1:2] = 1
    return torch.equal(coefficients, identity)


def _energies(operator: Operator, v: Tensor, y: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
    of_heads = None if valid is None else valid[..., None, :]
    smoothed = operator.apply(v)
    return {
        "energy_before": metrics.dirichlet_energy(repeat_heads(v, smoothed), smoothed, of_heads),
        "energy_after": metrics.dirichlet_energy(y, operator.apply(y), of_heads),
    }
