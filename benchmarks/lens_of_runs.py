"""One lens page for several trained models of an experiment, on the same inputs.

    gfsa train image --method plain,gfsa --set lens=true …
    python benchmarks/lens_of_runs.py results/lens/cifar10.html \
        plain=runs/image/…/seed-0 gfsa=runs/image/…/seed-0

Runs that looked at themselves (``lens=true``) are put side by side; those that kept their weights
(``save_model=true``) are looked at now, and need ``--data-dir``.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

import gfsa
from gfsa.lens.readings import ModelReading
from gfsa.lens.report import LensReport
from gfsa.recipes.reload import trained_task
from gfsa.recipes.tree import to_device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", nargs="+", help="name=folder of a run with lens.json or model.pt")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    report = LensReport({})
    for text in arguments.runs:
        name, _, folder = text.partition("=")
        if not folder or "/" in name:
            # folders of runs have a sign of equality in them too
            parser.error(f"expected name=folder, such as gfsa={text}")
        one = reading(Path(folder), arguments.data_dir)
        (found,) = one.models.values()
        report.models[name] = dataclasses.replace(found, name=name)
        report.created = one.created
    _check_alike(list(report.models.values()))
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    report.to_html(arguments.page)
    report.table()


def reading(folder: Path, data_dir: Path) -> LensReport:
    """What a run saw of itself at its end, or what is seen of it now."""
    if (folder / "lens.json").exists():
        return LensReport.from_json(folder / "lens.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = trained_task(folder, data_dir, device)
    return gfsa.diagnose(task.model, to_device(task.example(), device), progress=False)


def _check_alike(models: list[ModelReading]) -> None:
    seen = {(model.samples, model.tokens) for model in models}
    if len(seen) > 1:
        raise SystemExit(f"these runs were not looked at on the same inputs: {sorted(seen)}")


if __name__ == "__main__":
    main()
