"""The figures that prose quotes, each from the rows; prose is wrong where it says another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from gfsa_experiments.results.contrasts import contrast
from gfsa_experiments.results.families import is_of, read_families
from gfsa_experiments.results.family_summary import Judged, is_complete, lines_of
from gfsa_experiments.results.load_rows import Runs, read_folder, read_folder_if_any
from gfsa_experiments.results.statistics import Interval
from gfsa_experiments.results.tables import Line, ResultTable, make_tables
from gfsa_experiments.results.verdicts import Outcome, outcomes
from support.prose import ROOT, count_word


class Figures:
    """Everything that is read from a folder of rows, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def runs(self) -> Runs:
        return read_folder(self.folder)

    @cached_property
    def judged(self) -> list[Judged]:
        """Every family with its outcomes."""
        families = read_families(self.folder)
        return [(family, outcomes(family, self.runs.rows)) for family in families]

    @property
    def complete(self) -> list[Judged]:
        """The families with all their runs."""
        return [(family, found) for family, found in self.judged if is_complete(found)]

    @cached_property
    def tables(self) -> list[ResultTable]:
        keys = {key for family in read_families(self.folder) for key in family.keys}
        return make_tables(self.runs.where(lambda rows: ~is_of(rows, keys)))

    @cached_property
    def tuning(self) -> pd.DataFrame:
        return read_folder_if_any(self.folder / "tuning").rows

    def of_family(self, name: str) -> list[Outcome]:
        (found,) = [found for family, found in self.complete if family.name == name]
        return found

    def outcome(self, family: str, a: str, b: str) -> Outcome:
        (found,) = [o for o in self.of_family(family) if o.comparison.name == f"{a} − {b}"]
        return found

    def family_difference(self, family: str, a: str, b: str = "plain") -> Interval:
        """Of any two lines of a complete family, compared by it or not."""
        lines = {own.name: own.line for own in lines_of(self.of_family(family))}
        found = contrast(lines[a].rows, lines[b].rows)
        assert found is not None
        return found.test.interval

    def line(self, recipe: str, task: str, method: str, options: str, settings: str = "") -> Line:
        """The one exploratory line of a task, of several tables that with a setting."""
        (found,) = [
            line
            for table in self.tables
            if table.recipe == recipe and table.task == task and settings in table.settings
            for line in table.lines
            if (line.method, line.options) == (method, options)
        ]
        return found

    def loss_of(self, settings: str, method: str = "plain", options: str = "") -> float:
        """The validation loss of the run of pretraining, seed 0, with exactly these settings."""
        rows = self.tuning
        own = rows[(rows.recipe == "pretrain") & (rows.task == "techdocs qwen3-15m")]
        own = own[(own.method == method) & (own.options == options) & (own.seed == 0)]
        (loss,) = own[own.settings == settings].valid
        return float(loss)

    def step_times(self, variant: str) -> list[float]:
        """A compiled step of pretraining relative to plain, by the newest commit that timed it."""
        rows = pd.read_csv(self.folder / "bench.csv")
        rows = rows[(rows.suite == "pretrain-step") & (rows.variant == variant)]
        return rows[rows.commit == rows.sort_values("date").commit.iloc[-1]].fwd_bwd_ratio.tolist()

    def text(self, page: str) -> str:
        """A page whose generated part another test compares with the rows."""
        return (self.folder / page).read_text("utf-8")


PRETRAINING = ("pretrain", "pretrain-epoch", "pretrain-epoch-best")
"""The families of pretraining."""
FIGURES = Figures(ROOT / "results")
"""Of the project's own rows; judging them takes seconds, so tests share it."""


@dataclass(frozen=True)
class Claim:
    """Words with a place for each number, and what the rows give for these places."""

    words: str
    values: Callable[[Figures], list[str]]


def size(value: float, decimals: int) -> str:
    return f"{abs(value):.{decimals}f}"


def signed(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f}".replace("-", "−")


def ends(values: list[float], decimals: int) -> list[str]:
    return [f"{end:.{decimals}f}" for end in (min(values), max(values))]


def runs_with_negative_c0(figures: Figures, *families: str) -> list[str]:
    """``12`` of the families' runs that learn c0 from scratch, if it is negative in all of them."""
    c0 = [c for name in families for own in lines_of(figures.of_family(name)) for c in own.line.c0]
    assert all(value < 0 for value in c0)
    return [str(len(c0))]


def _lead_before_tuning(figures: Figures) -> float:
    """GFSA − plain where plain had its learning rate tuned and nothing else, best runs."""
    rows = figures.tuning
    own = rows[(rows.recipe == "pretrain") & (rows.steps == 802) & (rows.seed == 0)]
    plain = own[(own.method == "plain") & own.settings.isin(["", *_RATES])]
    gfsa = own[(own.method == "gfsa") & own.settings.isin(["", *_RATES])]
    return float(gfsa.valid.min() - plain.valid.min())


_RATES = [f"lr={rate}" for rate in ("0.0005", "0.002", "0.004")]
_TUNED = "batch_size=32 lr=0.002 gain_lr=0.1{} qk_norm=temperature"


def _gains_of_warmup(figures: Figures) -> list[str]:
    """How much lower plain ends with 241 steps of warm-up than with 5 % of the run."""
    lengths = (("epochs=0.3 ", "0.5"), ("epochs=0.6 ", "0.25"), ("", "0.15"))
    found = [
        figures.loss_of(epochs + _TUNED.format(""))
        - figures.loss_of(epochs + _TUNED.format(f" warmup={longer}"))
        for epochs, longer in lengths
    ]
    return ends(found, 2)


def _gains_of_gain_lr(figures: Figures) -> list[str]:
    pairs = [
        ("lr=0.002 qk_norm=temperature", "lr=0.002 gain_lr=0.3 qk_norm=temperature"),
        (
            "batch_size=16 lr=0.002 qk_norm=temperature",
            "batch_size=16 lr=0.002 gain_lr=0.1 qk_norm=temperature",
        ),
    ]
    found = [figures.loss_of(a) - figures.loss_of(b) for a, b in pairs]
    return ends(found, 2)


def _seeds_on_zinc(figures: Figures) -> list[str]:
    rows = figures.tuning
    own = rows[(rows.recipe == "graph") & (rows.task == "zinc graphormer-slim")]
    return [count_word(own.seed.nunique())]


def _c0_from_scratch(figures: Figures) -> tuple[str, str]:
    (found,) = re.findall(
        r"c0 is negative in (\d+) of (\d+) runs that learned it", figures.text("exploratory.md")
    )
    return found


def _seeds(figures: Figures, family: str) -> str:
    return count_word(figures.of_family(family)[0].pairs)


def _cifar10(figures: Figures) -> list[str]:
    task = next(t.task for t in figures.tables if t.recipe == "image" and "24" in t.task)
    line = figures.line("image", task, "degree1", "filter_lr=0.01")
    assert line.to_plain is not None
    return [signed(line.to_plain.test.mean, 1)]


def _stsb(figures: Figures) -> list[str]:
    line = figures.line("glue", "stsb minilm", "gfsa", "learn=w0 filter_lr=0.01")
    assert line.to_plain is not None
    return [
        signed(line.to_plain.test.mean, 2),
        signed(figures.family_difference("stsb", "w0").mean, 2),
    ]


def _leads_on_wikitext2(figures: Figures) -> list[str]:
    """At a rate that was not tuned, and of the family."""
    line = figures.line("causal_lm", "wikitext-2 gpt2-d8-w256", "gfsa", "filter_lr=0.01")
    assert line.to_plain is not None
    family = figures.family_difference("wikitext2", "gfsa")
    return [size(line.to_plain.test.mean, 2), size(family.mean, 2)]


def _plain_on_wikitext2(figures: Figures) -> list[str]:
    """On valid, at the first rate and at the best."""
    rows = figures.tuning
    plain = rows[(rows.recipe == "causal_lm") & (rows.method == "plain")]
    first = plain[plain.settings.str.contains(r" lr=0.001 (?!gain_lr).*warmup=0.05")]
    return [size(found.valid.min(), 1) for found in (first, plain)]


def _longest_warmup_on_wikitext2(figures: Figures) -> list[str]:
    """In percent of the run, if the best run of every arm has it."""
    rows = figures.tuning
    own = rows[rows.recipe == "causal_lm"]
    warmup = own.settings.str.extract(r"warmup=([\d.]+)", expand=False).astype(float)
    arms = own.method + own.options.str.contains("learn=w1").map({True: " gain", False: ""})
    assert set(warmup[own.groupby(arms).valid.idxmin()]) == {warmup.max()}
    return [f"{100 * warmup.max():.0f}"]


def _shares_on_wikitext2(figures: Figures) -> list[str]:
    """GFSA's lead in percent of plain's perplexity: at an untuned rate, and of the family."""
    line = figures.line("causal_lm", "wikitext-2 gpt2-d8-w256", "gfsa", "filter_lr=0.01")
    family = figures.outcome("wikitext2", "gfsa", "plain").contrast
    assert line.to_plain is not None
    assert family is not None
    return [size(100 * one.test.mean / one.error, 1) for one in (line.to_plain, family)]


def _reduction_of_perplexity(figures: Figures) -> list[str]:
    """In percent."""
    found = figures.outcome("wikitext2-featscale", "gfsa", "plain").contrast
    assert found is not None
    return [size(100 * found.test.mean / found.error, 1)]


def larger_pairs(figures: Figures) -> dict[tuple[str, str, str], float]:
    """``method − plain`` on test by size, method and tokens a parameter, at the better rate."""
    rows = figures.tuning
    large = rows[(rows.recipe == "pretrain") & ~rows.task.str.endswith("-15m") & rows.valid.notna()]
    best = large.loc[large.groupby(["task", "method", "seed", "steps"]).valid.idxmin()]
    plain = best[best.method == "plain"]
    pairs = plain.merge(best[best.method != "plain"], on=["task", "seed", "steps"])
    # every run has batches of 32 rows of 1,024 tokens
    assert set(large.settings.str.extract(r"batch_size=(\d+)", expand=False)) == {"32"}
    ratios = pairs.steps * 32 * 1024 / pairs.parameters_x
    return {
        (task.rpartition("-")[2].upper(), method, f"{ratio:.1f}"): float(gap)
        for task, method, ratio, gap in zip(
            pairs.task, pairs.method_y, ratios, pairs.test_y - pairs.test_x, strict=True
        )
    }


def _of_larger(*keys: tuple[str, str, str]) -> Callable[[Figures], list[str]]:
    return lambda figures: [size(larger_pairs(figures)[key], 3) for key in keys]


def checked_leads(figures: Figures) -> dict[str, list[float]]:
    """GFSA − plain on WikiText-2 by dropout: on test, and plain on valid, means over seeds."""
    rows = read_folder(figures.folder / "checks").rows
    own = rows[~rows.settings.str.contains("gain_lr")]
    dropout = own.settings.str.extract(r"dropout=([\d.]+)", expand=False).fillna("0.1")
    found = {}
    for value, of_value in own.groupby(dropout):
        means = of_value.groupby("method")[["test", "valid"]].mean()
        if {"plain", "gfsa"} <= set(means.index) and of_value.seed.nunique() == 2:
            lead = means.test["gfsa"] - means.test["plain"]
            found[str(value)] = [float(lead), float(means.valid["plain"])]
    return found


def _step_on_wikitext2(figures: Figures) -> list[str]:
    """GFSA's step in plain's, as the family trains: compiled blocks."""
    rows = read_folder(figures.folder / "times").rows
    own = rows[(rows.recipe == "causal_lm") & rows.settings.str.contains("compile=blocks")]
    plain, gfsa = (
        own[(own.method == name) & ~own.options.str.contains("learn")].seconds_per_step.item()
        for name in ("plain", "gfsa")
    )
    return [size(float(gfsa) / float(plain), 2)]


def _dropout_of_wikitext2(figures: Figures) -> list[str]:
    """That of the family wikitext2."""
    (family,) = [own for own, _ in figures.complete if own.name == "wikitext2"]
    return [*{found for key in family.keys for found in re.findall(r"dropout=(\S+)", key.settings)}]


def _range_of_reductions(figures: Figures) -> list[str]:
    """In whole percent, degree 1 in pretraining at best rates and GFSA at the best dropout."""
    found = [_perplexity_in_pretraining(figures, "degree1", "plain")]
    found.append(_reduction_of_perplexity(figures))
    return [f"{float(share):.0f}" for (share,) in found]


def step_ratios(figures: Figures) -> dict[str, str]:
    """The time of a step at best rates, relative to plain's, by line; runs side by side."""
    (family,) = [own for own, _ in figures.complete if own.name == "pretrain-epoch-best"]
    rows = figures.runs.rows[is_of(figures.runs.rows, family.keys)]
    arms = rows.method + rows.settings.str.contains("gate=True").map({True: " gated", False: ""})
    seconds = rows.groupby(arms).seconds_per_step.mean()
    names = {"degree1": "degree1", "plain gated": "gated", "degree1 gated": "both"}
    return {name: f"{seconds[arm] / seconds['plain']:.2f}" for arm, name in names.items()}


def _perplexity_in_pretraining(figures: Figures, a: str, b: str) -> list[str]:
    """What a difference in nats is as a share of the perplexity."""
    found = figures.family_difference("pretrain-epoch-best", a, b)
    return [size(100 * math.expm1(found.mean), 1)]


CLAIMS = [
    # leads that shrank
    Claim(
        "from {} nats (valid, one seed) to {}",
        lambda f: [
            size(_lead_before_tuning(f), 2),
            size(f.family_difference("pretrain-epoch", "gfsa").mean, 3),
        ],
    ),
    Claim("STS-B from {} (dev) to {} (test)", _stsb),
    Claim("Graphormer on ZINC to nothing ({} seeds)", _seeds_on_zinc),
    Claim("GFSA on WikiText-2 went from {} to {} perplexity", _leads_on_wikitext2),
    # WikiText-2
    Claim("{} % lower perplexity on WikiText-2", _reduction_of_perplexity),
    Claim("took plain from {} to {} (valid)", _plain_on_wikitext2),
    Claim("longest warm-up that was tried, {} % of the run", _longest_warmup_on_wikitext2),
    Claim("8.5M parameters, {} seeds", lambda f: [_seeds(f, "wikitext2")]),
    Claim("a step takes {}× plain's", _step_on_wikitext2),
    Claim("dropout 0.1 instead of 0.2 to {}", lambda f: [size(checked_leads(f)["0.1"][1], 1)]),
    Claim("({} % to {} %)", _shares_on_wikitext2),
    Claim(
        "with dropout tuned too, to {}",
        lambda f: [size(f.family_difference("wikitext2-featscale", "gfsa").mean, 2)],
    ),
    Claim("perplexity is {} to {} % lower", _range_of_reductions),
    Claim("at dropout {}", _dropout_of_wikitext2),
    Claim("a step with GFSA takes {}×", _step_on_wikitext2),
    # pretraining
    Claim(
        "{} % lower perplexity in pretraining (15M",
        lambda f: _perplexity_in_pretraining(f, "degree1", "plain"),
    ),
    Claim(
        "added to a model with gated heads, {} % lower than that model",
        lambda f: _perplexity_in_pretraining(f, "both", "gated"),
    ),
    Claim(
        "at 46M degree 1 ends {} lower than plain after 3.4", _of_larger(("46M", "degree1", "3.4"))
    ),
    Claim(
        "at 110M {} and GFSA {} lower after 0.9",
        _of_larger(("110M", "degree1", "0.9"), ("110M", "gfsa", "0.9")),
    ),
    Claim("the warm-up ({} to {} nats in short runs)", _gains_of_warmup),
    Claim("a fast rate for the norm gains], ({} to {})", _gains_of_gain_lr),
    Claim(
        "gated heads end {} lower than degree 1",
        lambda f: [size(f.family_difference("pretrain", "gated", "degree1").mean, 3)],
    ),
    Claim("degree 1 took {}× plain's step", lambda f: [step_ratios(f)["degree1"]]),
    Claim("{} to {}× the time of a step", lambda f: ends(f.step_times("gfsa degree 1"), 2)),
    Claim("{} to {}× with degree 1", lambda f: ends(f.step_times("gfsa degree 1"), 2)),
    Claim("{} to {}× with GFSA", lambda f: ends(f.step_times("gfsa"), 2)),
    # other domains
    Claim("{} points on CIFAR-10 with 24 layers", _cifar10),
    # coefficients
    Claim("negative in {} of {} runs", lambda f: list(_c0_from_scratch(f))),
    Claim("in each of {} runs", lambda f: [_c0_from_scratch(f)[0]]),
    Claim(
        "in the {} of the families",
        lambda f: runs_with_negative_c0(f, *PRETRAINING, "wikitext2", "wikitext2-featscale"),
    ),
    # sizes of families
    Claim("15M parameters, {} seeds", lambda f: [_seeds(f, "pretrain-epoch")]),
    Claim("STS-B, test set, {} seeds", lambda f: [_seeds(f, "stsb")]),
]
"""Numbers of the prose that are no quote of a family's comparison with its interval or verdict."""
