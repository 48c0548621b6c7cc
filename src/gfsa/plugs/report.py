"""The report of what was plugged: as data, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

ROOT = "(the model)"
"""How reports call a model that is an attention module itself: its name is the empty string."""

IN_PLACE = (
    "gfsa.plug changes the model in place and returns a report: write gfsa.plug(model), not "
    "model = gfsa.plug(model)"
)


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
    numbers: dict[str, int] = field(default_factory=dict)
    """Module name → the number by which ``layers=`` takes it, of every layer that it can take."""
    dry_run: bool = False
    """Whether the model was left unchanged."""
    note: str = ""
    """How the filters change what the model computes before they learn; empty if they do not."""

    def __getattr__(self, name: str) -> Any:
        # after model = gfsa.plug(model), a report is asked for what a model has
        raise AttributeError(f"PlugReport has no attribute {name!r}. {IN_PLACE}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"a PlugReport cannot be called. {IN_PLACE}")

    def __str__(self) -> str:
        verb = "would plug" if self.dry_run else "plugged"
        numbers = self.numbers or {name: n for n, name in enumerate(self.plugged, start=1)}
        text = report_text(
            f"{verb} {counted(len(self.plugged), 'layer')}, "
            f"{counted(self.parameters, 'learned number')}",
            {
                name: f"{counted(heads, 'head')}, {self.how[name]}"
                for name, heads in self.plugged.items()
            },
            self.skipped,
            numbers,
        )
        return f"{text}\n  {self.note}" if self.note else text


def report_text(
    headline: str,
    changed: Mapping[str, str],
    skipped: Mapping[str, str],
    numbers: Mapping[str, int] | None = None,
) -> str:
    """A report as text: the layers that changed, by number, then the skipped ones.

    Args:
        headline: the first line.
        changed: layer → what became of it.
        skipped: layer → why nothing did; layers with one reason share a line.
        numbers: layer → the number that ``layers=`` takes; counted from 1 if not given.
    """
    numbers = numbers or {name: number for number, name in enumerate(changed, start=1)}
    lines = [f"{headline} ({len(skipped)} skipped)"]
    lines += [f"  {numbers[name]:>3}  {name or ROOT}: {what}" for name, what in changed.items()]
    for reason, names in _by_reason(skipped).items():
        # one that was left out has a number, too
        number = numbers.get(names[0], "-") if len(names) == 1 else "-"
        lines.append(f"  {number:>3}  {_shortened(names)}: {reason}")
    return "\n".join(lines)


def grouped_reasons(refused: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the layers that have it."""
    return [f"{_shortened(names)}: {reason}" for reason, names in _by_reason(refused).items()]


def listed_reasons(refused: Mapping[str, str]) -> str:
    """Refused layers for an error, a line for each reason."""
    return "".join(f"\n  {line}" for line in grouped_reasons(refused))


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        # reasons that differ in the layer's own name alone are one
        names.setdefault(reason.replace(name, "…") if len(name) > 3 else reason, []).append(name)
    return {
        reason if len(group) > 1 else skipped[group[0]]: group for reason, group in names.items()
    }


def _shortened(names: list[str]) -> str:
    if len(names) < 3:
        return ", ".join(name or ROOT for name in names)
    return f"{names[0]} … {names[-1]} ({len(names)} layers)"
