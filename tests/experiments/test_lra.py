"""The LRA recipe: ListOps by its rules, what the encoder is fed, and whole runs."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gfsa_experiments.runs.run import carry_out
from gfsa_experiments.tasks import lra as listops
from gfsa_experiments.tasks.lra import (
    LraConfig,
    LraTask,
    Sequences,
    make_listops,
    read_listops,
    store,
)
from support.tiny_images import write_cifar10
from support.tiny_runs import tiny_run

SMALL = {"train": 200, "val": 6, "test": 6}

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


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


def inside(tree: Any, depth: int = 1) -> list[tuple[str, int, int]]:
    """Name, number of arguments and depth of every operator; of digits the depth."""
    if isinstance(tree, int):
        return [("", 0, depth)]
    below = [found for argument in tree[1:] for found in inside(argument, depth + 1)]
    return [(tree[0], len(tree) - 1, depth), *below]


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


def same(one: Sequences, other: Sequences) -> bool:
    both = zip(one.rows, other.rows, strict=True)
    return np.array_equal(one.labels, other.labels) and all(np.array_equal(*two) for two in both)


def test_answers_texts_and_rules(made: dict[str, Sequences]) -> None:
    found: list[tuple[str, int, int]] = []
    for part, count in SMALL.items():
        sequences = made[part]
        assert len(sequences.rows) == count
        for tokens, label in zip(sequences.rows, sequences.labels, strict=True):
            assert 500 < len(tokens) < 2000
            tree = nested(words_of(tokens))
            assert value_of(tree) == label
            found += inside(tree)
    names, counts, depths = map(set, zip(*found, strict=True))
    assert (names, counts) == ({"", "MIN", "MAX", "MED", "SM"}, {0, *range(2, 11)})
    assert max(depths) <= 10


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
        assert same(again[part], made[part])
        assert not np.array_equal(other[part].rows[0], made[part].rows[0])


def test_no_list_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = bytes([12, 1, 2, 15]), bytes([12, 2, 1, 15])
    monkeypatch.setattr(listops, "_draw", lambda _: iter([(one, 1), (one, 1), (two, 1), (one, 1)]))
    parts = make_listops(0, {"train": 1, "val": 1})
    assert [row.tobytes() for part in parts.values() for row in part.rows] == [one, two]


@pytest.mark.parametrize("inside", ["", "listops", "lra_release/listops-1000"])
def test_official_files(tmp_path: Path, made: dict[str, Sequences], inside: str) -> None:
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    for part, sequences in made.items():
        lines = [
            f"{pairs(nested(words_of(row)))}\t{label}\r\n"
            for row, label in zip(sequences.rows, sequences.labels, strict=True)
        ]
        text = "Source\tTarget\r\n" + "".join(lines)
        (tmp_path / inside / f"basic_{part}.tsv").write_bytes(text.encode())
    parts = read_listops(tmp_path)
    assert all(same(parts[part], made[part]) for part in SMALL)
    (tmp_path / inside / "basic_test.tsv").unlink()
    read_listops.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"basic_test\.tsv"):
        read_listops(tmp_path)


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
    assert same(parts["test"], made["test"])

    read_listops.cache_clear()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"is damaged .* delete it to generate it again"):
        read_listops(tmp_path)


TINY = LraConfig(
    dim=16,
    depth=1,
    num_heads=2,
    ffn_dim=16,
    max_steps=2,
    batch_size=4,
    pad_to_multiple=128,
    tensorboard=False,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lists = make_listops(counts={"train": 12, "val": 4, "test": 4})
    store(folder / "listops" / "listops_seed0.npz", lists)
    write_cifar10(folder / "cifar10", per_file=4, test=4)
    return folder


def task_of(data: Path, **settings: Any) -> LraTask:
    config = dataclasses.replace(TINY, **settings)
    config.check()
    torch.manual_seed(0)
    return LraTask(config, data)


def a_batch(task: LraTask, count: int = 4) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = task.splits["train"].dataset.__getitems__(  # type: ignore[attr-defined]
        list(range(count))
    )
    return batch


@pytest.mark.parametrize(
    ("task", "attention", "method"),
    [("listops", "softmax", "plain"), ("image", "efficient", "gfsa")],
)
def test_a_run_from_files_to_row(
    data: Path, tmp_path: Path, task: str, attention: str, method: str
) -> None:
    row = carry_out(tiny_run("lra", TINY, data, tmp_path, method, task=task, attention=attention))
    assert row.task == f"{task} {attention}"
    assert row.metric == "accuracy"
    assert row.steps == 2
    assert row.seconds_per_step > 0
    assert row.added == (6 if method == "gfsa" else 0)
    assert row.moved is None or row.moved > 0


def test_padding_is_a_mask_over_keys(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape that attention kernels take without building n×n entries."""
    task = task_of(data)
    masks = []
    task.model.blocks[0].register_forward_pre_hook(lambda _, inputs: masks.append(inputs[1]))
    batch = a_batch(task)
    task.predict(task.model, batch)
    assert masks[0].dtype == torch.bool
    assert masks[0].shape == (4, 1, 1, batch["tokens"].shape[1] + 1)
    pixels = task_of(data, task="image")
    pixels.model.blocks[0].register_forward_pre_hook(lambda _, inputs: masks.append(inputs[1]))
    pixels.predict(pixels.model, a_batch(pixels))
    assert masks[1] is None


def test_padding_changes_no_answer(data: Path) -> None:
    for attention in ("softmax", "efficient"):
        little = task_of(data, attention=attention)
        full = task_of(data, attention=attention, pad_to_multiple=0)
        for task in (little, full):
            task.model.eval()
        short, long = a_batch(little), a_batch(full)
        assert long["tokens"].shape == (4, 1999)
        assert short["tokens"].shape[1] < 1999
        assert (short["tokens"].shape[1] + 1) % 128 == 0
        assert torch.allclose(
            little.logits(little.model, short), full.logits(full.model, long), atol=1e-5
        )


def test_batches_are_the_lists_and_nothing_is_cut(data: Path) -> None:
    sequences = read_listops(data)["train"]
    batch = a_batch(task_of(data), 12)
    for index in range(12):
        kept = batch["tokens"][index][batch["tokens"][index] != 0]
        assert np.array_equal(kept.numpy(), sequences.rows[index])
    assert batch["labels"].tolist() == sequences.labels.tolist()
    # lengths are there for batches of lists of like length
    assert task_of(data).splits["train"].lengths == [*map(len, sequences.rows)]


def test_the_lens_sees_a_sequence_without_padding(data: Path) -> None:
    task = task_of(data)
    example = task.example()
    assert example.shape == (1, len(read_listops(data)["val"].rows[0]))
    task.model(example)
