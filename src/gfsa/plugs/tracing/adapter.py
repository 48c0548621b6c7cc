"""Attention that no adapter knows: traced on request, refused with a reason otherwise.

A traced module's own forward runs under a :class:`Trace`, with the filter in its one product.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator
from gfsa.operators.call import check_kinds
from gfsa.operators.operator import FunctionOperator
from gfsa.plugs.adapter import (
    ADAPTER,
    CLASS,
    HEADS,
    NAME,
    Adapter,
    heads_of,
    refusal_of_own_forward,
)
from gfsa.plugs.checks.called import checks_of
from gfsa.plugs.checks.proof import (
    OTHER_SEQUENCE,
    REASON,
    has_no_values,
    is_transformed,
    require_same_tokens,
)
from gfsa.plugs.tracing.candidates import (
    Owners,
    crosses_by_design,
    looks_like_attention,
    refusal_by_class_name,
    refusal_by_code,
)
from gfsa.plugs.tracing.capture import (
    NOT_SQUARE,
    HeadLayout,
    Memory,
    Step,
    Verified,
    Watch,
    no_heads,
    prove,
)

NO_PRODUCT = (
    "its forward has no product of a softmax with values that torch dispatches (a softmax written "
    "out, a softmax over another axis, or an extension of its own)"
)
_BROKEN = (
    "torch.compile breaks the graph inside of its forward, and the parts that it compiles on their "
    "own cannot be followed"
)


class Trace(Watch):
    """A forward with the filter ``module.gfsa`` in its product.

    ``verified`` is what is proven of this call, the reason why it is not, or None for a class that
    tests have verified. ``wants_maps``: whether attention weights that the module returns count.
    """

    def __init__(
        self, module: Any, name: str, verified: Verified | str | None, wants_maps: bool
    ) -> None:
        super().__init__(module, name)
        self.filter: GraphFilter = module.gfsa
        self.memory: Memory = module.__dict__["_gfsa_memory"]
        self.verified = verified
        self.wants_maps = wants_maps
        self.compiling = torch.compiler.is_compiling()
        # how many products the forward has had so far
        self.count = 0
        self.dropout_p = 0.0
        self.is_dropped = False
        self.layout = HeadLayout(0, -3)
        # why the forward is refused once it has ended
        self.late_refusal: str | None = NO_PRODUCT
        # the map that multiplied the values, with its heads apart, its shape there, the values
        self.filtered: tuple[Step, Tensor, torch.Size, Tensor] | None = None

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            # on its way to the caller; kept here, it would keep the tensors of the forward
            self.error = None
        super().__exit__(*error)

    def end(self, result: Any) -> Any:
        """Check the forward after it ran; returns its result, with H where it has A."""
        if self.error is not None:
            # the module caught it
            raise self.error
        if self.late_refusal is not None:
            self.refuse(self.late_refusal)
        for check in checks_of(self.filter):
            # hooks inside of a compiled flex_attention do nothing
            check.called = True
        return result if self.filtered is None else self._with_filtered_maps(result)

    def takes_dropout(self, p: float) -> bool:
        # entries of H are dropped instead, if the filter's dropout comes after it
        if self.filter.dropout_after != "filter":
            self.is_dropped = True
            return False
        self.dropout_p = p
        return True

    def of_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **options: Any
    ) -> Tensor:
        layout = self._verify((*query.shape[:-1], key.shape[-2]))
        heads, shape = self.filter.num_heads, query.shape
        query, key, value = (layout.split(x, heads) for x in (query, key, value))
        if mask is not None and mask.dim() > 2:
            mask = layout.split(mask[(None,) * (len(shape) - mask.dim())], heads)
        options["dropout_after"] = self.filter.dropout_after
        operator = AttentionOperator(query, key, mask, *args, **options)
        return layout.join(self.filter(operator, value), heads, shape)

    def of_flex(self, flex: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        # torch compiles this call even where nothing else is; it would hide an error of ours
        compiling = self.compiling or torch.compiler.is_compiling()
        self.late_refusal = self._refusal((*query.shape[:-1], key.shape[-2]), compiling)
        if self.late_refusal is not None:
            return flex(query, key, value, *args)
        layout, heads, shape = self.layout, self.filter.num_heads, value.shape
        calls: list[Any] = []

        def apply(x: Tensor) -> Tensor:
            # flex_attention is linear in v, so each power is a call of it
            calls.append(flex(query, key, layout.join(x, heads, shape), *args))
            return layout.split(calls[-1][0], heads)

        y = self.filter(FunctionOperator(apply), layout.split(value, heads))
        # the sums of the rows' exponentials, and their largest scores
        return layout.join(y, heads, shape), *calls[0][1:]

    def of_map(self, step: Step, matrix: Tensor, values: Tensor) -> Tensor:
        layout = self._verify(matrix.shape)
        heads, shape = self.filter.num_heads, values.shape
        self._check_rows(matrix)
        split = layout.split(matrix, heads)
        operator = DenseOperator(split, self.dropout_p, self.filter.dropout_after)
        values = self.filter.mixed(operator, layout.split(values, heads))
        if self.wants_maps:
            self.filtered = step, split, matrix.shape, values
        return layout.join(self.filter(operator, values), heads, shape)

    def _check_rows(self, matrix: Tensor) -> None:
        """Warn once if the map takes no averages: its powers may then grow or vanish."""
        # entries that were dropped are missing in their row
        if self.memory.rows_checked or self.is_dropped or self.compiling:
            return
        if matrix.is_meta or has_no_values(matrix):
            return
        self.memory.rows_checked = True
        sums = matrix.detach().sum(-1, dtype=torch.float32)
        # a fully masked row may be zeros
        off = torch.where(sums == 0, 0.0, (sums - 1).abs())
        if bool((off > 1e-2).any()):
            warnings.warn(
                f"the rows of the attention map of {self.name} do not sum to one (by up to "
                f"{off.max().item():.3g}); the filter uses the map as it is",
                stacklevel=2,
            )

    def _verify(self, scores: Sequence[int]) -> HeadLayout:
        refusal = self._refusal(scores, self.compiling)
        if refusal is not None:
            self.refuse(refusal)
        return self.layout

    def _refusal(self, scores: Sequence[int], compiling: bool) -> str | None:
        """Why a product with a map of this shape cannot be filtered; if it can, sets the layout."""
        if torch.compiler.is_compiling() is not compiling:
            return _BROKEN
        self.late_refusal = None
        self.count += 1
        if self.count > 1:
            return "its forward has more than one attention product"
        if scores[-2] != scores[-1]:
            return NOT_SQUARE.format(*scores[-2:])
        verified = self.verified
        if isinstance(verified, str):
            return verified
        self.layout = HeadLayout(len(scores), -3) if verified is None else verified.layout
        heads = self.filter.num_heads
        return None if self.layout.fits(scores, heads) else no_heads(scores, heads)

    def _with_filtered_maps(self, result: Any) -> Any:
        """What a module returned, with H in place of A; dicts are changed in place."""
        if isinstance(result, Tensor):
            return self._filtered_map(result)
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*map(self._with_filtered_maps, result))
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._with_filtered_maps, result))
        if isinstance(result, dict):
            for key in list(result):
                result[key] = self._with_filtered_maps(result[key])
        return result

    def _filtered_map(self, x: Tensor) -> Tensor:
        """H in place of ``x``, if that is an attention map that the module returns."""
        own = self.find(x)
        if own is None or self.filtered is None:
            return x
        # built here, because H costs a product of maps and few modules return them
        step, split, shape, values = self.filtered
        new = self.filter.map(DenseOperator(split), values).to(split.dtype)
        new = self.layout.join(new, self.filter.num_heads, shape)
        returned = _transferred(new, step, own) if new.shape == step.tensor.shape else None
        if returned is None:
            self.refuse(
                "it returns attention weights that are not the map that multiplies its values, or "
                "have it in another order, so there is no filtered map in their place. Do not ask "
                "it for attention weights"
            )
        return returned.to(x.dtype)


# operations that a map goes through on its way to the product, and that leave its entries in order
_IN_ORDER = {
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
    "ravel", "dropout", "to", "type", "type_as", "float", "half", "bfloat16", "double", "clone",
    "contiguous", "masked_fill", "masked_fill_", "nan_to_num", "where", "mul", "mul_", "__mul__",
    "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__",
}  # fmt: skip


def _transferred(new: Tensor, at: Step, to: Step) -> Tensor | None:
    """What ``to`` would have been if ``at`` had been ``new``, or None if that is unknown.

    A map before the product, with entries of its own, stands for the map of the product.
    """
    back, forth = at.ancestors(), to.ancestors()
    common = next((step for step in back if step in forth), None)
    if common is None:
        return None
    before, after = back[: back.index(common)], forth[: forth.index(common)]
    if not all(step.is_map and _keeps_order(step) for step in before):
        return None
    new = new.reshape(common.tensor.shape)
    for step in reversed(after):
        if not before or not step.is_map:
            new = step.redo(new)
        elif _keeps_order(step):
            new = new.reshape(step.tensor.shape)
        else:
            return None
    return new


def _keeps_order(step: Step) -> bool:
    return getattr(step.func, "__name__", "") in _IN_ORDER


# arguments of known classes that may hold the tokens of another sequence
_MAY_BE_OTHER_TOKENS = (*OTHER_SEQUENCE, "key", "memory", "q_global")


class Traced(nn.Module):
    """Mixed into the class of a traced module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        memory: Memory = self.__dict__["_gfsa_memory"]
        adapter: TracerAdapter = self.__dict__[ADAPTER]
        given = {**dict(zip(memory.inputs, args, strict=False)), **kwargs}
        check_kinds(**{k: v for k, v in given.items() if isinstance(v, torch.fx.Proxy)})
        inputs = inputs_of(given)
        verified: Verified | str | None = None
        if adapter.known:
            # nothing is proven here: another sequence shows by the name of its argument
            tokens = next(iter(inputs.values()), None)
            for other in map(given.get, _MAY_BE_OTHER_TOKENS):
                if isinstance(other, Tensor) and tokens is not None:
                    require_same_tokens(self, tokens, other)
        elif torch.compiler.is_compiling():
            verified = memory.for_any_batch.get(_kind(inputs, given))
            if verified is None:
                from gfsa.plugs.tracing.uncompiled import run

                return run(self, args, kwargs)
        else:
            verified = self._verified(inputs, given, args, kwargs)
        if isinstance(verified, Verified):
            for first, second in verified.equal_inputs:
                require_same_tokens(self, inputs[first], inputs[second])
        wants_maps = adapter.wants_maps(self, given)
        with Trace(self, self.__dict__.get(NAME, ""), verified, wants_maps) as trace:
            result = super().forward(*args, **kwargs)
        return trace.end(result)

    def _verified(
        self, inputs: Mapping[str, Tensor], given: Mapping[str, Any], args: Any, kwargs: Any
    ) -> Verified | str:
        """What is proven of this call: now, or by an earlier one with the same signature."""
        memory: Memory = self.__dict__["_gfsa_memory"]
        kind = _kind(inputs, given)
        signature = (kind, *map(_described, given.values()), _state(self))
        if signature in memory.verified:
            return memory.verified[signature]
        if is_transformed() or any(map(has_no_values, inputs.values())):
            return memory.for_any_batch.get(kind, _UNREADABLE)
        proven = prove(self, inputs, args, kwargs)
        if isinstance(proven, Verified):
            memory.keep(signature, kind, proven)
        return proven

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # the class is created at run time, so copies and pickles refer to the original class
        reduced: Any = super().__reduce_ex__(2)
        return _new, (self.__dict__[CLASS],), *reduced[2:]


def _refusal_of_switched(owner: nn.Module) -> str | None:
    """Why a block cannot be plugged that has other attention than its config builds."""
    now = getattr(owner, "attention_type", None)
    built = getattr(getattr(owner, "config", None), "attention_type", None)
    if not (isinstance(now, str) and isinstance(built, str)) or now == built:
        return None
    return (
        f"a short input switched it to {now!r} attention, while its config says {built!r}, so its "
        f"filter could not be loaded again; build the model with attention_type={now!r}"
    )


def inputs_of(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a forward's arguments that may hold tokens, by name."""
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            found[name] = value
        elif isinstance(value, (list, tuple)):
            found |= inputs_of({f"{name}[{i}]": x for i, x in enumerate(value)})
    return found


def _kind(inputs: Mapping[str, Tensor], given: Mapping[str, Any]) -> Hashable:
    """What a call is without its sizes: its inputs, and the flags that the caller set."""
    kind = []
    for name, x in inputs.items():
        # a tensor may be two inputs
        first = next(first for first, other in inputs.items() if other is x)
        kind.append(f"{name}:{x.dim()}={first}")
    # a flag that is off is as one that is not given
    flags = [f"{n}={x}" for n, x in given.items() if isinstance(x, (bool, str)) and x]
    return *kind, *flags


def _described(value: Any) -> Hashable:
    """An argument as a part of the signature of its call."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__


def _state(module: nn.Module) -> Hashable:
    """What a module keeps and may choose a path through its forward by; numbers may be counters."""

    def described(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_floating_point():
            # an index, say
            return id(value)
        return value if isinstance(value, (bool, str)) else type(value)

    own = vars(module).items()
    return tuple((name, described(x)) for name, x in own if not name.startswith("_gfsa"))


_UNREADABLE = (
    "whether queries and keys are the same tokens has not been verified for these inputs, which "
    "takes values of tensors, and they cannot be read now. Run one forward without graph capture "
    "and without torch.func first"
)


@functools.cache
def _traced(cls: Any) -> type[nn.Module]:
    return type(f"Traced{cls.__name__}", (Traced, cls), {"__module__": cls.__module__})


def _new(cls: type[nn.Module]) -> nn.Module:
    traced = _traced(cls)  # type: ignore[arg-type]
    return traced.__new__(traced)


class TracerAdapter(Adapter):
    """Follows a module's softmax to its product with v, and its inputs to queries, keys and values.

    The module's own forward runs. It raises a ``TraceError`` unless it has exactly one attention
    product, whose map is over the tokens of one input. Weights that it returns are the filter's.
    """

    how = "tracer"

    #: whether tests have verified the class, so that no forward has to
    known = False

    def num_heads(self, module: nn.Module) -> int:
        heads = heads_of(module)
        assert heads is not None
        return heads

    def refusal(self, name: str, module: nn.Module) -> str | None:
        refusal = refusal_by_class_name(module) or refusal_of_own_forward(module)
        counts = type(self).num_heads is not TracerAdapter.num_heads
        if refusal is None and not counts and heads_of(module) is None:
            return (
                f"{type(module).__name__} has no attribute with its number of heads "
                f"({', '.join(HEADS)}); set module.num_heads = <its number of heads> and plug(..., "
                "unknown='trace'), or gfsa.register_adapter a TracerAdapter whose num_heads "
                "returns it"
            )
        return refusal or (None if self.known else refusal_by_code(module))

    def refusal_inside(self, owners: Owners) -> str | None:
        owner = owners[0][0] if owners else None
        crosses = getattr(owner, "is_cross_attention", False) is True
        if crosses or crosses_by_design(owners):
            return REASON
        return next(filter(None, (_refusal_of_switched(owner) for owner, _ in owners)), None)

    def wants_maps(self, module: nn.Module, given: Mapping[str, Any]) -> bool:
        """Whether the caller of this forward looks at attention weights that it returns."""
        return True

    def install(self, module: nn.Module) -> None:
        # looked up here, not in a forward that may be compiled
        inputs = tuple(inspect.signature(type(module).forward).parameters)[1:]
        module.__dict__["_gfsa_memory"] = Memory(inputs)
        module.__dict__[CLASS] = type(module)
        module.__class__ = _traced(type(module))  # type: ignore[arg-type]

    def remove(self, module: nn.Module) -> None:
        module.__class__ = module.__dict__.pop(CLASS)
        del module.__dict__["_gfsa_memory"]


class UnknownAdapter(TracerAdapter):
    """Refuses attention that is not to be traced, and modules that may be attention."""

    def refusal(self, name: str, module: nn.Module) -> str | None:
        kind = type(module).__name__
        if looks_like_attention(module):
            return super().refusal(name, module) or (
                f"no adapter knows {kind}; with unknown='trace' gfsa follows its softmax, "
                "gfsa.register_adapter teaches gfsa the class"
            )
        if heads_of(module) is None:
            return (
                f"{kind} has a projection and a softmax, but neither its name nor a number of "
                "heads shows that it is self-attention; if it is, set the number "
                "(module.num_heads = <its number of heads>) and plug(..., unknown='trace')"
            )
        return (
            f"{kind} has heads and a softmax, but neither its name nor its projections show that "
            f"it is self-attention; if it is, gfsa.register_adapter({kind}, TRACER) with TRACER "
            "from gfsa.plugs.tracing.adapter traces it"
        )


class KnownTracerAdapter(TracerAdapter):
    """Traces classes that the tests have verified, so no forward has to follow their axes."""

    how = "tracer, known class"
    known = True

    def num_heads(self, module: nn.Module) -> int:
        # a module of litgpt has its number in its config
        heads = heads_of(module, getattr(module, "config", None))
        assert heads is not None
        return heads


TRACER = TracerAdapter()
"""The adapter that traces a class of attention: ``gfsa.register_adapter(MyAttention, TRACER)``."""

KNOWN_TRACER = KnownTracerAdapter()
UNKNOWN = UnknownAdapter()
