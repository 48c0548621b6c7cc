"""A sample of the census agrees with docs/supported.md; ``make census`` runs all of it."""

from __future__ import annotations

from census import page
from census.catalogue import entries
from census.known_failures import KNOWN
from census.run import run
from census.sample import SEED, sample, seed

SIZE = 20


def test_a_sample_agrees_with_the_page() -> None:
    written = page.written_rows()
    names = sample([entry.name for entry in entries()], SIZE)
    verdicts = run(names, processes=1)
    different = [line for v in verdicts for line in page.lines(v) if line not in written]
    assert not different, (
        "docs/supported.md does not have these rows (make census writes it anew; "
        f"{SEED}={seed()} chooses this sample again):\n" + "\n".join(different)
    )


def test_the_page_has_every_entry() -> None:
    written = page.written_names()
    assert written == {entry.name for entry in entries()}


def test_failures_on_the_page_are_known() -> None:
    """A model is right, refused, or not built; a failure is written in bold."""
    failing = {line.split("|")[1].strip() for line in page.written_rows() if "| **" in line}
    assert failing == KNOWN


def test_samples_differ_from_seed_to_seed(monkeypatch) -> None:
    names = [str(number) for number in range(500)]
    monkeypatch.setenv(SEED, "one")
    first = sample(names, SIZE)
    assert first == sample(reversed(names), SIZE)
    assert len(first) == SIZE
    monkeypatch.setenv(SEED, "another")
    assert first != sample(names, SIZE)
