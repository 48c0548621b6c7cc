"""Readings: the numbers of the lens as plain data, to JSON and back."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

Numbers = list[float]
Verdict = Literal["low-pass", "high-pass", "all-pass", "mixed"]


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


@dataclass
class OwnValue:
    """What tokens find of themselves in a layer with an exclusive term, per head."""

    part: Numbers
    """Mean p: the part of ``A·v`` along the token's own v."""
    weight: Numbers
    """Mean ``A_ii``; NaN where A was too large."""
    cosine: Numbers
    """Mean ``cos(y, v)`` of the filter's output."""


@dataclass
class AttentionReading:
    """The measurements of one attention layer, per head."""

    depth: int
    name: str
    filter: str | None
    """The filter as it prints, or None for ordinary attention."""
    coefficients: list[Numbers]
    """heads × (degree+1)."""
    verdict: list[Verdict]
    entropy: Numbers
    """Nats, per head; NaN where it was not measured."""
    entropy_share: Numbers
    energy_before: Numbers
    """Dirichlet energy of the values v."""
    energy_after: Numbers
    """Dirichlet energy of the filter's output y."""
    spectrum: Spectrum | None = None
    own: OwnValue | None = None
    terms: Numbers = field(default_factory=list)
    """How far each learned number of the exclusive and the depth term is from its start."""

    def __post_init__(self) -> None:
        heads = len(self.coefficients)
        columns: list[Sequence[Any]] = [self.verdict, self.entropy, self.entropy_share]
        columns += [self.energy_before, self.energy_after]
        if self.own is not None:
            columns += [self.own.part, self.own.weight, self.own.cosine]
        if self.spectrum is not None:
            responses = (self.spectrum.map_response, self.spectrum.filter_response)
            modes = len(self.spectrum.frequencies)
            columns += [*responses, self.spectrum.map_values or self.verdict]
            if not modes or any(len(row) != modes for rows in responses for row in rows):
                raise ValueError(f"{self.name}: expected a response at each of {modes} frequencies")
        # a head without coefficients is as wrong as none at all
        if not all([heads, *self.coefficients]) or any(len(rows) != heads for rows in columns):
            raise ValueError(f"{self.name}: expected coefficients and numbers of {heads} heads")


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
    seconds: float
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
    return to_plain(asdict(value)) if hasattr(value, "__dataclass_fields__") else value


def from_plain(kind: Any, value: Any, where: str = "report") -> Any:
    """The inverse of :func:`to_plain`: a value of the type ``kind``.

    Raises:
        ValueError: if the value has another type; the message says where.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if type(None) in inside:
        return None if value is None else from_plain(inside[0], value, where)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        unknown = ", ".join(value.keys() - hints.keys())
        if unknown:
            raise ValueError(f"{where}: unknown fields {printable(unknown)}")
        parts = {n: from_plain(hints[n], part, f"{where}.{n}") for n, part in value.items()}
        try:
            return kind(**parts)  # type: ignore[operator]
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from error
    if origin is list and isinstance(value, list):
        return [from_plain(inside[0], part, f"{where}[{at}]") for at, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {printable(n): from_plain(inside[1], v, f"{where}.{n}") for n, v in value.items()}
    if kind is str and isinstance(value, str):
        return printable(value)
    if kind is float and value is None:
        return math.nan
    # sums of larger ones overflow
    if kind is float and type(value) in (int, float) and abs(value) <= 1e100:
        return float(value)
    # and JavaScript has no larger ones
    if kind is int and type(value) is int and abs(value) <= 2**53:
        return value
    if origin is Literal and value in inside:
        return value
    expected = " or ".join(inside) if origin is Literal else getattr(kind, "__name__", kind)
    raise ValueError(f"{where}: expected {expected}, got {printable(f'{value!r:.40}')}")


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates written as escapes.

    A terminal would obey the former, and no file in UTF-8 can hold the latter.
    """
    controls = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
    return re.sub(controls, lambda found: found[0].encode("unicode_escape").decode(), text)
