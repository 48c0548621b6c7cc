"""What a plugged module is given: looked at before its forward, and the cache handed over."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gfsa.plugs.adapters.transformers.past_check import refuse_other_rows
from gfsa.plugs.adapters.transformers.product_check import name_of
from gfsa.plugs.adapters.transformers.refusals import OTHER_TOKENS, QUERY_AND_KEY
from gfsa.plugs.checks.proof import require_same_tokens

ARGUMENTS = "_gfsa_arguments"
"""The attribute of a plugged module that holds its :class:`Arguments`."""

CACHE = "gfsa_cache"
"""The keyword by which the attention function gets the cache and the index of its layer."""

_CACHES = ("past_key_values", "layer_past")
# arguments that say which layer of the cache is meant, where a module serves several of them
_CACHE_INDEX = ("layer_idx", "cycle_offset")


class Arguments(NamedTuple):
    """What the forward of a class of attention modules takes.

    A tuple of names and numbers, and a function as the hook that reads it: torch.compile then
    skips its checks of a module whose attributes are the same objects as in the last call. With an
    object of another class among them it makes all checks in every call, for every token.
    """

    positional: tuple[str, ...]
    """Its arguments in order, without ``self``."""
    pair: tuple[str, str] | None
    """The names of queries and keys, if it takes both."""
    cache_index: tuple[str, ...]
    """Arguments that say which layer of the cache is meant."""
    others_first: int
    """How many positional arguments come before the first that the hook looks for."""

    @classmethod
    def of(cls, kind: type[nn.Module]) -> Arguments:
        positional = tuple(inspect.signature(kind.forward).parameters)[1:]
        names = set(positional)
        pair = next((pair for pair in QUERY_AND_KEY if names.issuperset(pair)), None)
        index = tuple(name for name in _CACHE_INDEX if name in names)
        wanted = OTHER_TOKENS.union(_CACHES, pair or (), index).intersection(names)
        others_first = min(map(positional.index, wanted), default=len(positional))
        return cls(positional, pair, index, others_first)


def look_at_inputs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook that looks at the arguments of a plugged module before its forward.

    It raises if the keys are those of another sequence, and adds the cache, with the index of its
    layer, to the keywords, which transformers passes on to the attention function.
    """
    arguments: Arguments = module._gfsa_arguments
    given = kwargs
    if len(args) > arguments.others_first:
        given = {**dict(zip(arguments.positional, args, strict=False)), **kwargs}
    for name in OTHER_TOKENS.intersection(given):
        if given[name] is not None:
            raise ValueError(
                f"{name_of(module)} was plugged as self-attention but is given {name}: "
                "cross-attention has no powers. Leave it out with plug(..., layers=...)"
            )
    if arguments.pair is not None:
        query, key = (given.get(name) for name in arguments.pair)
        if isinstance(query, Tensor) and isinstance(key, Tensor):
            require_same_tokens(module, query, key)
    for name in _CACHES:
        cache = given.get(name)
        if cache is not None:
            index: int | None = getattr(module, "layer_idx", None)
            if arguments.cache_index:
                index = given.get("layer_idx", index)
                index = None if index is None else index + given.get("cycle_offset", 0)
            if module.gfsa.first_values is not None:
                from gfsa.plugs.adapters.transformers.cache import mix_into

                mix_into(cache, index, module)
            # a compiled call would check all that is read here, for every token
            if index is not None and not torch.compiler.is_compiling():
                try:
                    layer = getattr(cache, "self_attention_cache", cache).layers[index]
                except (AttributeError, IndexError):
                    pass
                else:
                    refuse_other_rows(layer)
            return args, {**kwargs, CACHE: (cache, index)}
    return None
