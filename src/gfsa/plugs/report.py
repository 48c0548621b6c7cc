"""The report of what was plugged: as data, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROOT = "(the model)"
"""How reports call a model that is an attention module itself: its name is the empty string."""


@dataclass
class PlugReport:
    """What :func:`gfsa.plug` did, or would do."""

    plugged: dict[str, int] = field(default_factory=dict)
    """Module name → heads, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module name → why it has no filter."""
    parameters: int = 0
    """How many learned numbers were added."""
    how: dict[str, str] = field(default_factory=dict)
    """Module name → how its forward calls the filter."""
    dry_run: bool = False
    """Whether the model was left unchanged."""

    def __str__(self) -> str:
        verb = "would plug" if self.dry_run else "plugged"
        return report_text(
            f"{verb} {len(self.plugged)} layers, {self.parameters} learned numbers",
            {name: f"{heads} heads, {self.how[name]}" for name, heads in self.plugged.items()},
            self.skipped,
        )


def report_text(headline: str, changed: Mapping[str, str], skipped: Mapping[str, str]) -> str:
    """A report as text: the layers that changed, numbered, then the skipped ones."""
    lines = [f"{headline} ({len(skipped)} skipped)"]
    lines += [
        f"  {number:>3}  {name or ROOT}: {what}"
        for number, (name, what) in enumerate(changed.items(), start=1)
    ]
    lines += [f"    -  {name or ROOT}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)
