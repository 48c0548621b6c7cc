"""Readings: the numbers of the lens as plain data, to JSON and back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

Numbers = list[float]


@dataclass
class FeatureReading:
    """The tokens that leave one block (depth 0: that enter the first)."""

    depth: int
    name: str
    cosine: float
    effective_rank: float
    most_rank: float
    """The largest effective rank that this many tokens and features allow."""
    residual: float
    norm: float
    singular_values: Numbers = field(default_factory=list)
    """``s(u)`` on evenly spaced u in [0, 1], see :func:`gfsa.lens.measure.singular_profile`."""


@dataclass
class Spectrum:
    """The frequency response of one attention layer, per head."""

    frequencies: Numbers
    """Cycles per token, 0 to ½."""
    map_response: list[Numbers]
    """``r_A(f)``, heads × frequencies."""
    filter_response: list[Numbers]
    """``r_H(f)``, heads × frequencies."""
    map_values: list[Numbers]
    """Singular values of A, heads × points of a common axis; empty where A was too large."""
    filter_values: list[Numbers]
    """Singular values of H."""
    note: str = ""
    """Why something is missing."""


@dataclass
class AttentionReading:
    """The measurements of one attention layer, per head."""

    depth: int
    name: str
    filter: str | None
    """The filter as it prints, or None for ordinary attention."""
    coefficients: list[Numbers]
    """heads × (degree+1)."""
    verdict: list[str]
    entropy: Numbers
    """Nats, per head; NaN where it was not measured."""
    entropy_share: Numbers
    energy_before: Numbers
    """Dirichlet energy of the values v."""
    energy_after: Numbers
    """Dirichlet energy of the filter's output y."""
    spectrum: Spectrum | None = None


@dataclass
class ModelReading:
    """All measurements of one model."""

    name: str
    kind: str
    parameters: int
    filter_parameters: int
    samples: int
    tokens: int
    spectral_samples: int
    seconds: dict[str, float]
    """Seconds: ``total``, and its parts ``features``, ``attention``, ``spectral``."""
    features: list[FeatureReading] = field(default_factory=list)
    attention: list[AttentionReading] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Attention modules that were not measured, with the reason."""


def to_plain(value: Any) -> Any:
    """Dataclasses to JSON's types; floats to six digits, NaN and infinity to None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    if hasattr(value, "__dataclass_fields__"):
        return to_plain(asdict(value))
    return value


def model_from_plain(plain: dict[str, Any]) -> ModelReading:
    """The inverse of :func:`to_plain` on a :class:`ModelReading`."""
    known = with_nan(plain)
    features = [FeatureReading(**part) for part in known.pop("features")]
    attention = []
    for part in known.pop("attention"):
        spectrum = part.pop("spectrum")
        attention.append(
            AttentionReading(**part, spectrum=Spectrum(**spectrum) if spectrum else None)
        )
    return ModelReading(**known, features=features, attention=attention)


# fields where None is a value; in all others it stands for NaN
_OPTIONAL = ("filter", "spectrum")


def with_nan(value: Any, key: str = "") -> Any:
    """JSON's types with NaN where :func:`to_plain` wrote None."""
    if value is None and key not in _OPTIONAL:
        return math.nan
    if isinstance(value, dict):
        return {name: with_nan(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [with_nan(part) for part in value]
    return value
