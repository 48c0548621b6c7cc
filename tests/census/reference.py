"""An independent dense reference: the unplugged model, in which A is replaced by H.

.. math:: H = c_0 I + c_1 A + c_2 A^2

Nothing of the package is used here. The model is not changed either: a torch-function mode watches
the calls of its attention modules. There are three ways in which a model computes A·v:

- It asks transformers' attention interface for a function f(q, k, v) = A·v. Then f is a black box:
  the reference returns ``c_0 v + c_1 f(v) + c_2 f(f(v))``. Whatever f does to its map (sinks, a
  factor on the output) is part of A.
- It calls torch's attention. The reference builds A in float64 from q, k and the mask.
- It takes a softmax and multiplies v by the result, or by something of the same size that was made
  from it. The reference puts H in the place of A in that product.

Which axis of a map holds the heads is not guessed from one forward: the model runs with some of its
inputs exchanged under an :class:`Observer`, and :func:`layout_of` sees which maps change.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_PRODUCTS = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm,
    torch.einsum,
)  # fmt: skip


class NotReachedError(Exception):
    """The inputs of the census reach no layer that has a filter."""


class NoReferenceError(Exception):
    """The reference does not understand an attention module, so it cannot judge the filter."""


class NotSquareError(Exception):
    """A module that the reference should filter has a map without powers."""


@dataclass(frozen=True)
class Layout:
    """Where the heads of a map are."""

    axis: int | None
    """Counted from the end; None if samples and heads share the first axis."""
    samples_first: bool = True
    """Whether the shared axis goes through the heads of one sample before the next sample."""


def filtered_map(matrix: Tensor, coefficients: Tensor, layout: Layout) -> Tensor:
    """``H = c0·I + c1·A + c2·A²`` in float64, with the coefficients of each head."""
    heads = len(coefficients)
    numbers = coefficients.double()
    if layout.axis is None:
        index = torch.arange(matrix.shape[0])
        samples = matrix.shape[0] // heads
        owner = index % heads if layout.samples_first else index // samples
        columns = numbers[owner].view(-1, *[1] * (matrix.dim() - 1), 3).unbind(-1)
    else:
        shape = [1] * matrix.dim()
        shape[layout.axis] = heads
        columns = tuple(column.reshape(shape) for column in numbers.unbind(-1))
    c0, c1, c2 = columns
    a = matrix.double()
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    return c0 * identity + c1 * a + c2 * (a @ a)


def dense_map(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The map of torch's attention by its definition, in float64; a row without keys is zero."""
    q, k = query.double(), key.double()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-2, -1) * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    return scores.softmax(-1).nan_to_num()


class AttentionMode(TorchFunctionMode):
    """Watches every product of an attention map with values, and may replace the map.

    Args:
        model: the model that will run inside.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[str] = []
        self.maps: list[Tensor] = []
        self.paused = False
        self.single = False
        """Whether a softmax was asked to compute in float32."""

    def replace(self, matrix: Tensor, query: Tensor | None, key: Tensor | None) -> Tensor:
        """What takes the place of a map in its product with values."""
        return matrix

    def call(self, function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of transformers' attention interface by ``module``."""
        return function(module, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Some modules pass everything by name; here module, query, key and value come by place."""
        for name in ("module", "query", "key", "value")[len(args) :]:
            args = (*args, kwargs.pop(name))
        return self.call(function, *args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAX and kwargs.get("dtype") is torch.float32:
            self.single = True
        if self.paused:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._torch_mha(args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func in _SOFTMAX:
            result = func(*args, **kwargs)
            axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if axis in (-1, result.dim() - 1) and result.dim() > 1:
                self.maps.append(result)
            return result
        if not self.maps:
            return func(*args, **kwargs)
        flat = [*args, *kwargs.values()]
        if args and isinstance(args[-1], list | tuple):
            flat += list(args[-1])
        if not any(self._is_map(x) for x in flat):
            return func(*args, **kwargs)
        if func in _PRODUCTS and not self._mixes_heads(func, args):
            args = tuple(self._replaced(x) for x in args)
            kwargs = {name: self._replaced(x) for name, x in kwargs.items()}
            self.maps.clear()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        source = next(x for x in flat if self._is_map(x))
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.numel() == source.numel()
        ):
            self.maps.append(result)
        return result

    def _is_map(self, x: Any) -> bool:
        return any(x is known for known in self.maps)

    def _mixes_heads(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an einsum keeps both token axes of its map."""
        if func is not torch.einsum:
            return False
        inputs, _, out = args[0].replace(" ", "").partition("->")
        operands = args[1:] if isinstance(args[1], Tensor) else args[1]
        letters = next(
            part for part, x in zip(inputs.split(","), operands, strict=True) if self._is_map(x)
        )
        return set(letters[-2:]) <= set(out)

    def _replaced(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(self._replaced(inner) for inner in x)
        if not self._is_map(x) or x.shape[-1] != x.shape[-2]:
            return x
        return self.replace(x, None, None).to(x.dtype)

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
        assert not dropout_p, "the census runs without dropout"
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        matrix = dense_map(query, key, attn_mask, is_causal, scale)
        if matrix.shape[-1] == matrix.shape[-2]:
            matrix = self.replace(matrix, query, key)
        return (matrix @ value.double()).to(query.dtype)

    def _torch_mha(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's multi-head attention computes in Python, with the attention of this mode."""
        names = list(_mha_parameters())
        given = {**dict(zip(names, args, strict=False)), **kwargs, "need_weights": False}
        with mock.patch.object(F, "scaled_dot_product_attention", self._sdpa):
            return F.multi_head_attention_forward(**given)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model runs under this mode."""
        before = torch_module.register_module_forward_pre_hook(self._enter)
        after = torch_module.register_module_forward_hook(self._leave, always_call=True)
        self.stack.clear()
        try:
            with self._interface(), self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()
        # a map does not live longer than the module that made it, unless it is passed on
        del self.maps[:-8]

    @contextlib.contextmanager
    def _interface(self) -> Iterator[None]:
        if "transformers" not in sys.modules:
            yield
            return
        from transformers.modeling_utils import AttentionInterface

        original = AttentionInterface.get_interface

        def get_interface(registry: Any, implementation: str, default: Any) -> Any:
            return functools.partial(self._call, original(registry, implementation, default))

        with mock.patch.object(AttentionInterface, "get_interface", get_interface):
            yield


@functools.cache
def _mha_parameters() -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(F.multi_head_attention_forward).parameters)


class DenseReference(AttentionMode):
    """Runs an unplugged model with H in place of A.

    Args:
        model: the unplugged model.
        thetas: name of an attention module → ``(heads, 3)``: (w0, w1 − 1, wK) for K = 3.
        layouts: name → where the heads are, for modules outside transformers' interface.
    """

    def __init__(
        self, model: nn.Module, thetas: Mapping[str, Tensor], layouts: Mapping[str, Layout]
    ) -> None:
        super().__init__(model)
        self.thetas = thetas
        self.layouts = layouts
        self.reached: set[str] = set()
        """Modules that were called with more than one token: of one token, A is 1."""

    def coefficients(self, name: str) -> Tensor:
        """c0 = w0, c1 = w1 + (2 − K)·wK, c2 = (K − 1)·wK with K = 3."""
        w0, change, wK = self.thetas[name].double().unbind(-1)
        return torch.stack([w0, 1 + change - wK, 2 * wK], -1)

    def replace(self, matrix: Tensor, query: Tensor | None, key: Tensor | None) -> Tensor:
        name = next((name for name in reversed(self.stack) if name in self.thetas), None)
        if name is None:
            return matrix
        if matrix.shape[-1] > 1:
            self.reached.add(name)
        if name not in self.layouts:
            raise NoReferenceError(f"{name}: its map was not observed")
        return filtered_map(matrix, self.coefficients(name), self.layouts[name])

    def call(self, function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.names.get(id(module), "")
        if name not in self.thetas:
            return function(module, *args, **kwargs)
        query, key, value, *rest = args
        c0, c1, c2 = self.coefficients(name).unbind(-1)
        heads, groups = query.shape[1], query.shape[1] // value.shape[1]
        if len(c0) != heads:
            raise NoReferenceError(f"{name}: {len(c0)} filters for a map of {heads} heads")
        if query.shape[2] != value.shape[2]:
            raise NotSquareError(f"{name}: its map is {query.shape[2]}×{value.shape[2]}")
        if query.shape[2] > 1:
            self.reached.add(name)

        def apply(x: Tensor) -> Tensor:
            # one call for each query head of a group, as if the group's values were x
            y = x
            out = torch.zeros_like(x)
            for place in range(groups):
                part = y[:, place::groups].contiguous()
                got = function(module, query, key, part, *rest, **kwargs)[0].transpose(1, 2)
                out[:, place::groups] = got[:, place::groups]
            return out

        self.paused = True
        try:
            first = function(module, query, key, value, *rest, **kwargs)[0]
            if first.dim() != 4 or first.shape[2] != heads:
                raise NoReferenceError(f"{name}: its function returns {tuple(first.shape)}")
            once = first.transpose(1, 2)
            twice = apply(once)
        finally:
            self.paused = False
        values = value.repeat_interleave(groups, dim=1)
        c0, c1, c2 = (c.view(-1, 1, 1) for c in (c0, c1, c2))
        y = c0 * values.double() + c1 * once.double() + c2 * twice.double()
        # the weights would be A
        return y.transpose(1, 2).to(first.dtype).contiguous(), None


@dataclass
class Observation:
    """What one module multiplies its values by, in one forward."""

    maps: list[Tensor] = field(default_factory=list)
    by_interface: bool = False


class Observer(AttentionMode):
    """Records the square maps of a model, by the name of the innermost module around them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: dict[str, Observation] = {}

    def replace(self, matrix: Tensor, query: Tensor | None, key: Tensor | None) -> Tensor:
        name = self.stack[-1] if self.stack else ""
        self.seen.setdefault(name, Observation()).maps.append(matrix.detach())
        return matrix

    def call(self, function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        query, _, value = args[:3]
        if query.shape[2] == value.shape[2]:
            name = self.names.get(id(module), "")
            self.seen.setdefault(name, Observation()).by_interface = True
        self.paused = True
        try:
            return function(module, *args, **kwargs)
        finally:
            self.paused = False


def layout_of(before: Tensor, after: Tensor, corner: Tensor, heads: int, samples: int) -> Layout:
    """Where the heads of a map are, given how it changes with its inputs.

    The axis of heads is the one of the right size (``samples`` is another number). Where windows
    are as many, it is the one along which the change is the same everywhere; in an axis that
    samples share with heads, the places that changed show the order.

    Args:
        before: the map.
        after: with sample 0 exchanged.
        corner: with the first token, or a corner of the image, exchanged in all samples.
        heads: how many heads there are.
        samples: how many samples there are.
    """
    lead = before.shape[:-2]
    if heads == 1:
        # any axis of size one
        return Layout(axis=-3, samples_first=True) if 1 in lead[-1:] else Layout(None)
    sized = [axis for axis, size in enumerate(lead) if size == heads]
    if len(sized) == 1 and lead != (heads,):
        return Layout(sized[0] - before.dim())
    if before.shape != after.shape:
        raise NoReferenceError(
            f"its map has shape {tuple(before.shape)}, then {tuple(after.shape)}"
        )
    changed = (before != after).flatten(-2).any(-1)
    if not changed.any() and lead == (heads * samples,):
        # learned queries: the map of a head is the same for all samples
        by_sample, by_head = (
            before.unflatten(0, (samples, heads)),
            before.unflatten(0, (heads, samples)),
        )
        first = torch.equal(by_sample[0], by_sample[1])
        if first != torch.equal(by_head[:, 0], by_head[:, 1]):
            return Layout(None, samples_first=first)
    if not changed.any() or changed.all():
        raise NoReferenceError("exchanging one sample changes all of its maps, or none")
    elsewhere = (before != corner).flatten(-2).any(-1)
    places = [
        axis
        for axis in sized
        if all(
            bool((change == change.select(axis, 0).unsqueeze(axis)).all())
            for change in (changed, elsewhere)
        )
    ]
    if len(places) == 1:
        return Layout(places[0] - before.dim())
    if len(lead) == 1 and lead[0] == heads * samples:
        where = changed.nonzero().flatten().tolist()
        if where == list(range(heads)):
            return Layout(None, samples_first=True)
        if where == list(range(0, lead[0], samples)):
            return Layout(None, samples_first=False)
    if len(lead) == 1 and lead[0] % (heads * samples) == 0 and not elsewhere.all():
        # samples and windows before heads: the heads of a window change together
        together = elsewhere.unflatten(0, (-1, heads))
        if torch.equal(together, together[:, :1].expand_as(together)):
            return Layout(None, samples_first=True)
    raise NoReferenceError(
        f"its map has shape {tuple(before.shape)}: the axis of {heads} heads is not clear"
    )
