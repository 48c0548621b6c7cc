"""Which modules seem to be attention, and which of them cannot be filtered, by code and names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from gfsa.plugs.adapter import heads_of
from gfsa.plugs.checks.proof import REASON

Owners = Sequence[tuple[nn.Module, str]]
"""The modules that contain a module, innermost first, each with the attribute that leads to it."""

_NAMED = re.compile(r"att(entio)?n|mha\b|[ms]h?sa\b|gpsa\b|xca\b", re.IGNORECASE)
_PROJECTIONS = {
    "qkv", "to_qkv", "qkv_proj", "in_proj", "wqkv", "query_key_value", "c_attn", "qk", "kv",
    "q", "query", "q_proj", "query_proj", "to_q", "wq", "w_q", "q_linear",
}  # fmt: skip
_KEYS = {"k", "key", "keys", "key_states"}
_VALUES = {"v", "value", "values", "value_states"}
# by how much some attention has fewer queries or keys than tokens
_REDUCTIONS = (
    "q_stride", "query_stride", "sr_ratio", "sequence_reduction_ratio",
    "sequences_reduction_ratio", "spatial_reduction_ratio",
)  # fmt: skip
# children whose strides say the same (the last is of CvT)
_POOLS = ("pool_q", "pool_k", "pool_v", "sr", "convolution_projection_key")
# a fixed number of keys: at one size of image that may be the number of tokens
_FIXED = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_ATTENTION_CALLS = {"softmax", "Softmax", "scaled_dot_product_attention", "flex_attention"}

# class names of attention that has no n×n map over tokens, and the refusal for each
_WITHOUT_MAP = {
    r"channel|xca|crosscovariance": "its attention is over channels, not tokens",
    r"class_?att": "class attention has one query: its map is not square",
    r"downsample|attentionsubsample": "its queries are fewer than its tokens",
    r"deformable": "its keys are sampled between tokens: it has no map of tokens × tokens",
    r"neighborhood": "its map is kept by neighbourhood, not as a square",
    r"probsparse": "its queries are a choice of its tokens, in another order than its keys",
    r"autoformer": "auto-correlation has no map of tokens × tokens",
    r"ngram": "it has several streams of queries, whose maps are not square",
    r"attentionmap": "it returns a map and multiplies no values by it",
    r"bimultihead|assign|sequencecompressor": REASON,
    r"cross": REASON,
    r"longformer|ledencoder|blocksparse|lsh|longt5(local|transient)|globallocal"
    r"|gemma\d\w*audio|^localselfattention$": "its map is kept in bands or blocks, not as a square",
    r"nystrom": "its map is a product of three maps to and from landmarks",
    r"lilt": "its text and its layout attend with a map each",
    r"invariantpoint": "one map multiplies values, points and pairs",
    r"outlook": "its map is predicted from one token, not from pairs of tokens",
    r"linear|performer|additive|sgformer|polynormer|lite|factor": (
        "linear attention has no n×n map that could be taken to a power here "
        "(gfsa.linear_graph_filter_attention filters Efficient Attention)"
    ),
}


def looks_like_attention(module: nn.Module) -> bool:
    """Whether ``module`` seems to compute attention, and no module inside it does."""
    return _seems_attention(module) and not any(
        _seems_attention(inner) for inner in module.modules() if inner is not module
    )


def may_be_attention(module: nn.Module) -> bool:
    """Whether ``module`` has a softmax, and heads or projections, but not both and no name."""
    return (
        (heads_of(module) is not None or _projects(module))
        and _has_softmax(type(module))
        and not any(_seems_attention(inner) for inner in module.modules())
    )


def _seems_attention(module: nn.Module) -> bool:
    """Two of three signs: a name like attention, projections to q, a number of heads.

    Beside a name alone, a softmax in the code is enough; reading it takes longer than the others.
    """
    signs = _projects(module), heads_of(module) is not None
    if _NAMED.search(type(module).__name__):
        return any(signs) or _has_softmax(type(module))
    return all(signs)


def _projects(module: nn.Module) -> bool:
    """Whether a module has a child that is named as a projection to queries."""
    return any(name.lower() in _PROJECTIONS for name, _ in module.named_children())


def refusal_by_class_name(module: nn.Module) -> str | None:
    """Why a module cannot be filtered, judging by the name of its class, or None."""
    name = type(module).__name__.lower()
    found = (why for pattern, why in _WITHOUT_MAP.items() if re.search(pattern, name))
    return next(found, None) or refusal_of_pooling(module)


def refusal_of_pooling(module: nn.Module) -> str | None:
    """Why attention that pools tokens cannot be filtered, or None."""
    # a name with "pool" does not show it alone
    owns_query = any(p.dim() > 1 for p in module.parameters(recurse=False))
    if "pool" in type(module).__name__.lower() and owns_query:
        return "pooling attention has learned queries: its map is not square"
    return None


def refusal_by_code(module: nn.Module) -> str | None:
    """Why a module cannot be traced, judging by its code, or None."""
    kind = type(module).__name__
    if not computes_softmax(module):
        return (
            f"{kind} calls neither softmax nor scaled_dot_product_attention, whose map could be "
            "followed to its product with v; for a kernel of your own, gfsa.register_adapter "
            "teaches gfsa the class"
        )
    if (reduction := refusal_of_reduction(module)) is not None:
        return reduction
    if getattr(module, "use_global", False) is True:
        return f"the queries of {kind} are given to it, and are other tokens than its keys"
    inputs = {name.lower() for name in inspect.signature(type(module).forward).parameters}
    own = [child for child in module.children() if any(True for _ in child.parameters())]
    # more than an output layer could make queries or keys
    projects = len(own) > 1 or any(True for _ in module.parameters(recurse=False))
    if inputs & _KEYS and inputs & _VALUES and not projects:
        return (
            f"{kind} is given queries, keys and values that were projected outside it, so whether "
            "they come from the same tokens cannot be followed"
        )
    return None


def refusal_of_reduction(module: nn.Module) -> str | None:
    """Why attention with fewer queries or keys than tokens cannot be filtered, or None."""
    strides = {name: getattr(module, name, 1) for name in _REDUCTIONS}
    for name, child in module.named_children():
        if name in _POOLS:
            inner = (getattr(part, "stride", 1) for part in child.modules())
            strides[f"{name}.stride"] = max(inner, key=_largest)
    found = {name: stride for name, stride in strides.items() if _largest(stride) > 1}
    found |= {n: child for n, child in module.named_children() if isinstance(child, _FIXED)}
    for name, reduction in found.items():
        return (
            f"{type(module).__name__} has {name} = {reduction}: its queries or keys are fewer than "
            "its tokens, so its map is not square"
        )
    return None


def _largest(stride: Any) -> int:
    sizes = stride if isinstance(stride, (tuple, list)) else (stride,)
    return max((size for size in sizes if isinstance(size, int)), default=1)


def computes_softmax(module: nn.Module) -> bool:
    """Whether the code of a module, or of what it calls, has a softmax or torch's attention."""
    # mixers of other kinds (state spaces, Fourier transforms, linear attention) have heads, too
    return any(
        isinstance(inner, nn.Softmax)
        or _has_softmax(type(inner))
        # a function that the module keeps, or a forward that replaces the class's
        or any(_calls_attention(value) for value in vars(inner).values() if callable(value))
        for inner in module.modules()
    )


def _has_softmax(cls: type[nn.Module]) -> bool:
    """Whether the methods of a class have a softmax, or call functions that do."""
    overridden: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        methods = {name: m for name, m in vars(base).items() if name not in overridden}
        if any(_calls_attention(method) for method in methods.values()):
            return True
        # a method that calls super() runs the one that it overrides, too
        overridden |= {n for n, m in methods.items() if "super" not in names_in_code(m, depth=0)}
    return False


def _calls_attention(function: Any) -> bool:
    return not _ATTENTION_CALLS.isdisjoint(names_in_code(function))


def names_in_code(
    function: Any, depth: int = 3, seen: set[CodeType] | None = None
) -> Iterator[str]:
    """The names of a function, in its code, and in that of the functions that it calls by name."""
    seen = set() if seen is None else seen
    function = inspect.unwrap(getattr(function, "__func__", function))
    yield str(getattr(function, "__name__", ""))
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        for method in vars(function).values():
            yield from names_in_code(method, depth, seen)
    if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
        return
    pending: list[CodeType] = [function.__code__]
    while pending:
        code = pending.pop()
        if code in seen:
            continue
        seen.add(code)
        yield from code.co_names
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        # what comes from the function around it may be the method that it replaces
        cells = [c.cell_contents for c in function.__closure__ or () if c != CellType()]
        for called in (*map(function.__globals__.get, code.co_names), *cells):
            if depth and callable(called):
                yield from names_in_code(called, depth - 1, seen)


# attribute names of cross-attention: attn2 in diffusers, x_attn in Kosmos, text_cross_attn and
# final_attn_token_to_image in the mask decoders of SAM
_ATTRIBUTE = re.compile(
    r"cross_?att(entio)?n|^(attn2|x_attn)$|^enc(oder|dec)?_?att(entio)?n(_text)?$"
    r"|attn_(token_to_image|image_to_token)$"
)

_WRAPPING = {"self", "attention", "attn"}


def crosses_by_design(owners: Owners) -> bool:
    """Whether a module's place in the model shows that it attends to another sequence."""
    # shapes are not enough: a decoder and its memory may have equal lengths. There may be one
    # wrapper in between, or some that only hold this module; names further out say nothing about it
    for place, (owner, attribute) in enumerate(owners):
        if place > 1 and not all(name in _WRAPPING for _, name in owners[:place]):
            break
        kind = type(owner).__name__
        if _ATTRIBUTE.search(attribute.lower()) or "crossattention" in kind.lower():
            return True
        # torch's and SpeechBrain's decoder layers; elsewhere it may be the only attention
        if attribute == "multihead_attn" and hasattr(owner, "self_attn"):
            return True
        # its only attention attends to another sequence
        if (kind, attribute) == ("ConformerDecoderLayer", "mha_layer"):
            return True
        # a pooling head attends to the tokens with a learned query, or with their mean (Molmo 2)
        if place == 0 and ("pool" in kind.lower() or "pooling" in attribute.lower()):
            return True
    return False


# class names of token mixers without an attention map, and what they compute
_MIXERS = {
    r"mamba\d*(mixer|block)?$|^mamba\d*$|ssm(layer|block)?$|bambamixer|falconh1mixer": (
        "a state-space layer"
    ),
    r"deltanet|deltaattention|deltarule": "a delta-rule recurrence (linear attention)",
    r"rwkv\w*(attention|time_?mix)|^time_?mix": "a linear recurrence",
    r"lineara(ttention|ttn)$|lightninga(ttention|ttn)$|gated_?linear": "linear attention",
    r"retention$": "a retention layer",
    r"recurrentblock$|rglru|[msx]lstm(layer|cell|block)?$": "a recurrent layer",
    r"shortconv|hyena": "a convolution over tokens",
    r"fouriertransform$|globalfilter$": "a Fourier transform over tokens",
    r"poolformerpooling$|repmixer$": "a fixed or convolutional mix of neighbouring tokens",
}


def token_mixers(model: nn.Module, found: Collection[str]) -> dict[str, str]:
    """The token mixers of a model that are not softmax attention, by name, with the reason.

    Of nested ones the outermost is named; those that contain a site of ``found``, or are part of
    one, are not.
    """
    mixers: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        what = next((what for k, what in _MIXERS.items() if re.search(k, kind.lower())), None)
        if what is None or any(_is_inside(name, other) for other in (*found, *mixers)):
            continue
        if not any(_is_inside(site, name) for site in found):
            mixers[name] = (
                f"{kind} is {what}, not softmax attention: it has no attention map that a filter "
                "could take powers of"
            )
    return mixers


def _is_inside(name: str, other: str) -> bool:
    return not other or f"{name}.".startswith(f"{other}.")
