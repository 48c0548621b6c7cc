"""The generated parts of ``pretraining.md`` and ``pretraining-details.md``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from gfsa_experiments.results.number_format import NONE, Scale, p_value, signed
from gfsa_experiments.results.page_blocks import Block, Bullets, Grid, Heading, Picture, Text
from gfsa_experiments.results.pretraining.answer import family_tables
from gfsa_experiments.results.pretraining.arms import (
    PLAIN,
    arms_of,
    by_size,
    settings_apart,
    words_of,
)
from gfsa_experiments.results.pretraining.between import APART
from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.controls import GFSA, compared, controls, rates
from gfsa_experiments.results.pretraining.fit_words import FITTED, fit_sentence
from gfsa_experiments.results.pretraining.gap import cells
from gfsa_experiments.results.pretraining.larger import (
    larger_in_short,
    rate_blocks_of_larger,
    size_sentences,
)
from gfsa_experiments.results.pretraining.limits import (
    MARGIN,
    limit_blocks,
    limit_of_plain,
    limit_of_schedule,
)
from gfsa_experiments.results.pretraining.passing import (
    passing_blocks,
    passings,
    with_tuned_plain,
)
from gfsa_experiments.results.pretraining.probes import Measure, at_loss, measures
from gfsa_experiments.results.pretraining.savings import Saving, savings, savings_of_ends
from gfsa_experiments.results.pretraining.stability import ABOVE, breakdowns
from gfsa_experiments.results.pretraining.study import FAMILIES, Study
from gfsa_experiments.results.pretraining.warmups import warmup_blocks, warmup_steps
from gfsa_experiments.results.pretraining.where import longest_probed, where
from gfsa_experiments.results.pretraining.worth import worth, worth_sentences
from gfsa_experiments.results.statistics import LEVEL, Interval
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

NATS = Scale(1, 3)
OVER_LENGTHS = (
    "loss, repeated random tokens, second time",
    "loss, recalled pairs, second time",
    "loss, tokens 1–15",
    "loss, tokens from 128 on",
)
"""Probes that are shown for every length."""
UNTUNED = "‡"
"""Marks lengths at which plain is shown not to be tuned."""
Speeds = Mapping[tuple[str, str, int], float]


def first_blocks(study: Study) -> list[Block]:
    """What the first page has below its figure: the families and the controls."""
    return [*family_tables(study.families, FAMILIES), *_limits(study), *control_table(study)]


def _limits(study: Study) -> list[Block]:
    """What limits the family of the longest runs."""
    said = " ".join(filter(None, (limit_of_plain(study), limit_of_schedule(study))))
    if not said:
        return limit_blocks(study)
    text = (
        f"Family pretrain. {said} The plain models of the others: "
        "[limits](pretraining-details.md#what-limits-the-families)."
    )
    return [Text(text), *limit_blocks(study)]


def detail_blocks(study: Study, speeds: Speeds) -> list[Block]:
    """Every other section that has runs, and what is missing."""
    found = [*gap_blocks(study, speeds), *rate_blocks_of_larger(study.larger_rates)]
    found += [*warmup_blocks(study.warmups), *rate_blocks(study)]
    found += stability_blocks(study.stability)
    found += [*probe_blocks(study), *_paragraph(where(study)), *probes_by_length(study)]
    found += _coefficient_blocks(study)
    if study.missing:
        found += [Heading("Not run yet"), Bullets(study.missing)]
    return found


def _paragraph(text: str) -> list[Block]:
    return [Text(text)] if text else []


def control_table(study: Study) -> list[Block]:
    """Every control against GFSA and plain."""
    table = controls(study.controls)
    if table is None:
        return []
    arms = compared(table)
    pairs = [table.difference(arm, to) for arm in arms for to in (PLAIN, GFSA)]
    known = [pair for pair in pairs if pair is not None and pair.low is not None]
    shares = {
        words_of(text).get("warmup", str(PretrainConfig.warmup)) for text in study.controls.settings
    }
    warm = f"{100 * float(shares.pop()):g} % of the steps are warm-up, " if len(shares) == 1 else ""
    text = (
        f"Test loss in nats after one epoch, {warm}each arm at the rate that the plan has for it, "
        f"seed{'s' if len(table.seeds) > 1 else ''} {', '.join(map(str, table.seeds))}, which "
        "chose no rate ([plan](plans/pretrain-controls.txt))."
    )
    if table.spread is None:
        text += " One seed: no interval."
    else:
        text += (
            f" Intervals: 95 %, from one standard deviation of a run over all arms, "
            f"{table.spread:.3f} ({table.freedom} degrees of freedom). Exploratory: "
            f"{sum(pair.excludes_zero for pair in known)} of {len(known)} intervals exclude 0, "
            f"and {(1 - LEVEL) * len(known):.1f} would by chance."
        )
    broken = study.controls[study.controls.test.isna()]
    if len(broken):
        runs = sorted(f"{row.arm} (seed {row.seed})" for row in broken.itertuples())
        text += f" Broke down, which leaves their arm out: {', '.join(runs)}."
    rows = [
        [arm, f"{mean:.3f}"] + [NATS.interval(table.difference(arm, to)) for to in (PLAIN, GFSA)]
        for arm, mean in table.means.items()
    ]
    columns = ["arm", "loss", "− plain", "− GFSA"]
    return [Heading("Controls, and which layers"), Text(text), Grid(columns, rows, ("arm",))]


def rate_blocks(study: Study) -> list[Block]:
    """The learning rates of every control, and other plain models."""
    sentences = [*_rate_sentences(study.rates), *_baseline_sentences(study.baseline)]
    if sentences and _warms_up_too_briefly(study):
        sentences.append(
            "Plain ends lower with a longer warm-up (above): by the rule of the "
            "[plan](plans/pretrain-warmup.txt) these are not rates of tuned arms."
        )
    return (
        [Heading("Learning rates, and other plain models"), Bullets(sentences)] if sentences else []
    )


def _warms_up_too_briefly(study: Study) -> bool:
    """Whether plain ends :data:`MARGIN` lower with another warm-up than that of the rates."""
    if study.rates.empty or study.warmups.empty:
        return False
    rates_of, warmed = (runs[runs.arm == PLAIN] for runs in (study.rates, study.warmups))
    as_long = warmed[warmed.tokens.isin(rates_of.tokens)]
    return bool(as_long.valid.min() <= rates_of.valid.min() - MARGIN)


def _rate_sentences(runs: pd.DataFrame) -> list[str]:
    if runs.empty:
        return []
    said = []
    for own in rates(runs):
        cells = [f"{_loss(loss)} at {rate:g}" for rate, loss in own.losses.items()]
        edge = "; at the edge of what was tried" if own.is_at_edge else ""
        best = "every run broke down" if own.best is None else f"best at {own.best:g}{edge}"
        said.append(f"{own.arm}: {', '.join(cells)} ({best})")
    return [f"Learning rates, one epoch, {_warm(runs)}seed 0, validation loss. {'. '.join(said)}."]


def _warm(runs: pd.DataFrame) -> str:
    """The steps of warm-up, where all runs have as many."""
    if "steps" not in runs:
        return ""
    found = {warmup_steps(*one) for one in zip(runs.settings, runs.steps, strict=True)}
    return f"{found.pop()} steps of warm-up, " if len(found) == 1 else ""


def _loss(value: float) -> str:
    """A loss; a run that broke down has none."""
    return NONE if math.isnan(value) else NATS.number(value)


def _baseline_sentences(runs: pd.DataFrame) -> list[str]:
    """Other plain models against the family's, on valid; the rule is that of the plan."""
    if runs.empty:
        return []
    kinds: dict[str, list[str]] = {}
    apart = settings_apart(runs.settings)
    order = runs.sort_values("valid")
    for method, text, loss in zip(order.method, order.settings, order.valid, strict=True):
        own = f"`{apart[text]}` " if apart[text] else ""
        kinds.setdefault(method, []).append(f"{own}{_loss(loss)}")
    lists = [f"{method}: {', '.join(lines)}" for method, lines in kinds.items()]
    return [
        f"The plain model once more, with fast gains, one epoch, {_warm(runs)}seed 0, validation "
        f"loss, lowest first ([rule](plans/pretrain-baseline.txt)). {'; '.join(lists)}."
    ]


def gap_blocks(study: Study, speeds: Speeds) -> list[Block]:
    """The table of cells, the fits in sentences, what is saved."""
    runs = study.runs
    arms = [arm for arm in arms_of(runs) if arm != PLAIN and cells(runs, arm)]
    if not arms:
        return []
    by_arm = {arm: {(c.size, c.tokens): c for c in cells(runs, arm)} for arm in arms}
    places = {place: cell for found in by_arm.values() for place, cell in found.items()}
    order = by_size(runs)
    passed = passings(study.curves, runs)
    tuned = with_tuned_plain(runs, passed)
    compared_to_tuned = set(zip(tuned["size"], tuned.tokens, strict=True))
    rows = []
    for place in sorted(places, key=lambda place: (order.index(place[0]), place[1])):
        own = {arm: by_arm[arm].get(place) for arm in arms}
        plain = runs[(runs["size"] == place[0]) & (runs.tokens == place[1]) & (runs.arm == PLAIN)]
        pairs = "–".join(
            map(str, sorted({len(cell.seeds) for cell in own.values() if cell is not None}))
        )
        cells_of_row = [NATS.interval(cell.interval) if cell else NONE for cell in own.values()]
        name = f"{place[1] / 1e6:.0f}M"
        ratio = f"{places[place].ratio:.1f}{'' if place in compared_to_tuned else UNTUNED}"
        rows.append([place[0], name, ratio, pairs, f"{plain.test.mean():.3f}", *cells_of_row])
    text = (
        "Test loss in nats; differences are paired by seed, with Student's 95 % interval where "
        "there are two seeds or more. Every length is a run of its own with its whole schedule. "
        "Exploratory, apart from the families' comparisons."
    )
    if len(tuned) < len(runs):
        text += f" {UNTUNED} Not against a tuned plain model, as the next table shows."
    columns = ["size", "tokens", "tokens per parameter", "pairs", PLAIN]
    grid = Grid([*columns, *(f"{arm} − plain" for arm in arms)], rows, ("size",))
    sentences = [fit_sentence(arm, cells(tuned, arm)) for arm in FITTED if arm in by_arm]
    sentences += size_sentences(tuned)
    for arm in FITTED:
        found = savings(study.curves, runs, arm, speeds)
        for saving in found:
            sentences.append(saving_sentence(saving, savings_of_ends(tuned, arm, saving.size)))
    valued = [worth(runs, arm, size) for size in order for arm in arms]
    sentences += worth_sentences([one for one in valued if one is not None])
    return [
        Heading("The gap by tokens per parameter"),
        Text(text),
        grid,
        Bullets(sentences),
        *_paragraph(larger_in_short(study, tuned)),
        *passing_blocks(passed, FITTED),
    ]


def saving_sentence(saving: Saving, of_ends: Mapping[float, float]) -> str:
    """How many fewer tokens, and how much less time, to plain's final loss."""
    what = f"{saving.size}, {saving.tokens / 1e6:.0f}M tokens, {_seeds(len(saving.shares))}"
    if saving.share is None:
        text = (
            f"{what}: {saving.arm} reaches plain's final validation loss with {saving.reached} of "
            f"{len(saving.shares)} seeds, so no mean is given."
        )
    else:
        text = (
            f"{what}: {saving.arm} is at plain's final validation loss after "
            f"{_percent(saving.share)} of the tokens"
        )
        if saving.time is None:
            text += ", on its own schedule; the time of its step was not measured."
        else:
            text += (
                f" and {_percent(saving.time)} of the time, on its own schedule (a token takes "
                f"{saving.step_time:.2f} times plain's at batches of {saving.step_batch})."
            )
    if of_ends:
        text += (
            f" By the ends of runs, each with its whole schedule: plain's loss after "
            f"{_listed(f'{ratio:.1f}' for ratio in of_ends)} tokens per parameter takes "
            f"{_listed(f'{100 * share:.0f}' for share in of_ends.values())} % of the tokens"
        )
        if saving.step_time is not None:
            times = (f"{100 * share * saving.step_time:.0f}" for share in of_ends.values())
            text += f" and {_listed(times)} % of the time"
        text += "."
    return text


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _listed(parts: Iterable[str]) -> str:
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def _percent(share: Interval) -> str:
    mean = f"{100 * share.mean:.0f}"
    if share.low is None or share.high is None:
        return f"{mean} %"
    return f"{mean} % ({100 * share.low:.0f} … {100 * share.high:.0f})"


def stability_blocks(runs: pd.DataFrame) -> list[Block]:
    """Runs that broke down, by arm."""
    if runs.empty:
        return []
    rows = []
    for found in breakdowns(runs):
        share = f"{100 * found.low:.0f}–{100 * found.high:.0f} %"
        rows.append(
            [
                found.arm,
                f"{found.broken} of {found.runs}",
                share,
                p_value(found.p),
                NATS.number(found.worst),
            ]
        )
    text = (
        f"Runs that end without a finite loss, or more than {ABOVE:g} nat above the lowest of all "
        "(validation), at twice the best learning rate "
        "([plan](plans/pretrain-stability.txt)). Share: Clopper's and Pearson's 95 % interval. p: "
        "Fisher's exact test against plain, two-sided."
    )
    columns = ["arm", "broke down", "share", "p", "highest loss of the others"]
    return [Heading("Stability"), Text(text), Grid(columns, rows, ("arm",))]


def probe_blocks(study: Study) -> list[Block]:
    """Probes of the smallest size's longest runs that more than one arm has."""
    probed = longest_probed(study)
    if probed is None:
        return []
    found, others = probed.measures, probed.arms
    pairs = {arm: len(found[0].differences[arm].seeds) for arm in others}
    intervals = [m.differences[arm].interval for m in found for arm in others]
    known = [interval for interval in intervals if interval.low is not None]
    text = (
        f"{probed.size}, {probed.tokens / 1e6:.0f}M tokens. Plain's mean, and the paired "
        "difference of each arm to it with Student's 95 % interval; losses in nats, lower is "
        "better; the others are "
        f"shares and neither good nor bad. Exploratory: {sum(i.excludes_zero for i in known)} of "
        f"{len(known)} intervals exclude 0, and {(1 - LEVEL) * len(known):.1f} would by chance."
    )
    columns = ["measure", PLAIN, *(f"{arm} − plain ({_seeds(pairs[arm])})" for arm in others)]
    rows = [_measure_cells(measure, others) for measure in found]
    return [Heading("Probes of the trained models"), Text(text), Grid(columns, rows, ("measure",))]


def probes_by_length(study: Study) -> list[Block]:
    """How some probes develop over runs of the smallest size, and where plain has the same loss."""
    if study.probes.empty:
        return []
    runs = study.runs.merge(study.probes[RUN].drop_duplicates(), on=RUN)
    own = runs[runs["size"] == by_size(runs)[0]]
    arms = [arm for arm in FITTED if arm in set(own.arm)]
    by_length = {}
    for ratio, cell in own[own.arm.isin([PLAIN, *arms])].groupby("ratio"):
        found = {m.name: m for m in measures(study.probes.merge(cell[RUN], on=RUN))}
        if all(m.differences.keys() >= set(arms) for m in found.values()):
            tokens = float(cell.tokens.iloc[0])
            by_length[float(ratio)] = found, tokens, cell.groupby("arm").test.mean()
    if not arms or len(by_length) < 2:
        return []
    rows = []
    # short rows have no late tokens, and a run may lack a probe
    shared = [
        name for name in OVER_LENGTHS if all(name in found for found, _, _ in by_length.values())
    ]
    for name in shared:
        plain = [
            (tokens, float(ends[PLAIN]), found[name].plain)
            for found, tokens, ends in by_length.values()
        ]
        for ratio, (found, _, ends) in by_length.items():
            measure = found[name]
            cells = [measure.name, f"{ratio:.1f}", NATS.number(measure.plain)]
            for arm in arms:
                mean = measure.differences[arm].interval.mean
                equal = at_loss(plain, float(ends[arm]))
                # rounded here, and −0 made 0: what is left of rounding has no sign
                there = None if equal is None else round(measure.plain + mean - equal, 2) + 0.0
                cells += [signed(mean, 2), NONE if there is None else signed(there, 2)]
            rows.append(cells)
    if not rows:
        return []
    columns = ["measure", "tokens per parameter", PLAIN]
    for arm in arms:
        columns += [f"{arm} − plain", "at equal loss"]
    text = (
        "By length of the run, means over seeds. At equal loss: the difference to plain's measure "
        "where plain's test loss is the arm's, on a line between plain's two nearest lengths, if "
        f"these are no more than {APART:g} times apart. Exploratory."
    )
    return [Text(text), Grid(columns, rows, ("measure",))]


def _measure_cells(measure: Measure, arms: list[str]) -> list[str]:
    found = [measure.differences.get(arm) for arm in arms]
    differences = [NATS.interval(pair.interval if pair else None) for pair in found]
    return [measure.name, NATS.number(measure.plain), *differences]


def _coefficient_blocks(study: Study) -> list[Block]:
    if study.coefficients.empty:
        return []
    return [
        Heading("Coefficients over training"),
        Picture("pretraining/coefficients.svg", "c0, c1, c2 by layer over training"),
        Text(
            "Head by head, of those runs that kept their coefficients over training: "
            "[lens page](lens/pretraining.html)."
        ),
    ]
