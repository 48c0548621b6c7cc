"""A sample of the census agrees with docs/supported.md; ``make census`` runs all of it."""

from __future__ import annotations

from census import page
from census.catalogue import entries
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
