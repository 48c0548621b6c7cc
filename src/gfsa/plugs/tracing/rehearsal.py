"""Rehearse a forward up to its attention product, and prove that it is self-attention.

The proof also shows which axis of the map the heads are on, for these sizes and for others.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gfsa.plugs.adapter import plain_class
from gfsa.plugs.checks.proof import Evidence, are_same_tokens, noise_like
from gfsa.plugs.running import copied, same_random_numbers
from gfsa.plugs.tracing.capture import Step, TraceError, Watch

# norms whose statistics are over tokens: each token depends on all others, but only through them
_NORMS = (F.batch_norm, F.instance_norm, F.group_norm)
# what is subtracted from a whole row of scores does not change their softmax
_SHIFTS = (torch.amax, Tensor.amax, torch.logsumexp, Tensor.logsumexp)
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__


class HeadLayout(NamedTuple):
    """The place of the heads among the axes of a map ``(..., N, N)``."""

    rank: int
    axis: int
    merged: Literal["before", "after"] | None = None
    """Whether samples are merged into this axis, before or after the heads."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        """``x`` with its heads as the third axis from the end."""
        if heads == 1:
            return x.unsqueeze(-3)
        axis = self.axis + x.dim()
        if self.merged:
            # a mask may be the same for all heads
            heads = 1 if x.shape[axis] == 1 else heads
            samples = x.shape[axis] // heads
            x = x.unflatten(axis, (samples, heads) if self.merged == "before" else (heads, samples))
            axis += self.merged == "before"
        return x.movedim(axis, -3)

    def join(self, y: Tensor, heads: int, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`split`: ``y`` in the leading sizes of ``shape``."""
        if heads > 1:
            y = y.movedim(-3, self.axis + self.rank + (self.merged == "before"))
        return y.reshape(*shape[:-1], y.shape[-1])

    def fits(self, scores: Sequence[int], heads: int) -> bool:
        """Whether a map of this shape can have this layout."""
        if heads == 1 or len(scores) != self.rank:
            return heads == 1
        size = scores[self.axis]
        return size % heads == 0 if self.merged else size == heads

    @classmethod
    def possible(cls, scores: Sequence[int], heads: int) -> list[HeadLayout]:
        """The layouts of a map of this shape; heads with an axis of their own come first."""
        rank = len(scores)
        if heads == 1:
            return [cls(rank, -3)]
        axes = range(-rank, -2)
        found = (cls(rank, axis, m) for m in (None, "before", "after") for axis in axes)
        return [layout for layout in found if layout.fits(scores, heads)]


class Verified(NamedTuple):
    """What the proof has shown of one call of a module."""

    layout: HeadLayout
    equal_inputs: tuple[tuple[str, str], ...] = ()
    """Pairs of inputs that must hold the same tokens."""
    for_any_batch: bool = False
    """Whether this holds for batches of other sizes, too."""


# a module that is called with ever new sizes is proven again for some of them
_CALLS_KEPT = 256


@dataclass
class Memory:
    """What the proofs of one traced module have shown."""

    # the names of the arguments of its forward
    inputs: tuple[str, ...] = ()
    # by the signature of the call
    verified: dict[Hashable, Verified] = field(default_factory=dict)
    # by the kind of the call, without sizes: for graphs that are compiled
    for_any_batch: dict[Hashable, Verified] = field(default_factory=dict)
    # whether the sums of the map's rows have been looked at
    rows_checked: bool = False

    def keep(self, signature: Hashable, kind: Hashable, proven: Verified) -> None:
        """Remember what was proven of a call, and for any batch of its kind if that is known."""
        if len(self.verified) >= _CALLS_KEPT:
            self.verified.clear()
        self.verified[signature] = proven
        if proven.for_any_batch and self.for_any_batch.setdefault(kind, proven) != proven:
            # two paths through the forward: which of them a compiled graph takes is unknown
            self.for_any_batch[kind] = Verified(HeadLayout(0, 0))


NOT_SQUARE = (
    "its map is {}×{}, not square: cross-attention, pooling with a few queries, or decoding with a "
    "cache (pass use_cache=False in transformers; an adapter of your own can keep A·v beside the "
    "cache: docs/adapters.md) has no powers"
)


def no_heads(scores: Sequence[int], heads: int) -> str:
    return f"its map has shape {tuple(scores)}, with no axis for its {heads} heads"


class Reached(BaseException):
    """The forward has reached its product; no Exception, so that few modules catch it."""


class Rehearsal(Watch):
    """A forward up to its attention product, with gradients, on leaves in place of its inputs.

    An entry of the map shall depend on its own query and key alone: the scores take the place of
    their softmax, and sums of the map and statistics of norms are left out.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # whether a softmax is in an autograd function of the module's own
        self.hidden = False
        # the scores, or queries and keys; the values; the shape of the map
        self.reached: tuple[tuple[Tensor, ...], Tensor, tuple[int, ...]] | None = None

    def of_attention(self, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        self.reached = (query, key), value, (*query.shape[:-1], key.shape[-2])
        raise Reached

    def of_flex(self, flex: Any, *args: Any) -> Any:
        return self.of_attention(*args)

    def of_map(self, step: Step, matrix: Tensor, values: Tensor) -> Any:
        self.reached = (matrix,), values, tuple(matrix.shape)
        raise Reached

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _REQUIRES_GRAD and not args[0].is_leaf:
            # flex_attention refuses gradients on a CPU, where this one ends before its kernels
            return False
        if func in _NORMS:
            return args[0] if args else kwargs["input"]
        if func in _SHIFTS and args:
            args = (args[0].detach(), *args[1:])
        return super().run(func, args, kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().follow(func, args, kwargs)
        step = self.find(result)
        if step is not None and not step.is_map:
            step.tensor = result.detach()
            return step.tensor
        return result

    def softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores: Tensor = args[0] if args else kwargs["input"]
        self.hidden = self.hidden or not torch.is_grad_enabled()
        # a mask that is added to the scores hides no entry here
        scores = scores.masked_fill(scores.isinf(), -_MASKED)
        return scores.to(kwargs.get("dtype") or scores.dtype)


_UNPROVEN = (
    "how its queries and keys follow from its inputs could not be followed ({}), so whether they "
    "are the same tokens is unknown"
)

# numbers beyond this are those of a mask
_MASKED = 1e4


def prove(
    module: Any, inputs: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Verified | str:
    """Prove that a forward is attention of the module's tokens to themselves, or say why not.

    It runs up to its product, on a copy of the module and of its arguments, without a trace in
    random generators. ``inputs`` are those of the arguments that may hold tokens, by name.
    """
    found = _rehearse(module, inputs, {}, args, kwargs)
    if isinstance(found, Verified):
        return found
    # another input may hold the same tokens, as in attention(x, x.clone())
    equal: dict[str, str] = {}
    for first, second in itertools.combinations(inputs, 2):
        if first not in equal and are_same_tokens(inputs[first], inputs[second]):
            equal.setdefault(second, first)
    return _rehearse(module, inputs, equal, args, kwargs) if equal else found


def _rehearse(
    module: Any,
    inputs: Mapping[str, Tensor],
    equal: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Verified | str:
    """The proof by one rehearsal, in which each of the ``equal`` inputs is the other one."""
    random = same_random_numbers(inputs.values())
    with random, torch.inference_mode(False), torch.enable_grad(), _uncompiled():
        leaves: dict[str, Tensor] = {}
        by_id: dict[int, Tensor] = {}
        for key, x in inputs.items():
            if key in equal:
                by_id[id(x)] = leaves[equal[key]]
            elif id(x) not in by_id:
                # zeros and masks would stop gradients
                x, noise = x.detach(), noise_like(x)
                leaf = torch.where((x != 0) & (x.abs() < _MASKED), x, noise).requires_grad_()
                leaves[key] = by_id[id(inputs[key])] = leaf
        rehearsal, replica = Rehearsal(module), _replica(module)
        own = [own_argument(value, by_id) for value in args]
        named = {key: own_argument(value, by_id) for key, value in kwargs.items()}
        try:
            # the forward itself raises a TraceError again
            with suppress(Reached, TraceError), rehearsal:
                plain_class(module).forward(replica, *own, **named)
        except Exception as error:
            why = f"with gradients its forward raised {type(error).__name__}: {error}"
            return _UNPROVEN.format(why)
        if rehearsal.reached is None:
            return _UNPROVEN.format("its forward had no attention product when it was verified")
        scores, values, shape = rehearsal.reached
        if shape[-2] != shape[-1]:
            return NOT_SQUARE.format(*shape[-2:])
        pairs = tuple((first, second) for second, first in equal.items())
        heads = module.gfsa.num_heads
        layouts = HeadLayout.possible(shape, heads)
        if layouts and (0 in shape or values.numel() == 0 or values.is_meta):
            # nothing is computed, so any layout of these sizes will do
            return Verified(layouts[0], pairs)
        for merged, layout in itertools.product((False, True), layouts):
            # fewer heads of keys and values, merged with samples, are not told apart
            if layout.merged and any(x.shape[:-2] != shape[:-2] for x in (*scores, values)):
                continue
            *sides, v = (layout.split(x, heads) for x in (*scores, values))
            evidence = Evidence(leaves, sides, v, rehearsal.hidden)
            if len(layouts) > 1 and not evidence.separates_lead(merged):
                continue
            # with one sample, or as many as heads or tokens, the sizes that the module's code
            # reads could belong to another axis
            samples = math.prod(shape[:-2]) // heads
            for_any_batch = heads == 1 or len({samples, heads, shape[-1], 1}) == 4
            return evidence.refusal() or Verified(layout, pairs, for_any_batch)
        return no_heads(shape, heads)


_STANCE = threading.Lock()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Functions that are compiled, as flex_attention is, run as written: a graph has no tensors."""
    if "torch.nn.attention.flex_attention" not in sys.modules:
        yield
        return
    with _STANCE, ExitStack() as stack:
        # torch refuses where its compiler has given a frame up
        with suppress(RuntimeError):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def own_argument(value: Any, leaves: Mapping[int, Tensor]) -> Any:
    """An argument of the forward for a rehearsal, which may write into it."""
    if isinstance(value, Tensor):
        leaf = leaves.get(id(value))
        return (value if leaf is None else leaf).clone()
    if type(value) in (list, tuple):
        return type(value)(own_argument(x, leaves) for x in value)
    if value is None or callable(value) or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    # a cache, say
    return copied(value)


def _replica(module: nn.Module) -> nn.Module:
    """A copy of a module and of those inside it, with the same weights and copies of its buffers.

    Replaced are weights of zero, which stop gradients, and linear layers that may compute outside
    of torch, such as quantised ones.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for inner in module.modules():
        copies[inner] = inner
        if not isinstance(inner, torch.jit.ScriptModule):
            copies[inner] = object.__new__(type(inner))
            # what the copy keeps in a dict, as LeViT does its biases, is not the module's
            attributes = vars(inner).items()
            copies[inner].__dict__.update(
                {n: copy.copy(x) if type(x) in (dict, list, set) else x for n, x in attributes}
            )
    for inner, own in copies.items():
        if own is inner:
            continue
        own.__dict__["_modules"] = {n: m and copies[m] for n, m in inner._modules.items()}
        own.__dict__["_parameters"] = {n: _weight(p) for n, p in inner._parameters.items()}
        buffers = inner._buffers.items()
        own.__dict__["_buffers"] = {n: b if b is None else b.clone() for n, b in buffers}
        if isinstance(inner, nn.Linear) and type(inner).forward is not nn.Linear.forward:
            own.__dict__["forward"] = functools.partial(_project, inner.out_features)
    return copies[module]


def _project(features: int, x: Tensor) -> Tensor:
    return F.linear(x, noise_like(x.new_empty(features, x.shape[-1])))


def _weight(weight: Tensor | None) -> Tensor | None:
    if weight is None or not weight.is_floating_point() or weight.dim() < 2:
        return weight
    if type(weight) not in (nn.Parameter, Tensor) or not weight.requires_grad or weight.is_meta:
        return weight
    zero = weight == 0
    return torch.where(zero, noise_like(weight), weight.detach()) if bool(zero.any()) else weight
