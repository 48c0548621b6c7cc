"""Attention that no adapter knows: traced on request, refused with a reason otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.operators.call import check_kinds
from gfsa.plugs.adapter import (
    ADAPTER,
    CLASS,
    HEADS,
    NAME,
    Adapter,
    heads_of,
    refusal_of_own_forward,
)
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
from gfsa.plugs.tracing.product import Trace
from gfsa.plugs.tracing.rehearsal import Memory, Verified, prove

# arguments of known classes that may hold the tokens of another sequence
_MAY_BE_OTHER_TOKENS = (*OTHER_SEQUENCE, "key", "memory", "q_global")


class Traced(nn.Module):
    """Mixed into the class of a traced module: its forward runs under a :class:`Trace`."""

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
            verified = self._verified(memory, inputs, given, args, kwargs)
        if isinstance(verified, Verified):
            for first, second in verified.equal_inputs:
                require_same_tokens(self, inputs[first], inputs[second])
        wants_maps = adapter.wants_maps(self, given)
        with Trace(self, self.__dict__.get(NAME, ""), verified, wants_maps) as trace:
            result = super().forward(*args, **kwargs)
        return trace.end(result)

    def _verified(
        self,
        memory: Memory,
        inputs: Mapping[str, Tensor],
        given: Mapping[str, Any],
        args: Any,
        kwargs: Any,
    ) -> Verified | str:
        """What is proven of this call: now, or by an earlier one with the same signature."""
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

    own = [(n, described(x)) for n, x in vars(module).items() if not n.startswith("_gfsa")]
    return tuple(own)


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

    The module's own forward runs. It must contain exactly one attention product, whose map is over
    the tokens of one input; otherwise the forward raises a ``TraceError`` that names the
    module. Attention weights that the module returns are those of the filter.
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
