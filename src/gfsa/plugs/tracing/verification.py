"""Verify that the map of one forward is over the module's tokens, and find its axis of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gfsa.plugs.checks.proof import require_same_tokens
from gfsa.plugs.tracing.following import AxisFollower
from gfsa.plugs.tracing.layout import HeadLayout, Verified, find_heads, settled
from gfsa.plugs.tracing.memory import TraceMemory
from gfsa.plugs.tracing.path import PathRecorder
from gfsa.plugs.tracing.self_attention import SelfAttention
from gfsa.plugs.tracing.sides import Side, sides_of_tokens


class NewPathError(BaseException):
    """A forward took a path that no earlier forward has verified; it has to be followed.

    No Exception, so that a module that catches those does not take it for an error of its own.
    """


class Verifier:
    """Finds the layout of the map of one forward: by its axes, or by what earlier forwards showed.

    Args:
        module: the attention module.
        heads: how many heads its filter has.
        memory: what earlier forwards have shown.
        recorder: the path of this forward.
        follower: the axes of this forward; None if it relies on memory.
    """

    def __init__(
        self,
        module: nn.Module,
        heads: int,
        memory: TraceMemory,
        recorder: PathRecorder,
        follower: AxisFollower | None,
    ) -> None:
        self.module = module
        self.heads = heads
        self.memory = memory
        self.recorder = recorder
        self.follower = follower

    def layout(
        self,
        scores: Sequence[int],
        rows: list[Side],
        columns: list[Side],
        values: Tensor,
        inputs: Mapping[str, Tensor],
    ) -> HeadLayout | str:
        """The place of the heads in a map of shape ``scores``, or the reason for a refusal.

        Args:
            scores: the shape of the map, ``(..., N, N)``.
            rows, columns: the tokens of its queries and keys, if axes are followed.
            values: what it multiplies.
            inputs: the module's inputs by name.

        Raises:
            NewPathError: if axes are not followed and no earlier forward took this path.
            ValueError: if inputs that held the same tokens in that forward hold different ones.
        """
        if scores[-2] != scores[-1]:
            return (
                f"its map is {scores[-2]}×{scores[-1]}, not square: cross-attention, pooling with "
                "a few queries, or decoding with a cache (pass use_cache=False in transformers; an "
                "adapter of your own can keep A·v beside the cache: docs/adapters.md) has no powers"
            )
        if self.follower is None:
            layout = self._by_memory(scores, inputs)
        else:
            layout = self._by_axes(scores, rows, columns, values, inputs, self.follower)
        if isinstance(layout, HeadLayout) and not layout.fits(scores, self.heads):
            return f"its map has shape {tuple(scores)}, with no axis for its {self.heads} heads"
        return layout

    def _by_axes(
        self,
        scores: Sequence[int],
        rows: list[Side],
        columns: list[Side],
        values: Tensor,
        inputs: Mapping[str, Tensor],
        follower: AxisFollower,
    ) -> HeadLayout | str:
        """The layout that the axes of this forward show, which is kept for later forwards."""
        of_values = sides_of_tokens(follower.of(values))
        if 0 in scores or values.numel() == 0:
            # nothing is computed, so any layout of these sizes will do
            return self._by_sizes(scores)
        if scores[-1] == 1:
            # an axis of one token does not show which token it is; if it is the only one, the map
            # is the number one
            sides = [*rows, *columns, *of_values]
            if follower.cut_to_one or len({side.picks for side in sides}) > 1:
                return (
                    "its map is 1×1, of one token among several, and whether its query, key and "
                    "value are the same token is not known"
                )
            layout = find_heads(sides, scores, self.heads)
            return self._by_sizes(scores) if isinstance(layout, str) else layout

        def equal(first: str, second: str) -> bool:
            return self._hold_same_tokens(inputs[first], inputs[second])

        attention = SelfAttention(rows, columns, of_values, follower, equal)
        if (refusal := attention.refusal()) is not None:
            return refusal
        layout = attention.layout(scores, self.heads)
        if isinstance(layout, str):
            return layout
        general = settled(layout, scores, self.heads)
        if general is not None:
            verified = Verified(general, tuple(attention.equal_inputs))
            self.memory.keep(self.recorder.path(), verified)
        return layout

    def _by_memory(self, scores: Sequence[int], inputs: Mapping[str, Tensor]) -> HeadLayout | str:
        """The layout that an earlier forward on the same path has shown."""
        if self.memory.known:
            return HeadLayout(len(scores), -3)
        if torch.compiler.is_compiling():
            verified = self._verified_for_inputs(len(scores))
            if verified is None:
                return (
                    "no forward has verified it with these inputs, which a graph that is compiled "
                    "cannot do. Run one forward without torch.compile first"
                )
        elif self.recorder.path() in self.memory.paths:
            verified = self.memory.paths[self.recorder.path()]
        else:
            raise NewPathError()
        for first, second in verified.equal_inputs:
            require_same_tokens(self.module, inputs[first], inputs[second])
        return verified.layout

    def _verified_for_inputs(self, rank: int) -> Verified | None:
        """What all verified paths of these inputs and flags agree on.

        Operations are not recorded while a graph is compiled, so the path itself is not known.
        """
        inputs = self.recorder.beginning
        known = [v for path, v in self.memory.paths.items() if path[0] == inputs]
        known = [v for v in known if v.layout.rank == rank]
        if not known or any(v != known[0] for v in known):
            return None
        return known[0]

    def _by_sizes(self, scores: Sequence[int]) -> HeadLayout:
        """A layout that fits a map which shows none."""
        heads, rank = self.heads, len(scores)
        place = next((i for i, size in enumerate(scores[:-2]) if size == heads), None)
        if place is not None or heads == 1:
            return HeadLayout(rank, (place or 0) - rank)
        for verified in self.memory.paths.values():
            if verified.layout.rank == rank:
                return verified.layout
        return HeadLayout(rank, -3, before=None)

    def _hold_same_tokens(self, tokens: Tensor, others: Tensor) -> bool:
        if tokens.shape != others.shape:
            return False
        try:
            require_same_tokens(self.module, tokens, others)
        except ValueError:
            return False
        return True
