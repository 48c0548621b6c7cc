"""What a run reports while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gfsa_experiments.engine.speed import speed_text


@dataclass(frozen=True)
class Report:
    """The steps since the last report, and a validation if there was one."""

    step: int
    """Steps done."""
    total: int
    """Steps of the run."""
    loss: float
    """The mean of the steps."""
    tokens: int | None = None
    """Trained on so far; None if the task does not count them."""
    metric: str = ""
    valid: float | None = None
    """The task's ``metric`` on ``valid``; None if it was not evaluated."""
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """``loss 2.61, 812,000 tokens/s, MFU 25%``"""
        return f"loss {self.loss:.3g}{speed_text(self.speed)}"

    @property
    def line(self) -> str:
        """The same with how far the run is and the validation, for a log."""
        said = [f"step {self.step:,} of {self.total:,}"]
        said += [f"{self.tokens:,} tokens"] if self.tokens is not None else []
        said += [f"loss {self.loss:.4g}"]
        said += [f"valid {self.metric} {self.valid:.4g}"] if self.valid is not None else []
        return ", ".join(said) + speed_text(self.speed)


Progress = Callable[[Report], None]
"""Called every ``log_every`` steps, at evaluations and at checkpoints."""
