"""What applying a method did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BaselineReport:
    """What :func:`apply` did."""

    method: str
    plugged: dict[str, str] = field(default_factory=dict)
    """Module name → where the method acts, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name → why it was left alone."""
    parameters: int = 0
    """How many learned numbers were added."""

    def __str__(self) -> str:
        lines = [
            f"{self.method} in {len(self.plugged)} layers, {self.parameters} learned numbers "
            f"({len(self.skipped)} skipped)"
        ]
        lines += [
            f"  {number:>3}  {name}: {where}"
            for number, (name, where) in enumerate(self.plugged.items(), start=1)
        ]
        lines += [f"    -  {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)
