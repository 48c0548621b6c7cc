"""ListOps accuracy from the outermost operator alone.

    python benchmarks/listops_by_operator.py --data-dir data

Predicts for every list the answer that is most frequent in ``train`` for its outermost operator:
the accuracy of a model that ignores the arguments.
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
