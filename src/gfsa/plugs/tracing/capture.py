"""Follow the forward of one attention module from its softmax to the product of the map with v.

The map is the result of a softmax over the last axis, followed through every operation that keeps
its size (dropout, casts, masks, mixing of heads) to a product with the values. Or the forward calls
torch's own attention or flex_attention.

A rehearsal ends at the product. It proves that this is self-attention, and shows which axis of the
map the heads are on, for these sizes and for others.
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
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gfsa.operators.operator import repeat_heads
from gfsa.plugs.adapter import plain_class
from gfsa.plugs.checks.proof import Evidence, are_same_tokens, noise_like
from gfsa.plugs.running import copied, same_random_numbers

# functions that make, change or use an attention map
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
# what flex_attention calls, compiled or not
FLEX = getattr(torch.ops.higher_order, "flex_attention", None)
_STARTS = (F.scaled_dot_product_attention, FLEX, *SOFTMAX)
_MATMUL = (
    *(torch.matmul, torch.linalg.matmul, torch.bmm, torch.mm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm),
)
_ADDED_MATMUL = (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
_OPERANDS = ("input", "self", "mat1", "tensor1", "other", "mat2", "tensor2")

# norms whose statistics are over tokens: each token depends on all others, but only through them
_NORMS = (F.batch_norm, F.instance_norm, F.group_norm)
# what is subtracted from a whole row of scores does not change their softmax
_SHIFTS = (torch.amax, Tensor.amax, torch.logsumexp, Tensor.logsumexp)
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


@dataclass(eq=False)
class Step:
    """One tensor that was computed from a map, and how; the first is the result of a softmax."""

    tensor: Tensor
    parent: Step | None = None
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # a sum or a mean of the map has another size: it is no map any more
        self.is_map = self.parent is None or self.tensor.numel() == self.parent.tensor.numel()

    def redo(self, other: Tensor) -> Tensor:
        """The operation again, with another tensor in place of the parent's."""
        assert self.parent is not None
        source = self.parent.tensor
        args = (other if x is source else x for x in self.args)
        kwargs = {name: other if x is source else x for name, x in self.kwargs.items()}
        return self.func(*args, **kwargs)

    def ancestors(self) -> list[Step]:
        """This step and those before it, the softmax last."""
        steps: list[Step] = [self]
        while steps[-1].parent is not None:
            steps.append(steps[-1].parent)
        return steps


class Watch(TorchFunctionMode):
    """One forward of one module; a subclass says what takes the place of its attention product."""

    # in place of torch's attention, of flex_attention's operator, and of the product of a map and
    # values; their leading axes are those of the map
    of_attention: Any
    of_flex: Any
    of_map: Any

    def __init__(self, module: nn.Module, name: str = "") -> None:
        super().__init__()
        # the class of a traced module is created at run time; users know the original one
        self.kind = plain_class(module).__name__
        self.name = name or self.kind
        # the last one that was raised: the module may catch it
        self.error: BaseException | None = None
        # every tensor of the forward that was computed from a softmax
        self.steps: list[Step] = []

    def refuse(self, why: str) -> NoReturn:
        """Raise a :class:`TraceError` with a reason."""
        self.error = TraceError(
            f"cannot filter {self.name} ({self.kind}) by tracing: {why}. "
            "gfsa.unplug(model), then plug(..., inputs=batch), which leaves out the layers that it "
            "cannot filter, or plug(..., layers=...) without this one; or teach gfsa its class "
            "with gfsa.register_adapter"
        )
        raise self.error

    def takes_dropout(self, p: float) -> bool:
        """Whether a dropout of the map is left out here."""
        return True

    def find(self, x: Any) -> Step | None:
        return next((step for step in reversed(self.steps) if step.tensor is x), None)

    def find_map(self, *candidates: Any) -> Step | None:
        """The map among some arguments."""
        found = (self.find(x) for x in candidates if isinstance(x, Tensor))
        return next((step for step in found if step is not None and step.is_map), None)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record its result if that is one tensor computed from a map."""
        result = self.run(func, args, kwargs)
        if self.steps and isinstance(result, Tensor) and result.is_floating_point():
            found = (self.find(x) for x in (*args, *kwargs.values()))
            parent = next((step for step in found if step is not None), None)
            if parent is not None and self.find(result) is None:
                self.steps.append(Step(result, parent, func, args, kwargs))
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.steps and func not in _STARTS:
            # most operations of a forward: they come before its map, or after torch's attention
            return self.run(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is FLEX:
            # the graph of a compiled call has the filter in it already
            in_graph = isinstance(args[3], torch.fx.GraphModule)
            return self.run(func, args, kwargs) if in_graph else self._flex(func, *args)
        if func in SOFTMAX:
            x = args[0] if args else kwargs["input"]
            axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if axis not in (-1, x.dim() - 1):
                return self.run(func, args, kwargs)
            self.steps.append(Step(self.softmax(func, args, kwargs)))
            return self.steps[-1].tensor
        if func is torch.einsum and isinstance(args[0], str) and isinstance(args[1], (list, tuple)):
            args = args[0], *args[1]
        step = self.find_map(*args, *kwargs.values())
        multiplies = func in _MATMUL or func in _ADDED_MATMUL
        if step is None:
            if (multiplies or func is torch.einsum) and any(self.find(x) for x in args):
                # as for values that depend on the distance, or for a column that is a sink
                self.refuse(
                    "a product takes a part or a sum of its map, and the filter needs all of it"
                )
            return self.follow(func, args, kwargs)
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func in _ADDED_MATMUL or (multiplies and "out" in kwargs):
            self.refuse(
                f"its map is in {func.__name__} with a tensor that the product is added to or "
                "written into; multiply by matmul alone"
            )
        if multiplies:
            named = [kwargs[name] for name in _OPERANDS if name in kwargs]
            return self._matmul(*(*args, *named)[:2])
        if func is torch.einsum:
            return self._einsum(step, args)
        return self.follow(func, args, kwargs)

    def softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The map of a softmax over the last axis."""
        return self.run(func, args, kwargs)

    def _dropout(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
        x: Tensor = given["input"]
        p = given.get("p", 0.5)
        # F.dropout calls the argument training, torch.dropout train
        drops = given.get("training", given.get("train", True)) and p
        if not drops or self.takes_dropout(p):
            return x
        return self.follow(F.dropout, (x, p, True, given.get("inplace", False)), {})

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
    ) -> Any:
        if not options.get("enable_gqa"):
            lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
            query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        return self.of_attention(query, key, value, attn_mask, *args, **options)

    def _flex(self, flex: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        lead = query.shape[:-2]
        key, value = (repeat_heads(x, query).expand(*lead, *x.shape[-2:]) for x in (key, value))
        return self.of_flex(flex, query, key, value, *args)

    def _product(self, matrix: Tensor, values: Tensor) -> Tensor:
        # multi-query attention has one head of values
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        expanded = (x.expand(*lead, *x.shape[-2:]) for x in (matrix, values))
        return self.of_map(self.find(matrix), *expanded)

    def _matmul(self, left: Any, right: Any) -> Tensor:
        if self.find_map(left) is not None:
            return self._product(left, right)
        # y = v·Aᵀ with tokens as columns
        turned = (self.follow(torch.transpose, (x, -2, -1), {}) for x in (right, left))
        return self._product(*turned).transpose(-2, -1)

    def _einsum(self, step: Step, args: tuple[Any, ...]) -> Tensor:
        equation, *operands = args
        if not isinstance(equation, str):
            # torch writes an equation for axes by number before it dispatches, its compiler after
            self.refuse("its map is in an einsum without an equation")
        place = next(i for i, x in enumerate(operands) if x is step.tensor)
        left, arrow, out = equation.replace(" ", "").partition("->")
        inputs = left.split(",")
        of_map = inputs[place]
        lead, row, column = of_map[:-2], of_map[-2], of_map[-1]
        if arrow and {row, column} <= set(out):
            # the einsum mixes heads: its result is still a map
            return self.follow(torch.einsum, (equation, *operands), {})
        of_values = inputs[1 - place] if len(inputs) == 2 else ""
        features = "".join(letter for letter in of_values if letter not in of_map)
        understood = arrow and "." not in equation and len(features) == 1
        if not understood or column not in of_values or row in of_values:
            self.refuse(f"its map is in an einsum that is not understood: {equation!r}")
        own = "".join(letter for letter in lead if letter in of_values)
        values = torch.einsum(f"{of_values}->{own}{column}{features}", operands[1 - place])
        # heads may share values
        values = values[tuple(slice(None) if letter in own else None for letter in lead)]
        y = self._product(step.tensor, values)
        return torch.einsum(f"{lead}{row}{features}->{out}", y)


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
            if layout.merged and any(1 in x.shape[:-1] for x in leaves.values()):
                # of several samples, the heads might lie between them and what is merged here
                for_any_batch = False
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
