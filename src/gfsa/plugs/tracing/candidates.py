"""Which modules seem to be attention, and which of them cannot be traced, by their code alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from gfsa.plugs.adapter import heads_of
from gfsa.plugs.cross_attention import REASON

_NAMED = re.compile(r"att(entio)?n|mha\b|mh?sa\b|gpsa\b|xca\b", re.IGNORECASE)
_PROJECTIONS = {
    "qkv", "to_qkv", "qkv_proj", "in_proj", "wqkv", "query_key_value", "c_attn", "qk", "kv",
    "q", "query", "q_proj", "query_proj", "to_q", "wq", "w_q", "q_linear",
}  # fmt: skip
_KEYS = {"k", "key", "keys", "key_states"}
_VALUES = {"v", "value", "values", "value_states"}
_ATTENTION_CALLS = {"softmax", "Softmax", "scaled_dot_product_attention"}

# class names of attention that has no n×n map over tokens, and the refusal for each
_WITHOUT_MAP = {
    r"channel|xca|crosscovariance": "its attention is over channels, not tokens",
    r"class_?att": "class attention has one query: its map is not square",
    r"pool": "pooling attention has learned queries: its map is not square",
    r"cross": REASON,
    r"longformer|ledencoder|blocksparse|lsh": "its map is kept in bands or blocks, not as a square",
    r"outlook": "its map is predicted from one token, not from pairs of tokens",
    r"linear|performer|additive|sgformer|polynormer|lite|factor": (
        "linear attention has no n×n map that could be taken to a power here"
    ),
}


def looks_like_attention(module: nn.Module) -> bool:
    """Whether ``module`` seems to compute attention, and no module inside it does."""
    return _seems_attention(module) and not any(
        _seems_attention(inner) for inner in module.modules() if inner is not module
    )


def _seems_attention(module: nn.Module) -> bool:
    """Two of three signs: a name like attention, projections to q, a number of heads."""
    named = _NAMED.search(type(module).__name__) is not None
    projects = any(name.lower() in _PROJECTIONS for name, _ in module.named_children())
    has_heads = heads_of(module) is not None
    return (has_heads and (named or projects)) or (named and projects)


def refusal_by_class_name(module: nn.Module) -> str | None:
    """Why a module cannot be filtered, judging by the name of its class, or None."""
    name = type(module).__name__.lower()
    return next((why for pattern, why in _WITHOUT_MAP.items() if re.search(pattern, name)), None)


def refusal_by_code(module: nn.Module) -> str | None:
    """Why a module cannot be traced, judging by its code, or None."""
    kind = type(module).__name__
    if not computes_softmax(module):
        return (
            f"{kind} computes no softmax and calls no attention of torch: it has no attention map "
            "that could be followed to its product with v"
        )
    inputs = {name.lower() for name in _inputs_of(module)}
    if inputs & _KEYS and inputs & _VALUES and not _projects_tokens(module):
        return (
            f"{kind} is given queries, keys and values that were projected outside it, so whether "
            "they come from the same tokens cannot be followed"
        )
    return None


def computes_softmax(module: nn.Module) -> bool:
    """Whether the code of a module, or of what it calls, has a softmax or torch's attention.

    Mixers of other kinds (state spaces, Fourier transforms, linear attention) have heads, too.
    """
    for inner in module.modules():
        if isinstance(inner, nn.Softmax):
            return True
        given = vars(inner).values()
        if any(getattr(value, "__name__", None) in _ATTENTION_CALLS for value in given):
            return True
        seen: set[CodeType] = set()
        for function in _methods(inner):
            if any(_ATTENTION_CALLS & set(code.co_names) for code in _codes(function, seen)):
                return True
    return False


def _inputs_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]


def _projects_tokens(module: nn.Module) -> bool:
    """Whether a module has weights that could make queries or keys: more than an output layer."""
    own = [child for child in module.children() if any(True for _ in child.parameters())]
    return len(own) > 1 or any(True for _ in module.parameters(recurse=False))


def _methods(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of a module's class that were not written for nn.Module, and its own."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        for value in vars(cls).values():
            function = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
            if isinstance(function, FunctionType):
                yield function
    for value in vars(module).values():
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield function


def _codes(function: FunctionType, seen: set[CodeType], depth: int = 3) -> Iterator[CodeType]:
    """The code of a function, of functions inside it, and of those that it calls by name."""
    pending: list[CodeType] = [function.__code__]
    while pending:
        code = pending.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for name in code.co_names if depth else ():
            called: Any = function.__globals__.get(name)
            if isinstance(called, FunctionType) and not called.__module__.startswith("torch."):
                yield from _codes(called, seen, depth - 1)
