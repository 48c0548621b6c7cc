"""What the demo compares: its tasks, and each variant with the rates that were chosen for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gfsa_experiments.engine.config import TrainConfig
from gfsa_experiments.runs.methods import MethodConfig
from gfsa_experiments.runs.run import Run
from gfsa_experiments.tasks.digits.recipe import DigitsConfig, load_digits
from gfsa_experiments.tasks.stdlib.data import read_parts, rows_of, source_folder
from gfsa_experiments.tasks.stdlib.recipe import StdlibConfig

LONGER = "plain, 1.2× steps"
TaskName = Literal["stdlib", "digits"]
_PARTS = {"test": "test", "validation": "valid"}
# images or rows of text that the lens looks at, and those of them whose spectra it measures
_LOOKED_AT = {"stdlib": 128, "digits": 450}
_SPECTRA = {"stdlib": 16, "digits": 450}


@dataclass(frozen=True)
class Variant:
    """One line of the demo's table."""

    method: str
    options: MethodConfig
    settings: Mapping[str, Any]
    """Settings of its own, chosen on the validation part."""
    longer: float = 1.0
    """Its steps as a multiple of those of the others."""


@dataclass(frozen=True)
class DemoSettings:
    """What the caller of the demo can change."""

    task: TaskName = "stdlib"
    seeds: int = 4
    steps: int = 500
    """Of ``stdlib``."""
    epochs: int = 8
    """Of ``digits``."""
    depth: int | None = None
    """Attention layers; None for the task's own."""
    K: int = 3
    held_out: Literal["test", "validation"] = "test"
    """The part that is reported; settings were chosen on the validation part."""
    jobs: int = min(4, os.cpu_count() or 1)
    """Runs at a time, each on one core."""
    quick: bool = False
    """Evaluate and look at as little as possible, to see that everything runs."""

    @property
    def first_seed(self) -> int:
        """Of ``stdlib``, lower seeds were used to choose the settings."""
        return 100 if self.task == "stdlib" else 0

    @property
    def layers(self) -> int:
        """Attention layers."""
        if self.depth is not None:
            return self.depth
        return StdlibConfig().depth if self.task == "stdlib" else DigitsConfig().depth

    @property
    def extent(self) -> str:
        """How long each run trains, in words."""
        return f"{self.steps} steps" if self.task == "stdlib" else f"{self.epochs} epochs"

    @property
    def spectral_samples(self) -> int:
        """How many of :meth:`inputs` take part in the costly measurements of the lens."""
        return 4 if self.quick else _SPECTRA[self.task]

    def variants(self) -> dict[str, Variant]:
        """Name → variant; the others are compared with the first."""
        return (_stdlib_variants if self.task == "stdlib" else _digits_variants)(self.K)

    def run(self, name: str, seed: int, out: Path) -> Run:
        """One run of a variant."""
        variant = self.variants()[name]
        return Run(
            recipe=self.task,
            config=self._config(variant, seed),
            method=variant.method,
            options=variant.options,
            out=out,
            device="cpu",
            jobs=self.jobs,
        )

    def inputs(self) -> Tensor:
        """Held-out images or rows of text, for the lens."""
        part = _PARTS[self.held_out]
        count = 8 if self.quick else _LOOKED_AT[self.task]
        if self.task == "digits":
            return load_digits()[part].columns["images"][:count]
        rows = rows_of(read_parts(source_folder())[part], StdlibConfig().block, part, count)
        return rows.columns["ids"][:, :-1].long()

    def _config(self, variant: Variant, seed: int) -> TrainConfig:
        common: dict[str, Any] = {
            "seed": seed,
            "depth": self.layers,
            "checkpoints": False,
            "tensorboard": False,
            "save_model": True,
            **variant.settings,
        }
        if self.task == "digits":
            return DigitsConfig(**common, epochs=self.epochs, log_every=4)
        # evaluations change nothing that is learned, and take a quarter of the time by default
        common |= {"eval_rows": 64}
        if self.quick:
            common |= {"evaluations": 2, "eval_rows": 64, "test_rows": 64}
        return StdlibConfig(**common, max_steps=round(variant.longer * self.steps))


def _stdlib_variants(K: int) -> dict[str, Variant]:
    # each arm's best of those in docs/recipes/stdlib.md: so short a run needs a long warm-up
    plain = {"lr": 4e-3, "warmup": 0.6}
    gfsa = {"lr": 5e-3, "warmup": 0.6}
    return {
        "plain": Variant("plain", MethodConfig(), plain),
        # about as long as GFSA takes
        LONGER: Variant("plain", MethodConfig(), plain, longer=1.2),
        "degree 1": Variant("degree1", MethodConfig(filter_lr=0.1), {"lr": 3e-3, "warmup": 0.4}),
        f"GFSA K={K}": Variant("gfsa", MethodConfig(K=K, filter_lr=0.1), gfsa),
    }


def _digits_variants(K: int) -> dict[str, Variant]:
    # coefficients move by tenths, weights by hundredths: filters get a larger learning rate
    filtered = MethodConfig(lr_multiplier=10.0)
    return {
        "plain": Variant("plain", MethodConfig(), {}),
        "degree 1": Variant("degree1", filtered, {}),
        f"GFSA K={K}": Variant("gfsa", replace(filtered, K=K), {}),
    }
