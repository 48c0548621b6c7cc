"""The study of pretraining: collect what runs leave behind, write its page and figures.

python benchmarks/pretraining_curves.py collect RUNS FOLDER       # after gfsa train, where it ran
python benchmarks/pretraining_curves.py add FOLDER results        # into results/pretraining/*.csv
python benchmarks/pretraining_curves.py write results             # pretraining.md, its figures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gfsa_experiments.results.pretraining.collect import (
    add_tables,
    collect,
    read_tables,
    write_tables,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    gathers = actions.add_parser("collect", help="from run folders to three CSV files")
    gathers.add_argument("runs", type=Path, help="the --out of gfsa train")
    gathers.add_argument("folder", type=Path, help="for the CSV files; of a file, its folder")
    adds = actions.add_parser("add", help="collected files into those of the results")
    adds.add_argument("folder", type=Path)
    adds.add_argument("results", type=Path)
    adds.add_argument("--replace", action="store_true", help="of runs that are there already")
    writes = actions.add_parser("write", help="the page's generated part, figures, lens page")
    writes.add_argument("results", type=Path)
    given = parser.parse_args()
    try:
        if given.action == "collect":
            _collect(given.runs, given.folder)
        elif given.action == "write":
            from gfsa_experiments.results.pretraining.write import write

            print(f"wrote {', '.join(map(str, write(given.results)))}")
        else:
            found = read_tables(given.folder)
            if not any(found.values()):
                raise ValueError(
                    f"{given.folder} has no curves.csv, probes.csv or coefficients.csv"
                )
            print("\n".join(add_tables(found, given.results / "pretraining", given.replace)))
    except (ValueError, OSError) as error:
        sys.exit(f"pretraining_curves: {error}")


def _collect(runs: Path, folder: Path) -> None:
    tables, unfinished = collect(runs)
    # where a run takes minutes of a GPU, a path of a file is no reason to lose what it left
    folder = folder.parent if folder.suffix == ".csv" else folder
    written = write_tables(tables, folder)
    print(f"wrote {', '.join(map(str, written)) or 'nothing: no run has a curve'}")
    for path in unfinished:
        print(f"not finished, left out: {path}")


if __name__ == "__main__":
    main()
