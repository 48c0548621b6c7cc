"""Watch the forward of one attention module, and find the product of its map with the values.

The map is the result of a softmax over the last axis, followed through every operation that keeps
its size (dropout, casts, masks, mixing of heads) to a product with the values; or a call of torch's
own attention. A :class:`Trace` puts the filter there. A :class:`Rehearsal` runs the forward on a
copy of the module up to there, and proves that the product is self-attention.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gfsa.plugs.checks.called import checks_of
from gfsa.plugs.checks.proof import (
    Crossing,
    Evidence,
    are_same_tokens,
    noise_like,
    value_of_one,
    without_transforms,
)
from gfsa.plugs.running import copied, same_random_numbers
from gfsa.plugs.tracing.maps import MapHistory, Step, with_tensors
from gfsa.plugs.tracing.product import (
    NOT_SQUARE,
    FilteredProduct,
    Memory,
    Refusals,
    TraceError,
    Verified,
    attention_lead,
    no_heads,
    possible_layouts,
)

# functions that make, change or use an attention map
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
# what flex_attention calls, compiled or not
FLEX = getattr(torch.ops.higher_order, "flex_attention", None)
_STARTS = (F.scaled_dot_product_attention, FLEX, *SOFTMAX)
DROPOUT = (F.dropout, torch.dropout)
MATMUL = (
    torch.matmul,
    torch.linalg.matmul,
    torch.bmm,
    torch.mm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.mm,
)
ADDED_MATMUL = (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
MAP_PRODUCTS = (*MATMUL, *ADDED_MATMUL, torch.einsum)
_OPERANDS = ("input", "self", "batch1", "mat1", "tensor1", "other", "batch2", "mat2", "tensor2")
# norms whose statistics are over tokens: each token depends on all others, but only through them
_NORMS = (F.batch_norm, F.instance_norm, F.group_norm)
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
# what is subtracted from a whole row of scores does not change their softmax
_SHIFTS = (torch.amax, Tensor.amax, torch.logsumexp, Tensor.logsumexp)


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of a product in their order, by position or by name."""
    return [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]


class Watch(TorchFunctionMode):
    """One forward of one module, whose attention product goes to ``product``.

    Args:
        product: has ``of_attention``, ``of_map`` and ``take_dropout``.
        history: the maps of this forward.
        refusals: raises what is refused.
    """

    def __init__(self, product: Any, history: MapHistory, refusals: Refusals) -> None:
        super().__init__()
        self.product = product
        self.history = history
        self.refusals = refusals

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.history.steps and func not in _STARTS:
            # most operations of a forward: they come before its map, or after torch's attention
            return self._run(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self.product.of_attention(*args, **kwargs)
        if func is FLEX:
            # the graph of a compiled call has the filter in it already
            in_graph = isinstance(args[3], torch.fx.GraphModule)
            return self._run(func, args, kwargs) if in_graph else self.product.of_flex(func, *args)
        if func in SOFTMAX:
            return self._softmax(func, args, kwargs)
        if not self._takes_map(func, args, kwargs):
            if func in MAP_PRODUCTS and any(self.history.find(x) for x in args):
                # as for values that depend on the distance, or for a column that is a sink
                self.refusals.refuse(
                    "a product takes a part or a sum of its map, and the filter needs all of it"
                )
            return self._run_and_follow(func, args, kwargs)
        if func in DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in MATMUL:
            return _written(self._matmul(*operands_of(args, kwargs)[:2]), kwargs)
        if func in ADDED_MATMUL:
            return _written(self._added_matmul(args, kwargs), kwargs)
        if func is torch.einsum:
            return self._einsum(args)
        return self._run_and_follow(func, args, kwargs)

    def _takes_map(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether one of the arguments of an operation is an attention map."""
        if not self.history.steps:
            return False
        operands = (*args, *kwargs.values())
        if func is torch.einsum:
            operands = (*operands, *operands_of_einsum(args))
        return self.history.find_map(*operands) is not None

    def _run_and_follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._run(func, args, kwargs)
        self.history.follow(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        result: Tensor = self._run(func, args, kwargs)
        if _is_over_last(args, kwargs):
            self.history.start(result)
        return result

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        # F.dropout calls the argument training, torch.dropout train
        if not (training if train is None else train) or not p:
            return input
        if self.product.take_dropout(input, p, inplace):
            return input
        dropped: Tensor = self._run(F.dropout, (input, p, True, inplace), {})
        self.history.follow(F.dropout, (input, p), {}, dropped)
        return dropped

    def _matmul(self, left: Any, right: Any) -> Tensor:
        step = self.history.find_map(left)
        if step is not None:
            return self.product.of_map(step, left, right)
        step = self.history.find_map(right)
        assert step is not None
        # y = v·Aᵀ with tokens as columns
        y = self.product.of_map(step, self._turned(right), self._turned(left))
        return y.transpose(-2, -1)

    def _turned(self, x: Tensor) -> Tensor:
        turned: Tensor = self._run_and_follow(torch.transpose, (x, -2, -1), {})
        return turned

    def _added_matmul(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """``beta·input + alpha·(left @ right)``."""
        added, left, right = operands_of(args, kwargs)[:3]
        if self.history.find_map(left, right) is None:
            self.refusals.refuse("its map is added to a product")
        y = kwargs.get("alpha", 1) * self._matmul(left, right)
        beta = kwargs.get("beta", 1)
        return y + beta * added if beta else y

    def _einsum(self, args: tuple[Any, ...]) -> Tensor:
        equation, operands = args[0], operands_of_einsum(args)
        if not isinstance(equation, str):
            # torch writes an equation for axes by number before it dispatches, its compiler after
            self.refusals.refuse("its map is in an einsum without an equation")
        place = next(i for i, x in enumerate(operands) if self.history.find_map(x) is not None)
        step = self.history.find_map(operands[place])
        assert step is not None
        if keeps_map(equation, place):
            # the einsum mixes heads: its result is still a map
            mixed: Tensor = self._run(torch.einsum, args, {})
            self.history.follow(torch.einsum, (equation, *operands), {}, mixed)
            return mixed
        equations = product_equations(equation, place)
        if equations is None:
            self.refusals.refuse(f"its map is in an einsum that is not understood: {equation!r}")
        values = self._run(torch.einsum, (equations.values, operands[1 - place]), {})
        for axis in equations.shared:
            values = self._run(torch.unsqueeze, (values, axis), {})
        y = self.product.of_map(step, operands[place], values)
        return torch.einsum(equations.result, y)


class Trace(Watch):
    """A forward with the filter in its product.

    Args:
        module: the attention module; its filter is ``module.gfsa``.
        name: its name in errors.
        memory: what the proofs of the module have shown.
        verified: what they have shown of this call, the reason why they have not, or None for a
            class that tests have verified.
        wants_maps: whether attention weights that the module returns are looked at.
    """

    product: FilteredProduct

    def __init__(
        self,
        module: Any,
        name: str,
        memory: Memory,
        verified: Verified | str | None,
        wants_maps: bool,
    ) -> None:
        history, refusals = MapHistory(), Refusals(module, name)
        layout = verified.layout if isinstance(verified, Verified) else verified
        product = FilteredProduct(module.gfsa, layout, history, refusals, wants_maps, memory)
        super().__init__(product, history, refusals)

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            # on its way to the caller; kept here, it would keep the tensors of the forward
            self.refusals.error = None
        super().__exit__(*error)

    def end(self, result: Any) -> Any:
        """Check the forward after it ran; returns its result, with H where it has A."""
        if self.refusals.error is not None:
            # the module caught it
            raise self.refusals.error
        if not self.product.count:
            self.refusals.refuse(NO_PRODUCT)
        if self.product.late_refusal is not None:
            self.refusals.refuse(self.product.late_refusal)
        for check in checks_of(self.product.filter):
            # hooks inside of a compiled flex_attention do nothing
            check.called = True
        if self.product.filtered is None:
            return result
        return with_tensors(result, self.product.filtered_map)


NO_PRODUCT = (
    "its forward has no product of a softmax with values that torch dispatches (a softmax written "
    "out, a softmax over another axis, flex_attention, or an extension of its own)"
)


class _Reached(BaseException):
    """The forward has reached its product; no Exception, so that few modules catch it."""


class Rehearsal(Watch):
    """A forward up to its attention product, with gradients, on leaves in place of its inputs.

    The map has the scores in place of their softmax, so that an entry depends on its own query and
    key alone. What rescales whole rows or whole tensors is left out: sums of the map, and the
    statistics of norms.
    """

    def __init__(self, refusals: Refusals) -> None:
        super().__init__(self, MapHistory(), refusals)
        self.hidden = False
        """Whether a softmax is in an autograd function of the module's own."""
        # the scores, or queries and keys; the values; the shape of the map
        self.reached: tuple[tuple[Tensor, ...], Tensor, tuple[int, ...]] | None = None

    def take_dropout(self, matrix: Tensor, p: float, inplace: bool) -> bool:
        return True

    def of_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        grouped = args[4] if len(args) > 4 else kwargs.get("enable_gqa", False)
        lead = attention_lead(query, key, value, grouped)
        if not grouped:
            query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        self.reached = (query, key), value, (*lead, query.shape[-2], key.shape[-2])
        raise _Reached

    def of_flex(self, flex: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        return self.of_attention(query, key, value, enable_gqa=key.shape[1] < query.shape[1])

    def of_map(self, step: Step, matrix: Tensor, values: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        matrix, values = (x.expand(*lead, *x.shape[-2:]) for x in (matrix, values))
        self.reached = (matrix,), values, tuple(matrix.shape)
        raise _Reached

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _REQUIRES_GRAD:
            # flex_attention refuses gradients on a CPU, where this one ends before its kernels
            return False
        if func in _NORMS:
            return args[0] if args else kwargs["input"]
        if func in _SHIFTS and args:
            args = (args[0].detach(), *args[1:])
        return super()._run(func, args, kwargs)

    def _run_and_follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._run_and_follow(func, args, kwargs)
        step = self.history.find(result)
        if step is not None and not step.is_map:
            step.tensor = result.detach()
            return step.tensor
        return result

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if not _is_over_last(args, kwargs):
            result: Tensor = self._run(func, args, kwargs)
            return result
        scores = args[0] if args else kwargs["input"]
        self.hidden = self.hidden or not torch.is_grad_enabled()
        # a mask that is added to the scores hides no entry here
        scores = scores.masked_fill(scores.isinf(), -_MASKED)
        scores = scores.to(kwargs.get("dtype") or scores.dtype)
        self.history.start(scores)
        return scores


_UNPROVEN = (
    "how its queries and keys follow from its inputs could not be followed ({}), so whether they "
    "are the same tokens is unknown"
)

# numbers beyond this are those of a mask
_MASKED = 1e4


class Proven(NamedTuple):
    """What a proof has shown of one call: for its own sizes, and for any batch, or None."""

    verified: Verified
    for_any_batch: Verified | None


def prove(
    module: Any, inputs: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Proven | str:
    """Prove that a forward is attention of the module's tokens to themselves, or say why not.

    The forward runs up to its product, on a copy of the module and of its arguments. Random
    generators, buffers and a cache are afterwards as they were before.

    Args:
        module: the traced module.
        inputs: the tensors among the arguments that may hold tokens, by name.
        args, kwargs: the arguments.
    """
    found = _rehearse(module, inputs, (), args, kwargs)
    if not isinstance(found, Crossing):
        return found
    # another input may hold the same tokens, as in attention(x, x.clone())
    pairs = _equal_pairs(inputs, found.names)
    return _rehearse(module, inputs, pairs, args, kwargs) if pairs else found


def _equal_pairs(inputs: Mapping[str, Tensor], names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The pairs of inputs, among these names, that hold the same tokens."""
    firsts: list[str] = []
    pairs = []
    for name in sorted(names, key=list(inputs).index):
        same = (n for n in firsts if are_same_tokens(inputs[n], inputs[name]))
        first = next(same, None)
        if first is None:
            firsts.append(name)
        else:
            pairs.append((first, name))
    return tuple(pairs)


def _rehearse(
    module: Any,
    inputs: Mapping[str, Tensor],
    equal: tuple[tuple[str, str], ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Proven | str:
    """The proof by one rehearsal, in which ``equal`` inputs are one."""
    first = {second: first for first, second in equal}
    with ExitStack() as stack:
        stack.enter_context(same_random_numbers(inputs.values()))
        stack.enter_context(without_transforms())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_uncompiled())
        leaves: dict[str, Tensor] = {}
        by_id: dict[int, Tensor] = {}
        for key, x in inputs.items():
            if key in first:
                by_id[id(x)] = leaves[first[key]]
            elif id(x) not in by_id:
                leaves[key] = by_id[id(x)] = _leaf(x)
        rehearsal = Rehearsal(Refusals(module, ""))
        own = [_argument(value, by_id) for value in args]
        named = {key: _argument(value, by_id) for key, value in kwargs.items()}
        try:
            with rehearsal:
                module.run_untraced(_replica(module), own, named)
        except (_Reached, TraceError):
            # the forward itself raises such an error again
            pass
        except Exception as error:
            why = f"with gradients its forward raised {type(error).__name__}: {error}"
            return _UNPROVEN.format(why)
        if rehearsal.reached is None:
            return _UNPROVEN.format("its forward had no attention product when it was verified")
        hidden = rehearsal.hidden
        return _proof(leaves, *rehearsal.reached, hidden, module.gfsa.num_heads, equal)


_STANCE = threading.Lock()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Functions that are compiled run as they were written: a graph shows no tensors."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield


def _proof(
    leaves: Mapping[str, Tensor],
    scores: tuple[Tensor, ...],
    values: Tensor,
    shape: tuple[int, ...],
    hidden: bool,
    heads: int,
    equal: tuple[tuple[str, str], ...],
) -> Proven | str:
    """What gradients show of the product that a rehearsal has reached."""
    if shape[-2] != shape[-1]:
        return NOT_SQUARE.format(*shape[-2:])
    layouts = possible_layouts(shape, heads)
    if layouts and (0 in shape or values.numel() == 0 or values.is_meta):
        # nothing is computed, so any layout of these sizes will do
        return Proven(Verified(layouts[0], equal), None)
    for merged, layout in itertools.product((False, True), layouts):
        sides = [layout.split(x, heads) for x in (*scores, values)]
        evidence = Evidence(leaves, sides[:-1], sides[-1], hidden)
        if len(layouts) > 1 and not evidence.separates_lead(merged):
            continue
        refusal = evidence.refusal()
        if refusal is not None:
            return refusal
        general = layout.for_any_batch(shape, heads)
        return Proven(Verified(layout, equal), general and Verified(general, equal))
    return no_heads(shape, heads)


def _leaf(x: Tensor) -> Tensor:
    """A leaf with the values of x, but without zeros and masks: they would stop gradients."""
    x = value_of_one(x).detach()
    return torch.where((x != 0) & (x.abs() < _MASKED), x, noise_like(x)).requires_grad_()


def _argument(value: Any, leaves: Mapping[int, Tensor]) -> Any:
    """An argument of the forward for a rehearsal, which may write into it."""
    if isinstance(value, Tensor):
        leaf = leaves.get(id(value))
        return value_of_one(value).clone() if leaf is None else leaf.clone()
    if type(value) in (list, tuple):
        return type(value)(_argument(x, leaves) for x in value)
    if value is None or callable(value) or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    # a cache, say
    return copied(value)


def _replica(module: nn.Module) -> nn.Module:
    """A copy of a module and of those inside it, with the same weights and copies of its buffers.

    Weights that are zero stop gradients, so they are replaced. So are linear layers that may
    compute outside of torch, such as quantised ones.
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
        own.__dict__["_buffers"] = {
            n: b if b is None else value_of_one(b).clone() for n, b in buffers
        }
        if isinstance(inner, nn.Linear) and type(inner).forward is not nn.Linear.forward:
            own.__dict__["forward"] = functools.partial(_project, inner.out_features)
    return copies[module]


def _project(features: int, x: Tensor) -> Tensor:
    return F.linear(x, noise_like(x.new_empty(features, x.shape[-1])))


def _weight(weight: Tensor | None) -> Tensor | None:
    if weight is None or not weight.is_floating_point() or weight.dim() < 2:
        return weight
    weight = value_of_one(weight)
    if type(weight) not in (nn.Parameter, Tensor) or not weight.requires_grad or weight.is_meta:
        return weight
    zero = weight == 0
    return torch.where(zero, noise_like(weight), weight.detach()) if bool(zero.any()) else weight


def _is_over_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a softmax with these arguments is over the last axis."""
    x = args[0] if args else kwargs["input"]
    axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    return axis in (-1, x.dim() - 1)


def _written(y: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The product, in the tensor that the caller passed as ``out=``, if any."""
    out = kwargs.get("out")
    if out is None:
        return y
    if out.shape != y.shape:
        out.resize_(y.shape)
    out.copy_(y)
    written: Tensor = out
    return written


class ProductEquations(NamedTuple):
    """An einsum of a map with values as three steps, of which the second is ``A·v``.

    Args:
        values: the einsum that gives the values the axes ``(lead of the map, keys, features)``,
            without those of the lead that they share, such as the heads of multi-query attention.
        shared: the axes that are missing, in order: the values get one of size 1 for each.
        result: the einsum that gives ``A·v`` the axes of the result.
    """

    values: str
    shared: tuple[int, ...]
    result: str


def operands_of_einsum(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of ``torch.einsum(*args)``, which takes them one by one or as a list."""
    operands = args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        return tuple(operands[0])
    return operands


def keeps_map(equation: str, place: int) -> bool:
    """Whether the result is still a map: both axes of the operand at ``place`` are in it."""
    inputs, arrow, out = _parts(equation)
    return bool(arrow) and set(inputs[place][-2:]) <= set(out)


def product_equations(equation: str, place: int) -> ProductEquations | None:
    """The steps of a product of the map at ``place`` with values, or None if it is another."""
    inputs, arrow, out = _parts(equation)
    if len(inputs) != 2 or not arrow or "." in equation:
        return None
    of_map, of_values = inputs[place], inputs[1 - place]
    lead, row, column = of_map[:-2], of_map[-2], of_map[-1]
    features = [letter for letter in of_values if letter not in of_map]
    if len(features) != 1 or column not in of_values or row in of_values:
        return None
    own = "".join(letter for letter in lead if letter in of_values)
    return ProductEquations(
        values=f"{of_values}->{own}{column}{features[0]}",
        shared=tuple(axis for axis, letter in enumerate(lead) if letter not in of_values),
        result=f"{lead}{row}{features[0]}->{out}",
    )


def _parts(equation: str) -> tuple[list[str], str, str]:
    """The letters of each operand, the arrow if there is one, and the letters of the result."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    return inputs.split(","), arrow, out
