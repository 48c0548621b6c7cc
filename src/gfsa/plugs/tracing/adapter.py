"""Attention that no adapter knows: traced on request, refused with a reason otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gfsa.plugs.adapter import CHILD, HEADS, Adapter, heads_of, refusal_of_own_forward
from gfsa.plugs.cross_attention import REASON, Owners, crosses_by_design
from gfsa.plugs.tracing.candidates import (
    looks_like_attention,
    may_be_attention,
    refusal_by_class_name,
    refusal_by_code,
)
from gfsa.plugs.tracing.memory import Call, TraceMemory
from gfsa.plugs.tracing.refusals import TraceError
from gfsa.plugs.tracing.trace import Trace
from gfsa.plugs.tracing.verification import NewPathError

__all__ = [
    "DOUBTFUL",
    "KNOWN_TRACER",
    "TRACER",
    "UNKNOWN",
    "TraceError",
    "looks_like_attention",
    "may_be_attention",
]


class Traced(nn.Module):
    """Mixed into the class of a traced module: its forward runs under a :class:`Trace`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        memory: TraceMemory = self.__dict__["_gfsa_memory"]
        given = {**dict(zip(self.__dict__["_gfsa_inputs"], args, strict=False)), **kwargs}
        if torch.compiler.is_compiling() and not (memory.known or memory.has_begun(given)):
            from gfsa.plugs.tracing.uncompiled import follow

            return follow(self, given, args, kwargs)
        if memory.known:
            return self.run_traced(given, False, args, kwargs)
        if not torch.compiler.is_compiling() and (
            self._changes_state(given) or memory.expects_new_path(Call.of(given, self.training))
        ):
            return self.run_traced(given, True, args, kwargs)
        try:
            return self.run_traced(given, False, args, kwargs)
        except NewPathError:
            # a path is known only after the forward has taken it, so a forward on a new path runs
            # again, followed; after a graph break this is reached in compiled code, too
            return self.run_traced(given, True, args, kwargs)

    def _changes_state(self, given: Mapping[str, Any]) -> bool:
        """Whether running the forward twice would change state twice.

        A forward on a new path is interrupted and run again, now followed. If the first attempt
        has already updated a cache, or the running statistics of batch norm, the second would
        update them again. Such forwards are followed from the start: those that are given an object
        which is no plain data, and training forwards of modules with buffers. Following costs
        Python time for each operation of the forward. State in other attributes of the module is
        not seen, and a forward on a new path changes it twice.
        """
        if self.training and _has_buffers(self):
            return True
        return not all(map(_is_plain, given.values()))

    def run_traced(self, given: Any, follow: bool, args: Any, kwargs: Any) -> Any:
        """The module's own forward under a trace, which follows its inputs or relies on memory."""
        name = self.__dict__.get("_gfsa_name") or type(self).__name__
        adapter: TracerAdapter = self.__dict__["_gfsa_adapter"]
        wants_maps = adapter.wants_maps(self, given)
        trace = Trace(self, name, self.__dict__["_gfsa_memory"], given, follow, wants_maps)
        trace.begin()
        with trace:
            result = super().forward(*args, **kwargs)
        result = trace.end(result)
        if follow:
            trace.memory.note(Call.of(given, self.training), trace.recorder.path())
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # the class is created at run time, so copies and pickles refer to the original class
        reduced: Any = super().__reduce_ex__(2)
        return _new, (self.__dict__["_gfsa_class"],), *reduced[2:]


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


def _has_buffers(module: nn.Module) -> bool:
    """Whether a module has buffers beside those of its filter."""
    return any(not name.startswith(f"{CHILD}.") for name, _ in module.named_buffers())


def _is_plain(value: Any) -> bool:
    """Whether a value is data that a forward reads, and no object that it may change."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    plain = (torch.Tensor, str, int, float, torch.dtype, torch.device)
    return value is None or isinstance(value, plain)


@functools.cache
def _traced(cls: Any) -> type[nn.Module]:
    return type(f"Traced{cls.__name__}", (Traced, cls), {"__module__": cls.__module__})


def _new(cls: type[nn.Module]) -> nn.Module:
    traced = _traced(cls)  # type: ignore[arg-type]
    return traced.__new__(traced)


class TracerAdapter(Adapter):
    """Follows a module's softmax to its product with v, and its inputs to queries, keys and values.

    The module's own forward runs. It must contain exactly one attention product, whose map is over
    the tokens of one input; otherwise the forward raises a :class:`TraceError` that names the
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
                f"({', '.join(HEADS)}); set module.num_heads = <its number of heads>, or "
                "gfsa.register_adapter a TracerAdapter whose num_heads returns it"
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
        module.__dict__["_gfsa_class"] = type(module)
        traced = _traced(type(module))  # type: ignore[arg-type]
        module.__class__ = traced
        module.__dict__["_gfsa_memory"] = TraceMemory(self.known)
        # looked up here, not in a forward that may be compiled
        inputs = inspect.signature(module.__dict__["_gfsa_class"].forward).parameters
        module.__dict__["_gfsa_inputs"] = tuple(inputs)[1:]

    def remove(self, module: nn.Module) -> None:
        module.__class__ = module.__dict__.pop("_gfsa_class")
        del module.__dict__["_gfsa_memory"], module.__dict__["_gfsa_inputs"]
        module.__dict__.pop("_gfsa_name", None)

    def mark(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, Traced):
                module.__dict__["_gfsa_name"] = name


class UnknownAdapter(TracerAdapter):
    """Refuses attention that no adapter knows, if the caller did not ask for tracing."""

    def refusal(self, name: str, module: nn.Module) -> str | None:
        return super().refusal(name, module) or (
            f"no adapter knows {type(module).__name__}; with unknown='trace' gfsa follows its "
            "softmax, gfsa.register_adapter teaches gfsa the class"
        )


class DoubtfulAdapter(TracerAdapter):
    """Refuses modules with a softmax that may be attention or something else."""

    def refusal(self, name: str, module: nn.Module) -> str | None:
        kind = type(module).__name__
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


TRACER = TracerAdapter()
"""The adapter that traces a class of attention: ``gfsa.register_adapter(MyAttention, TRACER)``."""

KNOWN_TRACER = KnownTracerAdapter()
UNKNOWN = UnknownAdapter()
DOUBTFUL = DoubtfulAdapter()
