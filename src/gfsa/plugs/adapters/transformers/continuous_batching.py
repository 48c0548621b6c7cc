"""Continuous batching (``generate_batch``) of a plugged model is refused before it starts.

The attention functions of a paged cache fill it themselves, so there is no place for the powers of
past tokens. Without this refusal the error would come in transformers' own thread, which keeps it
in the results and returns them without tokens.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from gfsa.plugs.adapter import CHILD

REASON = (
    "a plugged model cannot run with a paged cache (continuous batching): the base "
    "function fills the cache itself. Use generate() with a dynamic or static cache"
)

# init_continuous_batching is what generate_batch and the context manager call
_ENTRY = "init_continuous_batching"


class _Refusal:
    """Takes the place of the entry to continuous batching, on one instance of a model."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(REASON)


def refuse_where_plugged(model: nn.Module) -> None:
    """Refuse continuous batching of every model in ``model`` that has filters, and of no other."""
    for module in model.modules():
        if not hasattr(type(module), _ENTRY):
            continue
        if any(CHILD in inner._modules for inner in module.modules()):
            module.__dict__[_ENTRY] = _Refusal()
        elif isinstance(module.__dict__.get(_ENTRY), _Refusal):
            del module.__dict__[_ENTRY]
