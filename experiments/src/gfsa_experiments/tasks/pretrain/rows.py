"""Rows of tokens, cut on the device that trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# beyond, tokens stay on the host and rows are sent one batch at a time
_MOST_ON_DEVICE = 4 * 2**30
_SIGNED = {"uint16": torch.int16, "uint32": torch.int32}


class TokenRows(Dataset[Any]):
    """Tokens in rows of ``block + 1``: what a row predicts last is what the next one begins with.

    An item is the number of its row; :meth:`ids` has the tokens. All of them lie on the device, so
    that a batch is a handful of numbers and nothing waits for the host.

    Args:
        tokens: all of them, in a row.
        block: how many each row predicts.
        name: of the part.
        most: take so many rows, evenly spaced; 0 for all.
    """

    def __init__(self, tokens: np.ndarray, block: int, name: str, most: int = 0) -> None:
        count = (len(tokens) - 1) // block
        if count < 1:
            raise ValueError(
                f"the {name} text has {len(tokens)} tokens, not enough for a row of {block} and "
                "the token after it; set a smaller block"
            )
        self.block, self.name = block, name
        # torch knows few operations of unsigned numbers; the bits are the same
        self._host = torch.from_numpy(tokens).view(_SIGNED[tokens.dtype.name])
        self._unsigned = tokens.dtype
        self._mask = 0xFFFF if tokens.dtype == np.uint16 else 0xFFFFFFFF
        self._on_device: dict[torch.device, Tensor] = {}
        self._by_host = tokens.nbytes > _MOST_ON_DEVICE
        taken = min(count, most) if most else count
        self.rows = torch.arange(taken, dtype=torch.int64) * count // taken

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        rows = self.rows[torch.tensor(indices)]
        if self._by_host:
            return {"part": self.name, "ids": self._cut(self._host, rows)}
        return {"part": self.name, "rows": rows}

    def ids(self, batch: dict[str, Any]) -> Tensor:
        """The tokens of a batch, ``(rows, block + 1)``, where the batch is."""
        if "ids" in batch:
            found: Tensor = batch["ids"]
            return found
        rows = batch["rows"]
        if rows.device not in self._on_device:
            self._on_device[rows.device] = self._host.to(rows.device)
        return self._cut(self._on_device[rows.device], rows)

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token is in the text, ``(vocabulary,)``."""
        counts = np.bincount(self._host.numpy().view(self._unsigned), minlength=vocabulary)
        return torch.from_numpy(counts)

    def _cut(self, tokens: Tensor, rows: Tensor) -> Tensor:
        every = tokens.unfold(0, self.block + 1, self.block)
        return every[rows].long() & self._mask
