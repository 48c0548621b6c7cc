"""Filters: a few learnable numbers per head that become the coefficients of a polynomial."""

from gfsa.filters.base import GraphFilter, PartialPolynomial, Polynomial
from gfsa.filters.fixed import Exclusive, Laplacian, PageRank, Twicing
from gfsa.filters.gfsa import GFSA

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
