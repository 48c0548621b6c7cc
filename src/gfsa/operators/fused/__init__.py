"""Filters of degree one and two in own GPU kernels; importing this imports no Triton."""

from gfsa.operators.fused.eligibility import why_not, why_not_worth_it

__all__ = ["why_not", "why_not_worth_it"]
