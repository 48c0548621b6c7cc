"""State of the forward that is running, for each thread: masks, and the first layer's values."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from gfsa.operators.visibility import Visibility


class Scope:
    """The state of one block while it runs: opened before its forward, closed after it.

    A copied model has its own scopes, and so has each thread.

    Args:
        name: the block's name in errors.
        places: at how many places of the block a method acts: fewer visits are an error.
    """

    def __init__(self, name: str, places: int = 0) -> None:
        self.name = name
        self.places = places
        self._now = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Scope, (self.name, self.places)

    def open(self, sight: Visibility | None, tokens: int) -> None:
        self._now.open = True
        self._now.sight = sight
        self._now.tokens = tokens
        self._now.visits = 0

    def close(self) -> None:
        """End the forward; raises if the method was not called at all its places."""
        now = self._now
        if getattr(now, "open", False) and now.visits < self.places:
            self._forget()
            raise RuntimeError(
                f"{self.name} ran, but the method applied to it was called at {now.visits} of "
                f"{self.places} places: the block took a code path that bypasses it. "
                "gfsa.baselines.remove(model), or leave it out with apply(..., layers=...)"
            )
        self._forget()

    def _forget(self) -> None:
        self._now.open = False
        self._now.sight = None

    @property
    def sight(self) -> Visibility:
        """Which tokens each token of the block sees."""
        if not getattr(self._now, "open", False):
            raise RuntimeError(
                f"a part of {self.name} ran outside of the block's forward, so its masks are not "
                "known (a checkpoint that recomputes it alone?): checkpoint whole blocks"
            )
        seen = self._now.sight
        assert isinstance(seen, Visibility)
        return seen

    def visit(self) -> None:
        self._now.visits = getattr(self._now, "visits", 0) + 1

    def check_tokens(self, x: Tensor) -> None:
        """Raise unless ``x`` has all of the block's tokens: a part of them has another mean."""
        found = x.numel() // x.shape[-1]
        if found != self._now.tokens:
            raise RuntimeError(
                f"{self.name} was called with {self._now.tokens} tokens, but processes {found} at "
                "a time (chunk_size_feed_forward?); the method needs all of them together"
            )


class FirstValues:
    """The values of a model's first layer, for its later layers in the same forward."""

    def __init__(self) -> None:
        self._now = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return FirstValues, ()

    def open(self) -> None:
        self._now.open = True
        self._now.values = None

    def close(self) -> None:
        self._now.open = False
        self._now.values = None

    def first(self, values: Tensor, is_source: bool) -> Tensor:
        """The first layer's values; ``values`` themselves if the first layer calls."""
        if not getattr(self._now, "open", False):
            raise RuntimeError(
                "a layer with NeuTRENO ran outside of its model's forward, where the first "
                "layer's values are not known: gradient checkpointing that recomputes a layer "
                "(call model.gradient_checkpointing_disable()), or a layer called on its own"
            )
        if self._now.values is None:
            if not is_source:
                raise RuntimeError(
                    "the first layer of the model did not run before this one, so there are no "
                    "first values for NeuTRENO (layers dropped in training?)"
                )
            self._now.values = values
        found: Tensor = self._now.values
        if found.shape != values.shape:
            raise RuntimeError(
                f"NeuTRENO adds the first layer's values {tuple(found.shape)} to a layer whose "
                f"values are {tuple(values.shape)}: both must have the same tokens and heads"
            )
        return found
