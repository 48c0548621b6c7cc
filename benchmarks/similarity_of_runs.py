"""Token similarity of every run with a lens reading, one line per run.

    gfsa train --plan results/plans/image.txt          # lens=true: each run leaves a lens.json
    python benchmarks/similarity_of_runs.py runs/image > results/lens/image-similarity.csv

``cosine_input`` and ``cosine_end``: mean cosine similarity of the tokens that enter the first block
and leave the last. ``upper_map`` and ``upper_filter``: the mean response to the upper half of the
frequencies, over heads and layers, of the attention maps and of their filters (equal in a model
without filters). ``c2_size``, ``c2_least``, ``c2_most``: mean |c2| over heads and
layers, and its extremes. Empty: not measured.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from statistics import fmean

from gfsa.lens.readings import ModelReading, Spectrum
from gfsa.lens.report import LensReport

COLUMNS = (
    *("task", "method", "seed"),
    *("cosine_input", "cosine_end", "upper_map", "upper_filter"),
    *("c2_size", "c2_least", "c2_most"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="a folder with runs below it")
    runs = parser.parse_args().runs
    pages = sorted(runs.rglob("lens.json"))
    if not pages:
        raise SystemExit(f"found no lens.json below {runs}: train with --set lens=true")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for page in pages:
        task, run, seed = page.parts[-4:-1]
        (model,) = LensReport.from_json(page).models.values()
        # the folder's name ends in a digest of the settings
        line = [task, run.rpartition("-")[0], seed.removeprefix("seed-")]
        writer.writerow([*line, *figures(model)])


def figures(model: ModelReading) -> list[str]:
    second = [c[2] for at in model.attention for c in at.coefficients if len(c) > 2]
    spectra = [layer.spectrum for layer in model.attention if layer.spectrum is not None]
    return [
        _mean([model.features[0].cosine]),
        _mean([model.features[-1].cosine]),
        _mean([_upper_half(spectrum, spectrum.map_response) for spectrum in spectra]),
        _mean([_upper_half(spectrum, spectrum.filter_response) for spectrum in spectra]),
        _mean([abs(c) for c in second]),
        _mean([min(second)] if second else []),
        _mean([max(second)] if second else []),
    ]


def _mean(numbers: list[float]) -> str:
    return f"{fmean(numbers):.3f}" if numbers else ""


def _upper_half(spectrum: Spectrum, response: list[list[float]]) -> float:
    return fmean(
        share
        for head in response
        for frequency, share in zip(spectrum.frequencies, head, strict=True)
        if frequency >= 0.25
    )


if __name__ == "__main__":
    main()
