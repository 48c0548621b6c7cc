"""Operators: the attention map of one layer, known by what it does to tokens."""

from gfsa.operators.attention import AttentionOperator
from gfsa.operators.base import FunctionOperator, Operator, combine
from gfsa.operators.dense import DenseOperator
from gfsa.operators.linear import LinearOperator
from gfsa.operators.sdpa import SDPAOperator

__all__ = [
    "AttentionOperator",
    "DenseOperator",
    "FunctionOperator",
    "LinearOperator",
    "Operator",
    "SDPAOperator",
    "combine",
]
