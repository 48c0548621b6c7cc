"""Continuous batching (``generate_batch``) of a plugged model: its start, and what is refused.

A model with filters gets an ``init_continuous_batching`` of its own, on the instance.
``generate_batch``, ``continuous_batching_context_manager`` and ``transformers serve`` call it. It
starts transformers' manager with a cache that has room for the powers of past tokens
(``batching_manager.py``), or raises before anything starts: an error in a forward would come in
transformers' own thread, which keeps it in the results and returns them without tokens.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gfsa.adapters.transformers.product_check import name_of
from gfsa.plugs.adapter import CHILD

# what generate_batch and the context manager call
_ENTRY = "init_continuous_batching"
# transformers keeps a manager, with its cache, between calls if it is asked to
_KEPT = "_cached_continuous_batching_manager"


class _Entry:
    """Takes the place of the entry to continuous batching, on one instance of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        reason = refusal_of_batching(self.model)
        if reason is not None:
            raise NotImplementedError(
                f"this plugged model cannot run with continuous batching: {reason}. Use generate()"
            )
        # imported here, because what it overrides need not exist in every transformers
        try:
            from gfsa.adapters.transformers.batching_manager import start
        except ImportError as error:
            from gfsa.adapters.transformers.paged import VERSIONS

            raise NotImplementedError(
                "this transformers has another continuous batching than a plugged model can run "
                f"with ({error}). Use generate(), or install {VERSIONS}"
            ) from error

        return start(self.model, generation_config, continuous_batching_config, workload_hints)


def refusal_of_batching(model: nn.Module) -> str | None:
    """Why a plugged model cannot run with a paged cache, or None if it can."""
    for name, module in model.named_modules():
        if CHILD not in module._modules:
            continue
        if "_gfsa_handle" not in module.__dict__:
            return (
                f"{name} ({type(module).__name__}) is plugged by tracing, outside of the attention "
                "functions that know the paged cache"
            )
        if getattr(module, "layer_idx", None) is None:
            return f"{name_of(module)} does not say which layer of the cache it uses"
    return None


def enter_where_plugged(model: nn.Module) -> None:
    """Give an entry to every model in ``model`` that has filters, and to no other.

    Called after filters were plugged, loaded or removed: what a kept manager has cached was
    computed by other filters, so it is dropped.
    """
    module: Any
    for module in model.modules():
        if not hasattr(type(module), _ENTRY):
            continue
        if _KEPT in module.__dict__:
            module.destroy_cached_continuous_batching_manager()
        if any(CHILD in inner._modules for inner in module.modules()):
            module.__dict__[_ENTRY] = _Entry(module)
        elif isinstance(module.__dict__.get(_ENTRY), _Entry):
            del module.__dict__[_ENTRY]
