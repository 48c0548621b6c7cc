"""Filters: a few learnable numbers per head that become the coefficients of a polynomial."""

from gfsa.filters.base import GraphFilter, Polynomial
from gfsa.filters.fixed import Exclusive, Laplacian, PageRank, Twicing
from gfsa.filters.gfsa import GFSA
from gfsa.filters.partial import PartialPolynomial

__all__ = [
    "GFSA",
    "Exclusive",
    "GraphFilter",
    "Laplacian",
    "PageRank",
    "PartialPolynomial",
    "Polynomial",
    "Twicing",
]
