"""Trace the forward of one attention module, and filter its map where it multiplies v.

The map is the result of a softmax over the last axis, followed through every operation that keeps
its size (dropout, casts, masks, mixing of heads) to a product with the values; or a call of torch's
own attention. Every assumption that can be checked is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.plugs.cross_attention import require_same_tokens
from gfsa.plugs.tracing.axes import Provenance

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_DROPOUT = (F.dropout, torch.dropout)
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)

# names of arguments that may hold the tokens of another sequence
_OTHER_TOKENS = (
    "key",
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
    "memory",
    "q_global",
)


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


class Trace(TorchFunctionMode):
    """One forward of one module.

    Args:
        module: the attention module; its filter is ``module.gfsa``.
        name: what to call it in errors.
        verified: whether an earlier forward has shown that the map is tokens × tokens.
    """

    def __init__(self, module: nn.Module, name: str, verified: bool) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self.verified = verified
        self.filter: GraphFilter = module.gfsa  # type: ignore[assignment]
        self.widths: set[int] = set()
        self.maps: list[Tensor] = []
        self.undropped: Tensor | None = None
        self.dropout_p = 0.0
        self.provenance = Provenance()
        self.products = 0
        self.head_axis = -3

    def begin(self, given: Mapping[str, Any]) -> None:
        """Read the arguments of the forward, by name, before it runs."""
        tokens = next((x for x in given.values() if _is_tokens(x)), None)
        if tokens is None:
            return
        # which axis of an image holds the channels is not known
        self.widths = {tokens.shape[-1]} if tokens.dim() < 4 else set()
        for name in _OTHER_TOKENS:
            other = given.get(name)
            if isinstance(other, Tensor):
                require_same_tokens(self.module, tokens, other)

    def end(self) -> None:
        """Check the forward after it ran."""
        if not self.products:
            self._refuse(
                "its forward has no product of a softmax with values that torch dispatches (a "
                "softmax written out, a softmax over another axis, or an extension of its own)"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func in _SOFTMAX:
            result = func(*args, **kwargs)
            axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if axis in (-1, result.dim() - 1):
                self.maps.append(result)
            return result
        if not self.maps or not self._is_map(*args, *kwargs.values()):
            result = func(*args, **kwargs)
            if args and not self.products:
                self.provenance.note(func, args[0], result)
            return result
        if func in _DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in _MATMUL:
            left, right = (*args, *kwargs.values())[:2]
            return self._product(left, right)
        if func is torch.einsum:
            return self._einsum(*args)
        return self._follow(args, func(*args, **kwargs))

    def _is_map(self, *candidates: Any) -> bool:
        return any(x is known for known in self.maps for x in candidates)

    def _follow(self, args: tuple[Any, ...], result: Any) -> Any:
        """Treat the result of an operation on a map as the map if it has the same size."""
        source = next((x for x in args if self._is_map(x)), None)
        if (
            source is not None
            and isinstance(result, Tensor)
            and result.is_floating_point()
            and result.numel() == source.numel()
            and not self._is_map(result)
        ):
            self.maps.append(result)
        return result

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **options: Any
    ) -> Tensor:
        # F.dropout calls the argument training, torch.dropout train
        if not options.get("train", training) or not p:
            return input
        self.undropped = input
        if self.filter.dropout_after == "filter":
            self.dropout_p = p
            return input
        dropped: Tensor = F.dropout(input, p)
        self.maps.append(dropped)
        return dropped

    def _product(self, left: Any, right: Any) -> Tensor:
        if self._is_map(left):
            return self._filter_map(left, right)
        # y = v·Aᵀ with tokens as columns
        y = self._filter_map(right.transpose(-2, -1), left.transpose(-2, -1))
        return y.transpose(-2, -1)

    def _einsum(self, equation: str, *operands: Any) -> Tensor:
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        inputs, arrow, out = equation.replace(" ", "").partition("->")
        letters = inputs.split(",")
        place = next((i for i, x in enumerate(operands) if self._is_map(x)), 0)
        of_map = letters[place]
        if arrow and set(of_map[-2:]) <= set(out):
            # the einsum mixes heads: its result is still a map
            mixed: Tensor = self._follow((operands[place],), torch.einsum(equation, *operands))
            return mixed
        if len(operands) != 2 or not arrow or "." in equation:
            self._refuse(f"its map is in an einsum that is not understood: {equation!r}")
        of_values = letters[1 - place]
        lead, row, column = of_map[:-2], of_map[-2], of_map[-1]
        features = [x for x in of_values if x not in of_map]
        if len(features) != 1 or set(of_values) != {*lead, column, *features}:
            self._refuse(f"its map is in an einsum that is not understood: {equation!r}")
        values = torch.einsum(f"{of_values}->{lead}{column}{features[0]}", operands[1 - place])
        y = self._filter_map(operands[place], values)
        return torch.einsum(f"{lead}{row}{features[0]}->{out}", y)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self._check(query.shape[:-1] + key.shape[-2:-1], value, query)
        if not enable_gqa:
            # torch broadcasts here: multi-query attention has one head of keys and values
            key, value = (x.expand(*query.shape[:-2], *x.shape[-2:]) for x in (key, value))
        dims, shape = query.dim(), query.shape
        query, key, value = (self._with_heads(x) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = self._with_heads(attn_mask[(None,) * (dims - attn_mask.dim())])
        operator = AttentionOperator(
            query,
            key,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            dropout_after=self.filter.dropout_after,
        )
        return self._without_heads(self._filter(operator, value), shape)

    def _filter_map(self, matrix: Tensor, values: Tensor) -> Tensor:
        self._check(matrix.shape, values, values)
        # a product broadcasts: multi-query attention has one head of values
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        matrix, values = (x.expand(*lead, *x.shape[-2:]) for x in (matrix, values))
        shape = values.shape
        if not self.verified:
            self._check_rows(matrix if self.undropped is None else self.undropped)
        matrix, values = self._with_heads(matrix), self._with_heads(values)
        operator = DenseOperator(matrix, self.dropout_p, self.filter.dropout_after)
        return self._without_heads(self._filter(operator, values), shape)

    def _with_heads(self, x: Tensor) -> Tensor:
        """The tensor with its heads moved to the third axis from the end."""
        heads = self.filter.num_heads
        if heads == 1:
            return x.unsqueeze(-3)
        if x.dim() == 3 and x.shape[0] > 1:
            return x.unflatten(0, (-1, heads))
        return x.movedim(self.head_axis, -3)

    def _without_heads(self, y: Tensor, shape: torch.Size) -> Tensor:
        if self.filter.num_heads > 1 and len(shape) > 3:
            y = y.movedim(-3, self.head_axis)
        return y.reshape(*shape[:-1], y.shape[-1])

    def _filter(self, operator: Operator, values: Tensor) -> Tensor:
        self.maps.clear()
        y: Tensor = self.filter(operator, values)
        return y

    def _check(self, scores: tuple[int, ...], values: Tensor, heads_in: Tensor) -> None:
        """Refuse a map that is not tokens × tokens with a head axis where one is expected."""
        self.products += 1
        if self.products > 1:
            self._refuse("its forward has more than one attention product")
        rows, columns = scores[-2:]
        if rows != columns:
            self._refuse(
                f"its map is {rows}×{columns}, not square: cross-attention, pooling with a few "
                "queries, or decoding with a cache (pass use_cache=False) has no powers"
            )
        self._check_heads(scores, heads_in)
        if not self.verified:
            self._check_tokens(columns, values)

    def _check_heads(self, scores: tuple[int, ...], laid_out: Tensor) -> None:
        """Find the axis of the heads, or refuse if it is ambiguous."""
        heads, lead = self.filter.num_heads, tuple(scores[:-2])
        if heads == 1 or lead == (heads,):
            return
        if len(lead) <= 1:
            self._check_merged(lead)
            return
        places = [axis for axis, size in enumerate(lead) if size == heads]
        if not places:
            self._refuse(f"its map has shape {tuple(scores)}, with no axis for its {heads} heads")
        if len(places) > 1 and not self.verified:
            # sizes are ambiguous, but in memory the heads of a sample are adjacent
            strides = [laid_out.stride(axis) for axis in places]
            if len(lead) > 2 or min(strides) != strides[-1]:
                self._refuse(
                    f"its map has shape {tuple(scores)}, where more than one axis could be the "
                    f"{heads} heads; run the first forward with another batch size"
                )
        self.head_axis = places[-1] - len(scores)

    def _check_merged(self, lead: tuple[int, ...]) -> None:
        """Refuse a map ``(B·H, N, N)`` unless its reshapes show that samples come before heads."""
        heads = self.filter.num_heads
        if not lead or lead[0] % heads:
            self._refuse(f"its map has leading sizes {lead}, expected {heads} heads among them")
        if not (self.provenance.samples_first(lead[0], heads) or self.verified):
            self._refuse(
                f"its map merges {lead[0] // heads} samples and {heads} heads into one axis, whose "
                "order cannot be determined; run the first forward with another batch size, or "
                "register an adapter"
            )

    def _check_tokens(self, side: int, values: Tensor) -> None:
        """Refuse attention over channels, whose map is square too, by the module's widths."""
        heads, features = self.filter.num_heads, values.shape[-1]
        layers = list(self.module.children())
        widths = self.widths | {m.in_features for m in layers if isinstance(m, nn.Linear)}
        widths |= {m.in_channels for m in layers if isinstance(m, (nn.Conv1d, nn.Conv2d))}
        over_tokens, over_channels = heads * features in widths, heads * side in widths
        if side == features and over_tokens:
            features_last = self.provenance.features_last(values)
            over_tokens, over_channels = features_last is not False, features_last is not True
        if over_tokens and not over_channels:
            return
        if over_tokens:
            self._refuse(
                f"its map is {side}×{side} and its values have {features} features per head: with "
                "equal numbers, attention over tokens and over channels cannot be distinguished. "
                "Run the first forward with another number of tokens"
            )
        if over_channels:
            self._refuse(f"its map is {side}×{side} over channels, not tokens")
        self._refuse(
            f"{heads} heads of {features} features fit none of its widths "
            f"({', '.join(map(str, sorted(widths)))}), so its map may not be over tokens"
        )

    def _check_rows(self, matrix: Tensor) -> None:
        if torch.compiler.is_compiling() or matrix.is_meta:
            return
        sums = matrix.detach().sum(-1, dtype=torch.float32)
        # a fully masked row may be zeros
        off = torch.where(sums == 0, 0.0, (sums - 1).abs())
        if bool((off > 1e-2).any()):
            warnings.warn(
                f"the rows of the attention map of {self.name} do not sum to one (by up to "
                f"{off.max().item():.3g}); the filter uses the map as it is",
                stacklevel=2,
            )

    def _refuse(self, why: str) -> NoReturn:
        raise TraceError(
            f"cannot filter {self.name} ({type(self.module).__name__}) by tracing: {why}. "
            "gfsa.unplug(model), and leave the layer out with plug(..., layers=...), or teach "
            "gfsa its class with gfsa.register_adapter"
        )


def _is_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2
