"""One lens page for several trained models of an experiment, on the same inputs.

    gfsa train glue --method plain,gfsa --set save_model=true …
    python benchmarks/lens_of_runs.py results/lens/stsb.html --data-dir data \
        plain=runs/glue/…/seed-0 gfsa=runs/glue/…/seed-0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import gfsa
from gfsa.recipes.reload import trained_task
from gfsa.recipes.tree import to_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", nargs="+", help="name=folder of a run with model.pt in it")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models, example = {}, None
    for text in arguments.runs:
        name, _, folder = text.partition("=")
        if not folder or "/" in name:
            # folders of runs have a sign of equality in them too
            parser.error(f"expected name=folder, such as gfsa={text}")
        task = trained_task(Path(folder), arguments.data_dir, device)
        models[name] = task.model
        example = task.example() if example is None else example
    report = gfsa.diagnose(models, to_device(example, device), progress=False)
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    report.to_html(arguments.page)
    report.table()


if __name__ == "__main__":
    main()
