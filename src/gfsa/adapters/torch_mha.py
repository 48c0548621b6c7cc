"""``nn.MultiheadAttention``, alone or inside torch's Transformer layers.

The C++ fast path of ``nn.TransformerEncoderLayer`` bypasses a filter. It is not taken while any of
its modules has a hook, so a plugged module gets a hook that does nothing. ``nn.TransformerEncoder``
may still pack a padded batch into a nested tensor; the filtered forward pads it and packs it again.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator
from gfsa.operators.call import check_kinds, is_exporting
from gfsa.plugs.adapter import NAME, Adapter, SwapClass
from gfsa.plugs.checks.proof import REASON, require_same_tokens
from gfsa.plugs.tracing.candidates import Owners, crosses_by_design


class FilteredMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with a filter in place of its attention map."""

    gfsa: GraphFilter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch; the returned weights are H, the filtered map, and cost O(n³) to build."""
        if not isinstance(query, Tensor):
            # torch.fx takes torch's own attention for a leaf, this class not
            check_kinds(query=query)
        require_same_tokens(self, query, key)
        # in this order: compiled code that has read the name would not be shared between layers
        if is_exporting() and self.__dict__.get(NAME) == "":
            _warn_of_inputs(query, key)
        if query.is_nested:
            return self._forward_nested(query, value, attn_mask, need_weights)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            # a tensor that is given twice stays one tensor, projected in one product
            q, is_query, is_key = query.transpose(0, 1), value is query, value is key
            k = q if key is query else key.transpose(0, 1)
            query, key, value = q, k, q if is_query else k if is_key else value.transpose(0, 1)

        given = (key_padding_mask, attn_mask, is_causal, need_weights)
        attn_mask, is_causal = self._mask(query, *given)
        q, k, v = (self._split(x) for x in self._project(query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        place = self.gfsa.dropout_after
        weights = None
        if need_weights:
            operator = DenseOperator(_map(q, k, attn_mask), dropout_p, place)
            v = self.gfsa.mixed(operator, v)
            y = self.gfsa(operator, v)
            weights = self.gfsa.map(operator, v).to(v.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            fast = AttentionOperator(q, k, attn_mask, dropout_p, is_causal, dropout_after=place)
            y = self.gfsa(fast, v)
        length, batch = query.shape[:2]
        # one matrix of rows, as torch passes it to its projection
        y = y.permute(2, 0, 1, 3).reshape(length * batch, self.embed_dim)
        y = F.linear(y, self.out_proj.weight, self.out_proj.bias)
        # sizes written out: torch cannot infer one of an empty tensor
        y = y.view(length, batch, self.embed_dim)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if self.batch_first else y, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        # torch's own helpers: the same products in the same order give bit-identical results
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None:
            return tuple(F._in_projection_packed(query, key, value, packed, bias))  # type: ignore[attr-defined]
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return F._in_projection(query, key, value, *weights, *biases)

    def _split(self, x: Tensor) -> Tensor:
        """``(N, B, E)`` → ``(B, H, N, D)``."""
        length, batch, _ = x.shape
        x = x.reshape(length, batch * self.num_heads, self.head_dim).transpose(0, 1)
        return x.view(batch, self.num_heads, length, self.head_dim)

    def _mask(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor | None, bool]:
        """One additive mask that broadcasts to ``(B, H, N, N)``, and whether it is causal."""
        length, batch = query.shape[:2]
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal is a hint about attn_mask, which was not given; "
                "nn.Transformer.generate_square_subsequent_mask(length) makes one"
            )
        if is_causal and key_padding_mask is None and not need_weights:
            return None, True
        padding = F._canonical_mask(
            key_padding_mask, "key_padding_mask", F._none_or_dtype(attn_mask), "attn_mask",
            query.dtype,
        )  # fmt: skip
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
        if mask is not None:
            per_head = (batch * self.num_heads, length, length)
            if mask.shape not in (per_head[1:], per_head):
                raise ValueError(
                    f"expected an attn_mask of shape {per_head[1:]}, or {per_head} with a mask "
                    f"for each head, got {tuple(mask.shape)}"
                )
            per_sample = (batch, self.num_heads, length, length)
            mask = mask[None, None] if mask.dim() == 2 else mask.view(per_sample)
        if padding is not None:
            if padding.shape != (batch, length):
                raise ValueError(
                    f"expected a key_padding_mask of shape {(batch, length)}, "
                    f"got {tuple(padding.shape)}"
                )
            padding = padding.view(batch, 1, 1, length).expand(-1, self.num_heads, -1, -1)
            mask = padding if mask is None else mask + padding
        return mask, False

    def _forward_nested(
        self, query: Tensor, value: Tensor, attn_mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Pad sequences of different lengths, attend within each of them, and pack them again."""
        if query is not value or attn_mask is not None or need_weights:
            raise ValueError(
                "nested tensors are supported for self-attention without a mask only, as in torch: "
                "mha(x, x, x, need_weights=False)"
            )
        lengths = torch.tensor([len(x) for x in query.unbind()], device=query.device)
        x = query.to_padded_tensor(0.0)
        taken = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        y, _ = self.forward(x, x, x, key_padding_mask=~taken, need_weights=False)
        if query.layout == torch.jagged:
            offsets = query.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(y[taken], offsets), None
        return torch._nested_tensor_from_mask(y, taken, mask_check=False), None


def _warn_of_inputs(query: Tensor, key: Tensor) -> None:
    """Where a program of this module alone would not notice keys of another sequence."""
    if torch.jit.is_tracing() or query is key:
        warnings.warn(
            "this nn.MultiheadAttention becomes a program with three inputs that does not notice "
            "if they differ, and a filter needs self-attention. Trace or export a module whose "
            "forward takes x and calls mha(x, x, x); torch.export also compares copies, as in "
            "mha(x, x.clone(), x.clone())",
            stacklevel=3,
        )


def _map(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """``softmax(q·kᵀ/sqrt(D) + mask)`` with torch's operations; a fully masked row is zeros."""
    batch, heads, length, dim = q.shape
    q = q.flatten(0, 1) * math.sqrt(1.0 / float(dim))
    k = k.flatten(0, 1).transpose(-2, -1)
    if mask is None:
        return torch.bmm(q, k).softmax(-1).view(batch, heads, length, length)
    mask = mask.expand(batch, heads, length, length)
    empty = (mask == -math.inf).all(-1, keepdim=True)
    mask = mask.masked_fill(empty, 0.0).flatten(0, 1)
    matrix = torch.baddbmm(mask, q, k).softmax(-1).view(batch, heads, length, length)
    return matrix.masked_fill(empty, 0.0)


def _refuses(name: str, module: nn.Module) -> str | None:
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.add_zero_attn else "add_bias_kv"
        return f"{option} adds a key without a query: the map is not square"
    if module.kdim != module.embed_dim:
        return (
            f"its keys have {module.kdim} features and its queries {module.embed_dim}, so they are "
            "different tokens: cross-attention has no powers"
        )
    return None


class MultiheadAdapter(SwapClass):
    """``nn.MultiheadAttention``, except where its place in the model makes it cross-attention."""

    def __init__(self) -> None:
        super().__init__(FilteredMultiheadAttention, heads="num_heads", refuses=_refuses)

    def refusal_inside(self, owners: Owners) -> str | None:
        return REASON if crosses_by_design(owners) else None

    def install(self, module: nn.Module) -> None:
        super().install(module)
        module.register_forward_pre_hook(_no_fast_path)

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        # found by identity, because a copied or unpickled model has no handle to it
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _no_fast_path:
                del module._forward_pre_hooks[key]


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """Does nothing: its presence keeps torch from taking the fast path."""


MULTIHEAD = MultiheadAdapter()


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is torch's multi-head attention."""
    return MULTIHEAD if isinstance(module, nn.MultiheadAttention) else None
