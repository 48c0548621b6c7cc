"""Check that masks were read as the layer uses them: no query averages keys that it does not see.

Classes of one library give their masks different meanings (True may show or hide), or hide pairs by
code of their own. What was read from a layer's arguments is therefore compared with the attention
map, or with the masks of the operator, in the first forward of each kind of mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gfsa.operators import Operator
from gfsa.operators.visibility import Visibility
from gfsa.plugs.cross_attention import has_no_values

# what a softmax leaves of a hidden key: Swin adds -100, others the smallest number
_HIDDEN = 1e-12

Kind = tuple[bool, ...]


def kind_of(sight: Visibility) -> Kind:
    """What a layer was given: padding, pairs, causality, a window, documents."""
    given = (sight.keys, sight.pairs, sight.window, sight.documents)
    return (sight.causal, *(part is not None for part in given))


def refusal_of_sight(
    sight: Visibility, operator: Operator, v: Tensor, training: bool
) -> tuple[str | None, bool]:
    """How ``sight`` differs from what the operator does, or None; and whether that was decisive.

    Args:
        sight: which keys each query sees, as read from the layer's arguments.
        operator: the layer's attention map.
        v: its values, ``(B, H, N, D)``.
        training: whether entries of the map may have been dropped.
    """
    length = v.shape[-2]
    if v.is_meta or has_no_values(v) or length < 2:
        return None, False
    with torch.no_grad():
        visible = sight.rows(0, length, length, v.device)
        used = operator.visibility()
        if used is not None:
            seen = used.rows(0, length, length, v.device)
            if bool((visible & ~seen).any()):
                return "a query would average keys that its attention hides", True
            return None, True
        try:
            matrix = operator.dense().abs()
        except TypeError:
            return None, False
        if matrix.shape[-1] != matrix.shape[-2]:
            # the rows of the newest tokens, with a cache
            return None, False
        visible = visible.expand(*visible.shape[:-2], length, length)
        # a query that sees nothing may have any row
        hidden = ~visible & visible.any(-1, keepdim=True)
        if bool(((matrix > _HIDDEN) & hidden).any()):
            return "a query attends to keys that its average would leave out", True
        if training or matrix.dtype not in (torch.float32, torch.float64):
            # an entry may be zero because it was dropped, or too small for its dtype
            return None, False
        unused = (matrix == 0).all(-3, keepdim=True)
        if bool((visible & unused).any()):
            return "a query would average keys that its attention hides", True
    return None, True
