"""Operators: the attention map of one layer, known by what it does to tokens."""

from gfsa.operators.attention import AttentionOperator
from gfsa.operators.base import Coefficients, FunctionOperator, Operator, combine
from gfsa.operators.call import AttentionCall
from gfsa.operators.dense import DenseOperator
from gfsa.operators.linear import LinearOperator
from gfsa.operators.sdpa import SDPAOperator
from gfsa.operators.visibility import Visibility

__all__ = [
    "AttentionCall",
    "AttentionOperator",
    "Coefficients",
    "DenseOperator",
    "FunctionOperator",
    "LinearOperator",
    "Operator",
    "SDPAOperator",
    "Visibility",
    "combine",
]
