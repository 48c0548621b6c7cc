"""What ``gfsa train`` says at Ctrl-C: how the runs can go on, and from where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gfsa_experiments.commands.progress_bars import print_line
from gfsa_experiments.engine.checkpoints import newest_step

if TYPE_CHECKING:
    from rich.console import Console

    from gfsa_experiments.runs.run import Run


@contextmanager
def resume_hint(console: Console, runs: Sequence[Run], names: Mapping[Path, str]) -> Iterator[None]:
    """Print at Ctrl-C how the runs can go on.

    Args:
        runs: all that are carried out.
        names: of each run, by its folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        message = _message([run.folder for run in runs], names)
        print_line(console, message, style="yellow")
        raise


def _message(folders: Sequence[Path], names: Mapping[Path, str]) -> str:
    done = [folder for folder in folders if (folder / "row.json").exists()]
    steps = {folder: newest_step(folder / "checkpoints") for folder in folders}
    begun = {folder: step for folder, step in steps.items() if step and folder not in done}
    # a run writes its settings before anything else
    lost = [
        folder
        for folder in folders
        if folder not in done and folder not in begun and (folder / "config.json").exists()
    ]
    again = [f"{names[folder]} has no checkpoint and begins with step 1" for folder in lost]
    if not done and not begun:
        return "; ".join(["interrupted", *(again or ["no run had begun"])])
    said = [f"{len(done)} of {len(folders)} runs are done"] if done else []
    said += [f"{names[folder]} goes on after step {step}" for folder, step in begun.items()]
    return "; ".join(["interrupted; the same command with --resume continues", *said, *again])
