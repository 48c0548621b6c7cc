"""The lens: measure whether a model over-smooths, where, and what its filters change."""

from gfsa.lens.diagnosis import diagnose
from gfsa.lens.report import LensReport

__all__ = ["LensReport", "diagnose"]
