"""Numbers that prose quotes are those of the rows: of every complete family, and of the claims."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache

import pandas as pd
import pytest
from scipy import stats

from gfsa_experiments.results.family_summary import NAMES, lines_of
from gfsa_experiments.results.number_format import p_value
from gfsa_experiments.results.statistics import Interval, holm
from gfsa_experiments.results.tables import coefficients_of, learns_c0
from gfsa_experiments.results.verdicts import Outcome
from support import quoted_figures
from support.prose import (
    COUNTS,
    NUMBER,
    ROOT,
    VERDICTS,
    Passage,
    Quote,
    count_word,
    passages_of,
    prose_with_results,
    quotes_in,
    results_in,
)
from support.quoted_figures import CLAIMS, FIGURES, Claim

PROSE = prose_with_results()
PAGES = sorted({passage.page for passage in PROSE})
# how prose names the lines of families; a line without a name here goes by its own
WORDS = NAMES | {"gain": "gain", "w0": "identity term", "twicing": "twicing"}


@cache
def all_outcomes() -> list[Outcome]:
    return [outcome for _, found in FIGURES.complete for outcome in found]


def rounded(value: float, like: str) -> str:
    """A number with the decimals and, if it has one, the sign of another."""
    decimals = len(like.partition(".")[2])
    shown = f"{value:+.{decimals}f}" if like[0] in "+−" else f"{abs(value):.{decimals}f}"
    return shown.replace("-", "−")


def has_these_numbers(quote: Quote, found: Interval) -> bool:
    if rounded(found.mean, quote.mean) != quote.mean:
        return False
    if quote.ends is None:
        return True
    if found.low is None or found.high is None:
        return False
    # without signs the smaller end stands first
    low, high = (found.low, found.high) if quote.mean[0] in "+−" else sizes(found)
    return quote.ends == tuple(rounded(e, q) for e, q in zip((low, high), quote.ends, strict=True))


def sizes(found: Interval) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    # an interval with 0 inside needs its signs
    assert found.excludes_zero
    low, high = sorted((abs(found.low), abs(found.high)))
    return low, high


def names_the_line(quote: Quote, outcome: Outcome) -> bool:
    """Whether the line named last is one of the comparison, and its first line is named at all."""
    said = quote.before.lower()
    a, b = (WORDS.get(x, x).lower() for x in (outcome.comparison.a, outcome.comparison.b))
    every = {word.lower() for word in [*WORDS.values(), a, b, "plain"]}
    # of names that end at the same place the longest counts
    last = max(every, key=lambda word: (said.rfind(word) + len(word) * (word in said), len(word)))
    return a in said and last in (a, b)


def says_the_side(quote: Quote, outcome: Outcome) -> bool:
    """A number without a sign stands with a word that says on which side it is."""
    assert outcome.contrast is not None
    if quote.mean[0] in "+−":
        return True
    lower = outcome.contrast.test.mean < 0
    words = r"lower|below|less|fewer" if lower else r"higher|above|more"
    return re.search(rf"\b({words})\b", quote.sentence) is not None


def agrees(quote: Quote, outcome: Outcome) -> bool:
    found = outcome.contrast
    return (
        found is not None
        and (quote.ends is None or quote.mean[0] in "+−" or found.test.interval.excludes_zero)
        and has_these_numbers(quote, found.test.interval)
        and quote.p in (None, p_value(outcome.p_holm))
        and quote.verdict in (None, outcome.verdict)
        and names_the_line(quote, outcome)
        and says_the_side(quote, outcome)
    )


def all_quotes() -> Iterator[Quote]:
    for passage in PROSE:
        yield from quotes_in(passage)


@pytest.mark.parametrize("quote", [*all_quotes()], ids=str)
def test_a_quoted_comparison_is_one_of_a_family(quote: Quote) -> None:
    """Line, difference, interval, Holm's p and verdict."""
    shown = [
        f"{outcome.comparison.name} {outcome.contrast.test.interval} "
        f"Holm's p {p_value(outcome.p_holm)}, {outcome.verdict}"
        for outcome in all_outcomes()
        if outcome.contrast is not None
    ]
    assert any(agrees(quote, outcome) for outcome in all_outcomes()), "\n".join(
        [str(quote), *shown]
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_complete_family_is_quoted(page: str) -> None:
    """In prose; README.md has some in a table, which test_results_pages.py compares."""
    quotes = [quote for quote in all_quotes() if quote.passage.page == page and quote.ends]
    in_table = {"wikitext2-featscale", "pretrain-epoch-best", "pretrain", "stsb"}
    for family, outcomes in FIGURES.complete:
        if page == "README.md" and family.name in in_table:
            continue
        assert any(agrees(q, o) for q in quotes for o in outcomes), f"{page}: {family.name}"


@pytest.mark.parametrize("page", PAGES)
def test_how_many_families_are_complete_and_what_they_confirm(page: str) -> None:
    text = " ".join(passage.text for passage in PROSE if passage.page == page)
    (count,) = re.findall(r"(\w+) famil(?:y|ies)\b[^.]*? (?:is|are) complete", text)
    assert COUNTS.index(count.lower()) == len(FIGURES.complete)
    confirmed = [
        outcome.comparison.name for outcome in all_outcomes() if outcome.verdict == "better"
    ]
    says_none = re.search(r"\bno gain (?:so far|is confirmed)", text, re.IGNORECASE) is not None
    assert says_none == (not confirmed), confirmed


PLACE = rf"({NUMBER}|{'|'.join(map(re.escape, VERDICTS))}|{'|'.join(COUNTS)})"


def spans_of(claim: Claim, passage: Passage) -> list[tuple[tuple[str, ...], tuple[int, int]]]:
    """Where a passage has the words of a claim, with whatever numbers."""
    words = re.escape(claim.words).replace(r"\{\}", PLACE)
    found = re.finditer(rf"(?<![\w.]){words}", passage.text, re.IGNORECASE)
    return [(match.groups(), match.span()) for match in found]


@cache
def wanted(claim: Claim) -> tuple[str, ...]:
    return tuple(claim.values(FIGURES))


def wrong_claims(claim: Claim, passage: Passage) -> list[str]:
    found = spans_of(claim, passage)
    return [
        f"{passage.page}: {passage.text[slice(*span)]}; the rows give {', '.join(wanted(claim))}"
        for said, span in found
        if tuple(word.lower() for word in said) != wanted(claim)
    ]


def unchecked_numbers(passage: Passage) -> list[str]:
    checked = [span for quote in quotes_in(passage) for span in (quote.at, quote.brackets)]
    checked += [span for claim in CLAIMS for _, span in spans_of(claim, passage)]
    return [
        passage.text[max(low - 40, 0) : high + 20]
        for low, high in results_in(passage)
        if not any(a <= low and high <= b for a, b in checked)
    ]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.words)
def test_a_claim_has_the_numbers_of_the_rows(claim: Claim) -> None:
    said = [passage for passage in PROSE if spans_of(claim, passage)]
    assert said, "no page says this any more: remove the claim"
    assert not [wrong for passage in said for wrong in wrong_claims(claim, passage)]


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_compared_with_the_rows(page: str) -> None:
    """A number that is in no quote and in no claim needs a claim, in support/quoted_figures.py."""
    own = [passage for passage in PROSE if passage.page == page]
    assert not [number for passage in own for number in unchecked_numbers(passage)]


def is_right(passage: Passage) -> bool:
    return (
        all(any(agrees(quote, one) for one in all_outcomes()) for quote in quotes_in(passage))
        and not any(wrong_claims(claim, passage) for claim in CLAIMS)
        and not unchecked_numbers(passage)
    )


def test_another_last_digit_anywhere_is_noticed() -> None:
    for passage in PROSE:
        assert is_right(passage)
        for _, end in results_in(passage):
            digit = str((int(passage.text[end - 1]) + 1) % 10)
            changed = passage.text[: end - 1] + digit + passage.text[end:]
            assert not is_right(Passage(passage.page, changed)), changed


def test_verdicts_hold_over_all_families_as_pretraining_says() -> None:
    """The details quote Holm's p over the comparisons of every complete family together."""
    judged = [(family.name, outcome) for family, found in FIGURES.complete for outcome in found]
    ps = []
    for _, outcome in judged:
        assert outcome.contrast is not None
        assert outcome.contrast.test.p is not None
        ps.append(outcome.contrast.test.p)
    # by family and comparison: another family may confirm a comparison of the same name
    shown = {
        (family, outcome.comparison.name): p
        for (family, outcome), p in zip(judged, holm(ps), strict=True)
        if outcome.verdict == "better"
    }
    page = " ".join((ROOT / "results/pretraining-details.md").read_text("utf-8").split())
    assert f"over all {len(ps)} comparisons of the {count_word(len(FIGURES.complete))}" in page
    own = {key: p for key, p in shown.items() if key[0] in quoted_figures.PRETRAINING}
    quoted = {
        ("pretrain-epoch", "degree1 − plain"): "degree 1 − plain",
        ("pretrain-epoch", "degree1 − gain"): "degree 1 − gain only",
        ("pretrain-epoch-best", "degree1 − plain"): "degree 1 − plain",
        ("pretrain-epoch-best", "both − gated"): "degree 1 on gated heads − gated heads",
    }
    assert own.keys() == quoted.keys()
    assert all(p < 0.05 for p in shown.values()), "not every verdict is left"
    for key, words in quoted.items():
        assert f"{p_value(own[key])} ({words})" in page


PRETRAINING = ("pretraining.md", "pretraining-details.md")


def test_counts_of_tuning_runs_are_those_of_the_rows() -> None:
    """Runs with a negative c0, and the rows of the file."""
    rows = FIGURES.tuning[FIGURES.tuning.recipe == "pretrain"]
    c0 = [coefficients_of(row)[0] for row in rows.itertuples() if learns_c0(row)]
    assert max(c0) < 0
    pages = {name: " ".join(FIGURES.text(name).split()) for name in PRETRAINING}
    families = quoted_figures.runs_with_negative_c0(FIGURES, *quoted_figures.PRETRAINING)
    assert (
        pages["pretraining-details.md"].count(
            f"({len(c0)} tuning runs, {families[0]} runs of families)"
        )
        == 2
    )
    with (ROOT / "results/tuning/pretrain.csv").open(newline="", encoding="utf-8") as file:
        count = sum(1 for _ in csv.DictReader(file))
    assert f"({count} runs), curves" in pages["pretraining-details.md"]


def test_what_pretraining_says_of_best_rates_is_what_the_family_has() -> None:
    """Registered and other differences on the first page, and the times of steps on both."""
    family = "pretrain-epoch-best"
    alone = quoted_figures.size(FIGURES.family_difference(family, "degree1").mean, 3)
    on_top = quoted_figures.size(FIGURES.family_difference(family, "both", "gated").mean, 3)
    both = FIGURES.family_difference(family, "both")
    low, high = (quoted_figures.size(end, 3) for end in sizes(both))
    page = " ".join(FIGURES.text("pretraining.md").split())
    assert (
        f"it ends {alone} below plain and, on top of gated heads, {on_top} below gated heads: "
        f"together {quoted_figures.size(both.mean, 3)} below plain ({low} … {high})"
    ) in page
    details = " ".join(FIGURES.text("pretraining-details.md").split())
    took = quoted_figures.step_ratios(FIGURES)
    degree1, gated, together = (f"{took[name]}×" for name in ("degree1", "gated", "both"))
    assert f"it took {degree1}, with gated heads {gated}, with both {together}" in page
    said = f"{degree1} plain's with degree 1, {gated} with gated heads and {together} with both"
    assert said in details
    assert f"degree 1 ends {alone} nats below plain" in details.replace("Degree", "degree")
    assert f"on top of gated heads, {on_top} below gated heads" in details


def test_leads_of_degree_1_are_compared_as_the_families_have_them() -> None:
    """Alone with that on gated heads, by seed; at 4e-3 with that at 2e-3, whose seeds differ."""

    def leads(family: str, a: str, b: str) -> pd.Series:
        lines = {own.name: own.line for own in lines_of(FIGURES.of_family(family))}
        test_a, test_b = (lines[name].rows.set_index("seed").test for name in (a, b))
        return test_a - test_b

    alone = leads("pretrain-epoch-best", "degree1", "plain")
    more = leads("pretrain-epoch-best", "both", "gated") - alone
    low, high = stats.ttest_1samp(more, 0).confidence_interval()
    mean, low, high = (quoted_figures.signed(x, 3) for x in (more.mean(), low, high))
    details = " ".join(FIGURES.text("pretraining-details.md").split())
    assert f"less its lead alone is {mean} ({low} … {high})" in details
    before = leads("pretrain-epoch", "degree1", "plain")
    p = stats.ttest_ind(alone, before, equal_var=False).pvalue
    assert f"Welch's test of the two leads has p = {p:.2f}" in details


def test_gated_heads_after_ten_tokens_are_those_of_the_family() -> None:
    gap = FIGURES.family_difference("pretrain", "gated", "degree1").mean
    recipe = (ROOT / "docs/recipes/pretrain.md").read_text("utf-8")
    assert f"gated heads end {abs(gap):.3f} lower there" in recipe
    assert f"gated heads end {abs(gap):.3f} lower than degree 1" in FIGURES.text("pretraining.md")


def test_what_is_said_of_larger_sizes_is_what_was_run() -> None:
    """Another pair needs another sentence: on the first page, in the recipe, in README.md."""
    found = {key: f"{abs(gap):.3f}" for key, gap in quoted_figures.larger_pairs(FIGURES).items()}
    assert all(gap < 0 for gap in quoted_figures.larger_pairs(FIGURES).values())
    assert found.keys() == {
        ("46M", "degree1", "1.1"),
        ("46M", "gfsa", "1.1"),
        ("46M", "degree1", "3.4"),
        ("110M", "degree1", "0.9"),
        ("110M", "gfsa", "0.9"),
    }, "say what the others show"
    page = " ".join(FIGURES.text("pretraining-details.md").split())
    second = {
        f"{float(found[size, 'gfsa', ratio]) - float(found[size, 'degree1', ratio]):.3f}"
        for size, ratio in (("46M", "1.1"), ("110M", "0.9"))
    }
    assert f"At 46M and at 110M it ends {second.pop()} below degree 1" in page
    assert not second
    recipe = " ".join((ROOT / "docs/recipes/pretrain.md").read_text("utf-8").split())
    assert (
        f"at 46M degree 1 ends {found['46M', 'degree1', '3.4']} below plain after 3.4 tokens per "
        f"parameter, at 110M {found['110M', 'degree1', '0.9']} and GFSA "
        f"{found['110M', 'gfsa', '0.9']} after 0.9"
    ) in recipe


def test_quotes_are_found_in_prose() -> None:
    text = (
        "degree 1 ends 0.010 nats lower (0.003 … 0.018;\nHolm's p = 0.068: suggestive), GFSA +0.1 "
        "Spearman\n(−0.47 … +0.37) and 0.02 (better); 0.5 (dev) `0.3 (better)`, 0.024 below "
        "after 3.4 tokens (0.02 … 0.03, Holm's p < 0.001)"
    )
    (passage,) = passages_of("page", text)
    found = [(q.mean, q.ends, q.p, q.verdict) for q in quotes_in(passage)]
    assert found == [
        ("0.010", ("0.003", "0.018"), "0.068", "suggestive"),
        ("+0.1", ("−0.47", "+0.37"), None, None),
        ("0.02", None, None, "better"),
        ("0.024", ("0.02", "0.03"), "<0.001", None),
    ]
