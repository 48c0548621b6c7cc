"""What the census finds of one model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["right", "refused", "wrong", "raises later", "crash", "no reference", "not built"]

GOOD: tuple[Status, ...] = ("right", "refused", "not built")
"""Everything else is a failure."""


@dataclass
class Finding:
    """One way of plugging one model."""

    status: Status
    reason: str = ""
    plugged: int = 0
    """How many attention modules have a filter."""
    reached: int = 0
    """How many of them the inputs reached."""
    how: str = ""
    error: float = 0.0
    """The largest relative difference to the reference, in outputs and gradients."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → how many modules the report skips for it."""
    generation: str = ""
    """Empty if the model does not generate; "exact", or why caches are refused or not judged."""


@dataclass
class Verdict:
    """All findings of one entry of the catalogue."""

    name: str
    model: str = ""
    inputs: str = ""
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return bool(self.findings) and all(f.status in GOOD for f in self.findings.values())


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error's type and words, in one line, without the folders of the machine that ran it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    # before it is cut: where a text ends must not depend on where packages are installed
    text = without_folders(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def without_folders(text: str) -> str:
    """Files of installed packages by their names alone."""
    return re.sub(r"(/[^\s/:]+)+/site-packages/", "", text)
