"""The errors of one traced forward, which are raised again after it if the module caught them."""

from __future__ import annotations

from typing import NoReturn

from torch import nn


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


class Refusals:
    """Raises the errors of one forward of one module, and keeps the last.

    Args:
        module: the attention module.
        name: what to call it in errors.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.error: BaseException | None = None

    def refuse(self, why: str) -> NoReturn:
        """Raise a :class:`TraceError` with a reason."""
        self.error = TraceError(
            f"cannot filter {self.name} ({self._kind()}) by tracing: {why}. "
            "gfsa.unplug(model), then plug(..., inputs=batch), which leaves out the layers that it "
            "cannot filter, or plug(..., layers=...) without this one; or teach gfsa its class "
            "with gfsa.register_adapter"
        )
        raise self.error

    def _kind(self) -> str:
        # the class of a traced module is made for it; users know the one that it was
        kind: type = self.module.__dict__.get("_gfsa_class", type(self.module))
        return kind.__name__
