"""Text that names no parts: which documents are held out, and which one is cut."""

from __future__ import annotations

import pytest

from gfsa_experiments.data.held_out import split_documents


def lengths(parts: dict[str, list[str]]) -> dict[str, list[int]]:
    return {name: [len(document) for document in documents] for name, documents in parts.items()}


def lines(count: int) -> str:
    return "".join(f"line {number:04d}\n" for number in range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 20, 30, 39, 40, 72, 500])
def test_all_of_the_text_is_kept_in_its_order(count: int) -> None:
    documents = [lines(10 + 7 * (number % 5)) for number in range(count)]
    parts = split_documents(documents, "here")
    assert "".join("".join(part) for part in parts.values()) == "".join(documents)
    held_out = sum(len("".join(parts[name])) for name in ("valid", "test"))
    assert 0.1 <= held_out / len("".join(documents)) <= 0.125 + 1e-9 or count == 1
    # at most a document for each of two borders is cut
    found = [document for part in parts.values() for document in part]
    assert len(documents) <= len(found) <= len(documents) + 2
    assert sum(document not in documents for document in found) <= 4


def test_documents_that_end_near_a_border_are_whole() -> None:
    documents = ["a" * 100] * 100
    assert [len(part) for part in split_documents(documents, "here").values()] == [90, 5, 5]
    # 28.5 documents are 95 % of thirty: the border is moved to the end of the 28th
    documents = ["a" * 100] * 30
    assert [len(part) for part in split_documents(documents, "here").values()] == [27, 1, 2]


def test_one_long_document_at_the_end_is_cut_and_no_other() -> None:
    """It was refused: every other document was train, and nothing was left for valid."""
    documents = ["short\n"] * 71 + [lines(40_000)]
    parts = split_documents(documents, "here")
    assert parts["train"][:71] == documents[:71]
    assert [len(part) for part in parts.values()] == [72, 1, 1]
    size = sum(map(len, documents))
    for name in ("valid", "test"):
        assert len(parts[name][0]) == pytest.approx(0.05 * size, rel=0.01)
        assert parts[name][0].startswith("line ")


@pytest.mark.parametrize(
    ("text", "borders"),
    [
        # a line end within 2.5 % before each border
        ("x" * 890 + "\n" + "y" * 48 + "\n" + "z" * 60, [891, 49, 60]),
        # no line ends there: a word does
        ("x" * 890 + " " + "y" * 48 + " " + "z" * 60, [891, 49, 60]),
        # a line that ends far before the border would take half of the text to train on with it
        ("x" * 400 + "\n" + "y" * 599, [900, 50, 50]),
    ],
)
def test_a_cut_is_at_the_end_of_a_line_or_a_word_if_one_is_near(
    text: str, borders: list[int]
) -> None:
    parts = lengths(split_documents([text], "here"))
    assert [size for part in parts.values() for size in part] == borders


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(ValueError, match=r"here is too little .*: it has 5 characters in 1 doc.*;"):
        split_documents(["short"], "here")
    with pytest.raises(ValueError, match="it has 2 characters in 2 documents; give more"):
        split_documents(["a", "b"], "here")
