"""What a run of pretraining tries (its arm), its size and the tokens that it sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

PLAIN = "plain"


def labelled(rows: pd.DataFrame, missing: list[str], keep_diverged: bool = False) -> pd.DataFrame:
    """Rows with their arm, size and tokens; a run without a finite loss is named and left out."""
    runs = rows.copy()
    texts = zip(runs.method, runs.options, runs.settings, strict=True)
    runs["arm"] = [arm_of(*text) for text in texts]
    runs["size"] = [task.rpartition("-")[2].upper() for task in runs.task]
    words = [words_of(text) for text in runs.settings]
    runs["batch_size"] = [int(w.get("batch_size", PretrainConfig.batch_size)) for w in words]
    runs["lr"] = [float(w.get("lr", PretrainConfig.lr)) for w in words]
    block = [int(w.get("block", PretrainConfig.block)) for w in words]
    runs["tokens"] = runs.steps.astype(int) * runs.batch_size * block
    runs["parameters"] = runs.parameters - runs.added
    runs["ratio"] = runs.tokens / runs.parameters
    if keep_diverged:
        return runs
    for row in runs[runs.test.isna()].itertuples():
        missing.append(f"{row.size} {row.arm}, seed {row.seed}: the run diverged and is left out.")
    runs = runs[runs.test.notna()]
    twice = runs[runs.duplicated(["arm", "size", "tokens", "seed"], keep=False)]
    if len(twice):
        names = "; ".join(f"{row.arm} {row.settings}" for row in twice.itertuples())
        raise ValueError(
            f"{twice['size'].iloc[0]}, seed {twice.seed.iloc[0]}: two runs of one arm see as many "
            f"tokens: {names}; the plans must ask for one"
        )
    return runs


def arm_of(method: str, options: str, settings: str) -> str:
    """The name of what a run tries, whatever its rates, length and size."""
    own, of_model = words_of(options), words_of(settings)
    names = {"plain": PLAIN, "degree1": "degree 1", "gfsa": "GFSA", "neutreno": "value residual"}
    name = names.get(method, method)
    if own.get("learn") == "w1":
        name = "gain only"
    if of_model.get("gate") == "True":
        name = "gated" if name == PLAIN else f"{name}, gated"
    if "depth" in of_model:
        name += f", {of_model['depth']} layers"
    if "layers" in own:
        name += f", {own['layers']} layers"
    if "init_std" in of_model:
        name += f", weights of {of_model['init_std']}"
    if of_model.get("output_norm") == "True":
        name += ", normalised outputs"
    return name


def settings_apart(texts: Iterable[str]) -> dict[str, str]:
    """The settings of several runs → those of them that not all of the runs have."""
    words = {text: text.split() for text in texts}
    for own in words.values():
        # the default, which settings do not name
        if not any(word.startswith("qk_norm=") for word in own):
            own.append(f"qk_norm={PretrainConfig.qk_norm}")
    shared = set[str].intersection(*map(set, words.values())) if words else set()
    return {
        text: " ".join(word for word in own if word not in shared) for text, own in words.items()
    }


def words_of(text: str) -> dict[str, str]:
    """``"lr=0.1 depth=2"`` → its values by name."""
    return dict(word.partition("=")[::2] for word in text.split())


def by_size(runs: pd.DataFrame) -> list[str]:
    """The sizes, smallest first."""
    order = runs.groupby("size").parameters.min().sort_values()
    return [str(size) for size in order.index]


def longest_compared(runs: pd.DataFrame) -> int:
    """The tokens of the longest runs that several arms have; plain alone may train for longer."""
    arms = runs.groupby("tokens").arm.nunique()
    return int((arms[arms > 1] if (arms > 1).any() else arms).index.max())


def arms_of(runs: pd.DataFrame) -> list[str]:
    """The arms: plain, degree 1 and GFSA first, then the others by name."""
    known = [PLAIN, "degree 1", "GFSA"]
    found: Iterable[Any] = runs.arm.unique()
    return sorted(map(str, found), key=lambda arm: (known.index(arm) if arm in known else 9, arm))
