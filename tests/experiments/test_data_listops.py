"""ListOps: the official rules, answers by another way of computing them, and damaged files."""

from __future__ import annotations

import json
import random
import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gfsa_experiments.tasks import listops
from gfsa_experiments.tasks.listops import Sequences, make_listops, read_listops

SMALL = {"train": 200, "val": 6, "test": 6}

few = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(autouse=True)
def _read_anew() -> None:
    read_listops.cache_clear()


@pytest.fixture(scope="module")
def made() -> dict[str, Sequences]:
    return make_listops(seed=1, counts=SMALL)


def nested(words: str) -> Any:
    """``["MAX", 4, ["MIN", 2, 3]]`` of ``[MAX 4 [MIN 2 3 ] ]``, by json."""
    text = words.replace("[", '["').replace(" ]", "]")
    for name in ("MIN", "MAX", "MED", "SM"):
        text = text.replace(f'["{name} ', f'["{name}", ')
    for closing in ("]", *map(str, range(10))):
        text = text.replace(f"{closing} ", f"{closing}, ")
    return json.loads(text)


def value_of(tree: Any) -> int:
    """What a nested list is worth, by recursion."""
    if isinstance(tree, int):
        return tree
    arguments = [value_of(argument) for argument in tree[1:]]
    if tree[0] == "SM":
        return sum(arguments) % 10
    by_name = {"MIN": min, "MAX": max, "MED": statistics.median}
    return int(by_name[tree[0]](arguments))


def depth_of(tree: Any) -> int:
    return 1 if isinstance(tree, int) else 1 + max(map(depth_of, tree[1:]))


def operators_of(tree: Any) -> list[tuple[str, int]]:
    """Name and number of arguments of every operator."""
    if isinstance(tree, int):
        return []
    below = [found for argument in tree[1:] for found in operators_of(argument)]
    return [(tree[0], len(tree) - 1), *below]


def pairs(tree: Any) -> str:
    """The official text: a list is built pair by pair, ``(((op, a), b), ])``."""
    if isinstance(tree, int):
        return str(tree)
    text = f"[{tree[0]}"
    for argument in (*map(pairs, tree[1:]), "]"):
        text = f"( {text} {argument} )"
    return text


def words_of(tokens: np.ndarray) -> str:
    return " ".join(listops.TOKENS[token] for token in tokens)


def test_answers_texts_and_rules(made: dict[str, Sequences]) -> None:
    operators: list[tuple[str, int]] = []
    for part, count in SMALL.items():
        sequences = made[part]
        assert len(sequences) == count
        for index, label in enumerate(sequences.labels):
            tokens = sequences[index]
            assert 500 < len(tokens) < 2000
            tree = nested(words_of(tokens))
            assert value_of(tree) == label
            assert depth_of(tree) <= 10
            operators += operators_of(tree)
    counts = [count for _, count in operators]
    assert set(counts) == set(range(2, 11))
    assert {name for name, _ in operators} == {"MIN", "MAX", "MED", "SM"}


def test_arguments_are_drawn_as_the_rules_say() -> None:
    generator, arguments, digits = random.Random(0), 0, 0
    for _ in range(3000):
        tokens: list[int] = []
        listops._grow(generator, 9, tokens)
        arguments += 1
        digits += len(tokens) == 1
        # at depth 10 there are digits alone
        assert sum(token >= 11 for token in tokens) <= 2
    assert abs(digits / arguments - 0.75) < 4 * (0.25 * 0.75 / arguments) ** 0.5


def test_a_seed_is_a_data_set(made: dict[str, Sequences]) -> None:
    again, other = make_listops(1, SMALL), make_listops(2, SMALL)
    for part in SMALL:
        assert np.array_equal(again[part].tokens, made[part].tokens)
        assert np.array_equal(again[part].labels, made[part].labels)
        assert not np.array_equal(other[part][0], made[part][0])


def test_no_list_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = bytes([12, 1, 2, 15]), bytes([12, 2, 1, 15])
    monkeypatch.setattr(listops, "_draw", lambda _: iter([(one, 1), (one, 1), (two, 1), (one, 1)]))
    parts = make_listops(0, {"train": 1, "val": 1})
    assert parts["train"].tokens.tobytes() == one
    assert parts["val"].tokens.tobytes() == two


@few
@pytest.mark.parametrize("inside", ["", "listops", "lra_release/listops-1000"])
def test_official_files(tmp_path: Path, made: dict[str, Sequences], inside: str) -> None:
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    for part, sequences in made.items():
        lines = [
            f"{pairs(nested(words_of(sequences[index])))}\t{label}\r\n"
            for index, label in enumerate(sequences.labels)
        ]
        text = "Source\tTarget\r\n" + "".join(lines)
        (tmp_path / inside / f"basic_{part}.tsv").write_bytes(text.encode())
    parts = read_listops(tmp_path)
    for part in SMALL:
        assert np.array_equal(parts[part].tokens, made[part].tokens)
        assert np.array_equal(parts[part].offsets, made[part].offsets)
        assert np.array_equal(parts[part].labels, made[part].labels)
    (tmp_path / inside / "basic_test.tsv").unlink()
    read_listops.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"basic_test\.tsv"):
        read_listops(tmp_path)


@few
def test_missing_data_is_made_once_by_one_of_many(
    tmp_path: Path, made: dict[str, Sequences], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls = []

    def make() -> dict[str, Sequences]:
        calls.append(1)
        return made

    monkeypatch.setattr(listops, "make_listops", make)
    path = tmp_path / "listops" / "listops_seed0.npz"
    threads = [threading.Thread(target=listops._generate, args=(path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert "generating ListOps" in capsys.readouterr().err
    assert {one.name for one in path.parent.iterdir()} == {path.name, "listops_seed0.lock"}
    parts = read_listops(tmp_path)
    assert len(calls) == 1
    assert np.array_equal(parts["test"].tokens, made["test"].tokens)

    read_listops.cache_clear()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"is damaged .* delete it to generate it again"):
        read_listops(tmp_path)
