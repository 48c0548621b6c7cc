"""docs/engines.md says what the tests of engines found."""

from engines import run


def test_page_is_made_from_the_findings() -> None:
    assert run.PAGE.read_text(encoding="utf-8") == run.rebuilt(), "run make engines"
