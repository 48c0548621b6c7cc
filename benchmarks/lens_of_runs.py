"""One lens page for several trained models of an experiment, on the same inputs.

    gfsa train image --method plain,gfsa --set lens=true …
    python benchmarks/lens_of_runs.py results/lens/cifar10.html \
        plain=runs/image/…/seed-0 gfsa=runs/image/…/seed-0

Runs with ``lens=true`` already have their readings; runs with ``save_model=true`` are diagnosed
now, which needs ``--data-dir``.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

import gfsa
from gfsa.lens.readings import ModelReading
from gfsa.lens.report import LensReport
from gfsa_experiments.engine.nested import to_device
from gfsa_experiments.runs.load_run import trained_task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", nargs="+", help="name=folder of a run with lens.json or model.pt")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    report, example = LensReport({}), None
    for text in arguments.runs:
        name, _, folder = text.partition("=")
        if not folder or "/" in name:
            # names of run folders contain equals signs too
            parser.error(f"expected name=folder, such as gfsa={text}")
        if name in report.models:
            parser.error(f"two runs are called {name}")
        of_run, example = reading(Path(folder), arguments.data_dir, example)
        (found,) = of_run.models.values()
        report.models[name] = dataclasses.replace(found, name=name)
        report.created = of_run.created
    _check_alike(list(report.models.values()))
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    report.to_html(arguments.page)
    report.table()


def reading(folder: Path, data_dir: Path, example: Any) -> tuple[LensReport, Any]:
    """The reading that a run stored, or a new one, on the same example for all runs."""
    if (folder / "lens.json").exists():
        return LensReport.from_json(folder / "lens.json"), example
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = trained_task(folder, data_dir, device)
    example = task.example() if example is None else example
    return gfsa.diagnose(task.model, to_device(example, device), progress=False), example


def _check_alike(models: list[ModelReading]) -> None:
    seen = {(model.samples, model.tokens) for model in models}
    if len(seen) > 1:
        raise SystemExit(f"these runs were diagnosed on different inputs: {sorted(seen)}")


if __name__ == "__main__":
    main()
