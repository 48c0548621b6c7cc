"""Interrupt a function at each of its lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class InterruptAt:
    """Inside, Ctrl-C comes once, at a line event of the files whose path has one of ``inside``.

    Args:
        event: which event, counted from 0; None counts them only.
    """

    def __init__(self, event: int | None, inside: Sequence[str]) -> None:
        self.event = event
        self.inside = inside
        self.came = False
        self.lines: list[tuple[str, int]] = []

    def __enter__(self) -> InterruptAt:
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.came or not any(part in frame.f_code.co_filename for part in self.inside):
            return None
        if event == "line":
            if len(self.lines) == self.event:
                self.came = True
                raise KeyboardInterrupt
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


def interrupted_everywhere(
    action: Callable[[], Any], check: Callable[[bool], None], inside: Sequence[str]
) -> None:
    """Call ``action``, and once more for each of its lines, interrupted at that line.

    A line that runs more often is interrupted the first and the second time: that is in the middle
    of a model.

    Args:
        check: called after each time with whether the action finished; it has to leave everything
            as it was before the action.
        inside: parts of the paths of the files that are interrupted.
    """
    # the first time may import modules, whose lines do not run again
    action()
    check(True)
    with InterruptAt(None, inside) as whole:
        action()
    check(True)
    seen: Counter[tuple[str, int]] = Counter()
    events = []
    for event, line in enumerate(whole.lines):
        seen[line] += 1
        if seen[line] <= 2:
            events.append(event)
    assert len(events) > 5, f"hardly a line of {inside} ran"
    for event in events:
        interrupt = InterruptAt(event, inside)
        try:
            with interrupt:
                action()
        except KeyboardInterrupt:
            assert interrupt.came
        check(not interrupt.came)
