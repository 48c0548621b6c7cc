"""A model's config while it makes its masks."""

from __future__ import annotations

import copy
from typing import Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from gfsa.adapters.transformers.config_view import ConfigView
from gfsa.adapters.transformers.masks import NAME


class MaskConfigView(ConfigView):
    """A model's config while it makes its masks.

    Args:
        config: the real one.
        positions_given: whether the caller gave position ids, which may be those of packed
            documents; those that a model makes itself are of one document.
    """

    positions_given: bool

    def __init__(self, config: Any, positions_given: bool) -> None:
        super().__init__(config)
        object.__setattr__(self, "positions_given", positions_given)

    @property
    def _attn_implementation(self) -> str | None:
        name: str | None = self.real._attn_implementation
        # a user may have registered another mask function for sdpa
        if name == "sdpa" and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask:
            return NAME
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskConfigView:
        return MaskConfigView(copy.deepcopy(self.real, memo), self.positions_given)

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskConfigView, (self.real, self.positions_given)
