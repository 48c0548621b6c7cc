"""TensorBoard, if it is there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


class Log:
    """Writes scalars for TensorBoard beside the metrics file."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self._writer: Any = None
        if not wanted:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            warnings.warn(
                "no TensorBoard log: pip install tensorboard, or --set tensorboard=false; "
                "the metrics are in metrics.jsonl all the same",
                stacklevel=2,
            )
            return
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics; ``step`` is where it belongs."""
        if self._writer is None:
            return
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
