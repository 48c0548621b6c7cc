"""What belongs to the forward that a layer is in just now, thread by thread."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from gfsa.operators.visibility import Visibility


class Scope:
    """Opened when a block starts and closed when it ends; its hooks look inside in between.

    A copy of a model has scopes of its own, and so has each thread.

    Args:
        name: what to call the block in errors.
        places: how many places of the block a method acts at: fewer visits are an error.
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
        """Also checks that the method was called wherever it should have been."""
        now = self._now
        if getattr(now, "open", False) and now.visits < self.places:
            self._forget()
            raise RuntimeError(
                f"{self.name} ran, but the method applied to it was called at {now.visits} of "
                f"{self.places} places: the block took a path that gfsa does not see. "
                "gfsa.baselines.remove(model), or leave it out with apply(..., layers=...)"
            )
        self._forget()

    def _forget(self) -> None:
        self._now.open = False
        self._now.sight = None

    @property
    def sight(self) -> Visibility:
        """What the tokens of the block see."""
        if not getattr(self._now, "open", False):
            raise RuntimeError(
                f"a part of {self.name} ran outside of its forward, so its masks are not known "
                "(recomputed by itself in a checkpoint?): checkpoint whole blocks"
            )
        seen = self._now.sight
        assert isinstance(seen, Visibility)
        return seen

    def visit(self) -> None:
        self._now.visits = getattr(self._now, "visits", 0) + 1

    def check_tokens(self, x: Tensor) -> None:
        """Raise unless ``x`` has all of the block's tokens: a part has another mean."""
        found = x.numel() // x.shape[-1]
        if found != self._now.tokens:
            raise RuntimeError(
                f"{self.name} was given {self._now.tokens} tokens, but handles {found} at once "
                "(chunk_size_feed_forward?); its tokens have to stay together here"
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
        """The first layer's values; these are them if nobody was here before."""
        if not getattr(self._now, "open", False):
            raise RuntimeError(
                "a layer with NeuTRENO ran outside of its model's forward, where the first "
                "layer's values are not known: gradient checkpointing that runs a layer again "
                "(call model.gradient_checkpointing_disable()), or a layer called by itself"
            )
        if self._now.values is None:
            if not is_source:
                raise RuntimeError(
                    "the first layer of the model did not run before this one, so there are no "
                    "first values for NeuTRENO (layers dropped while training?)"
                )
            self._now.values = values
        found: Tensor = self._now.values
        if found.shape != values.shape:
            raise RuntimeError(
                f"NeuTRENO adds the first layer's values {tuple(found.shape)} to a layer whose "
                f"values are {tuple(values.shape)}: they have to have the same tokens and heads"
            )
        return found
