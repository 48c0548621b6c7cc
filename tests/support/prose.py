"""Prose of the pages that quotes results: its passages, and the numbers in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gfsa_experiments.results.page_blocks import BEGIN, END

ROOT = Path(__file__).parents[2]
NUMBER = r"[+−]?\d+(?:\.\d+)?"
VERDICTS = ("better", "worse", "suggestive (against)", "suggestive", "not shown")
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
"""The words of numbers; their place is what they mean."""
# others are names and sizes, such as GPT-2, 15M and 3.4 tokens per parameter
_RESULT = re.compile(
    r"(?<![\w.])[+−]?"
    r"(?:\d+\.\d+(?!\w|\.\d| tokens)|\d+(?= (?:%|points|runs|of \d|seeds|nats|to \d)))"
)
_IN_BRACKETS = re.compile(r"\(([^()]*)\)")
_FAR = 120
"""Characters between a number and its interval at most."""
_ALONE = re.compile(rf"(?<![\w.+−]){NUMBER}(?!\w|\.\d)")
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_INTERVAL = re.compile(rf"(?P<low>{NUMBER}) … (?P<high>{NUMBER})")


def count_word(number: int) -> str:
    return COUNTS[number] if number < len(COUNTS) else str(number)


@dataclass(frozen=True)
class Passage:
    """A paragraph, a list item or a row of a table in one line."""

    page: str
    text: str


@dataclass(frozen=True)
class Quote:
    """A number with its interval, Holm's p or verdict in brackets: what families give."""

    passage: Passage
    at: tuple[int, int]
    """Of the number."""
    brackets: tuple[int, int]
    ends: tuple[str, str] | None
    p: str | None
    verdict: str | None

    @property
    def mean(self) -> str:
        return self.passage.text[slice(*self.at)]

    @property
    def before(self) -> str:
        """The sentence up to the number."""
        return _SENTENCE.split(self.passage.text[: self.at[0]])[-1]

    @property
    def sentence(self) -> str:
        return self.before + _SENTENCE.split(self.passage.text[self.at[0] :])[0]

    def __str__(self) -> str:
        return f"{self.passage.page}: {self.passage.text[self.at[0] : self.brackets[1]]}"


def passages_of(page: str, text: str) -> list[Passage]:
    """Lines that belong together, without code, addresses of links, and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"(?<=\S)  +", " ", text)
    found, open_ = [], False
    for line in text.splitlines():
        alone = line.startswith(("|", "- ", "#", "!", "<!--"))
        if line.strip() and open_ and not alone:
            found[-1] += f" {line.strip()}"
        elif line.strip() and not line.startswith(("#", "!", "<!--")):
            found.append(line.strip())
        open_ = bool(line.strip()) and not line.startswith(("|", "#", "!"))
    return [Passage(page, passage) for passage in found]


def prose_with_results() -> list[Passage]:
    """What is written by hand of results in README.md and on the first page of results."""
    readme = (ROOT / "README.md").read_text("utf-8")
    gain = re.search(r"^- \*\*Gain\.\*\*.*?\n(?=\n|- )", readme, flags=re.M | re.S)
    assert gain, "README.md begins without a sentence on results"
    found = passages_of("README.md", gain[0])
    for title in ("What to do first", "Does it help?"):
        section = readme.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        assert section, f"README.md has no section {title!r}"
        # the table of comparisons is compared cell by cell elsewhere
        section = re.sub(r"^\| setting \|.*?\n\n", "", section, flags=re.M | re.S)
        found += passages_of("README.md", _without_rates(section))
    page = (ROOT / "results" / "README.md").read_text("utf-8")
    by_hand = page.partition(BEGIN)[0] + "\n" + page.partition(END)[2]
    return found + passages_of("results/README.md", by_hand)


def _without_rates(section: str) -> str:
    """A table without the column of learning rates, which are advice and no result."""
    lines = []
    for line in section.splitlines():
        cells = line.strip("|").split("|")
        lines.append("|".join(["", *cells[:2], *cells[3:], ""]) if line.startswith("|") else line)
    return "\n".join(lines)


def quotes_in(passage: Passage) -> list[Quote]:
    found = []
    for brackets in _IN_BRACKETS.finditer(passage.text):
        inside = brackets[1]
        interval = _INTERVAL.search(inside)
        verdict = next((word for word in VERDICTS if word in inside), None)
        if interval is None and verdict is None and "Holm" not in inside:
            continue
        ends = (interval["low"], interval["high"]) if interval else None
        at = _number_before(passage.text, brackets.start(), ends)
        if at is None:
            continue
        rest = inside[interval.end() :] if interval else inside
        p = re.search(r"<?(?:0|1)\.\d+", rest.replace("< ", "<"))
        found.append(Quote(passage, at, brackets.span(), ends, p and p[0], verdict))
    return found


def _number_before(text: str, end: int, ends: tuple[str, str] | None) -> tuple[int, int] | None:
    """The number that brackets belong to: the last one, with an interval the last one inside."""
    numbers = [m for m in _ALONE.finditer(text, max(end - _FAR, 0), end) if m.end() <= end]
    if ends is not None:
        low, high = map(_value, ends)
        inside = [match for match in numbers if low <= _value(match[0]) <= high]
        numbers = inside or numbers
    return numbers[-1].span() if numbers else None


def _value(number: str) -> float:
    return float(number.replace("−", "-"))


def results_in(passage: Passage) -> list[tuple[int, int]]:
    """Where the numbers stand that could be results."""
    return [match.span() for match in _RESULT.finditer(passage.text)]
