"""Operators: they multiply tokens by the attention map A of one layer, ``apply(x) = A·x``.

Each class computes the product in another way; ``DenseOperator`` has the matrix and is the
specification of the others. ``AttentionOperator`` chooses among them, call by call.
"""

from gfsa.operators.attention import AttentionOperator
from gfsa.operators.call import AttentionCall
from gfsa.operators.dense import DenseOperator
from gfsa.operators.linear import LinearOperator
from gfsa.operators.operator import Coefficients, FunctionOperator, Operator, combine
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
