"""How far the outermost operator alone goes on ListOps.

    python benchmarks/listops_by_operator.py --data-dir data

The answer that is most frequent in ``train`` under each operator, given for every list of the
other parts that begins with it: what a model knows that has learned nothing of what is inside.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from gfsa_experiments.tasks.lra.listops import TOKENS, Sequences
from gfsa_experiments.tasks.lra.listops_files import read_listops


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parts = read_listops(parser.parse_args().data_dir)
    answers = _most_frequent(parts["train"])
    print(*(f"{TOKENS[operator]} … ]: {answer}" for operator, answer in answers.items()), sep="\n")
    for name in ("val", "test"):
        part = parts[name]
        right = np.array([answers[first] for first in _operators(part)]) == part.labels
        print(f"{name}: {100 * right.mean():.2f} % of {len(right):,} lists")


def _operators(part: Sequences) -> np.ndarray:
    return part.tokens[part.offsets[:-1]]


def _most_frequent(part: Sequences) -> dict[int, int]:
    operators = _operators(part)
    return {
        int(operator): int(np.bincount(part.labels[operators == operator]).argmax())
        for operator in np.unique(operators)
    }


if __name__ == "__main__":
    main()
