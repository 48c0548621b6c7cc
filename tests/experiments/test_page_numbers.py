"""Differences and intervals that pages of recipes and the FAQ quote are those of the rows."""

from __future__ import annotations

import re

import pytest

from gfsa_experiments.results.page_blocks import BEGIN, END
from support.page_claims import FAQ, NOT_FROM_ROWS, PAGE_CLAIMS, PageClaim
from support.prose import NUMBER, ROOT, Passage, passages_of
from support.quoted_figures import FIGURES

PAGES = sorted({claim.page for claim in PAGE_CLAIMS})
# signed numbers, the ends of "a to b" with a sign, and means before and after
COMPARED = re.compile(r"(?<![\w.])[+−]\d+(?:\.\d+)?(?!\w|\.\d)|\d+\.\d+(?= →)|(?<=→ )\d+\.\d+")


def prose_of(page: str) -> list[Passage]:
    """What is written by hand."""
    text = (ROOT / page).read_text("utf-8")
    if page == FAQ:
        return passages_of(page, text)
    return passages_of(page, text.partition(BEGIN)[0] + "\n" + text.partition(END)[2])


def places(claim: PageClaim, text: str) -> list[re.Match[str]]:
    words = re.escape(claim.words).replace(r"\{\}", f"({NUMBER})")
    return [*re.finditer(words, text)]


def as_quoted(value: float | None, quoted: str) -> str:
    """A number with the decimals of a quoted one, and a sign if that has one."""
    assert value is not None
    sign = "+" if quoted[0] in "+−" else ""
    return f"{value:{sign}.{len(quoted.partition('.')[2])}f}".replace("-", "−")


def is_right(claim: PageClaim, said: tuple[str, ...]) -> bool:
    numbers = [*claim.numbers(FIGURES)]
    return said == tuple(as_quoted(v, q) for v, q in zip(numbers, said, strict=True))


@pytest.mark.parametrize("claim", PAGE_CLAIMS, ids=lambda claim: f"{claim.page}: {claim.words}")
def test_a_page_has_the_numbers_of_the_rows(claim: PageClaim) -> None:
    found = [match for passage in prose_of(claim.page) for match in places(claim, passage.text)]
    assert len(found) == 1, "the page says this no more, or twice: change the claim"
    said = found[0].groups()
    assert is_right(claim, said), f"{said}; the rows give {[*claim.numbers(FIGURES)]}"


def unclaimed(passage: Passage) -> list[str]:
    known = [
        match.span()
        for claim in PAGE_CLAIMS
        if claim.page == passage.page
        for match in places(claim, passage.text)
    ]
    known += [m.span() for words in NOT_FROM_ROWS for m in re.finditer(words, passage.text)]
    return [
        passage.text[max(match.start() - 40, 0) : match.end() + 20]
        for match in COMPARED.finditer(passage.text)
        if not any(low <= match.start() and match.end() <= high for low, high in known)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page != FAQ])
def test_every_difference_of_a_page_has_a_claim(page: str) -> None:
    """A number that is in none needs one, in support/page_claims.py."""
    assert not [number for passage in prose_of(page) for number in unclaimed(passage)]


def test_another_digit_or_sign_is_noticed() -> None:
    (claim,) = [one for one in PAGE_CLAIMS if one.words.startswith("K = 5 and K = 8")]
    (match,) = [m for p in prose_of(claim.page) for m in places(claim, p.text)]
    said = match.groups()
    assert is_right(claim, said)
    for at, number in enumerate(said):
        for other in (number[:-1] + str((int(number[-1]) + 1) % 10), number.lstrip("+−")):
            assert not is_right(claim, (*said[:at], other, *said[at + 1 :]))
