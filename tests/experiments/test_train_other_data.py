"""``gfsa train`` and ``gfsa results`` on more than one set of data: nothing is mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from gfsa.cli import build
from gfsa_experiments.runs.row import read_rows
from support.tiny_images import pictures
from support.toy_recipe import write_toy
from support.train_command import train

TOY = "support.toy_recipe"
TINY = [
    *("--set", "model=deit_tiny", "--set", "depth=1", "--set", "image_size=32"),
    *("--set", "patch_size=16", "--set", "max_steps=1", "--set", "batch_size=4"),
    *("--set", "ema=0", "--set", "workers=0", "--set", "tensorboard=false"),
]


def image_folder(path: Path, classes: int, seed: int = 0) -> Path:
    """A folder with eight images of each class to train on, and four to test on."""
    for part, count in (("train", 8), ("val", 4)):
        pixels, labels = pictures(count * classes, classes, seed)
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            (path / part / f"n{label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path / part / f"n{label}" / f"{number}.png")
    return path


def results(tmp_path: Path) -> str:
    done = CliRunner().invoke(build(), ["results", "--dir", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_folders_of_images_are_not_mixed_up(tmp_path: Path) -> None:
    first, second = image_folder(tmp_path / "A", 2), image_folder(tmp_path / "B", 3)
    words = ["image", *TINY, "--data-dir"]
    assert train(tmp_path, *words, str(first), "--method", "plain")[0] == 0
    code, output = train(tmp_path, *words, str(second), "--method", "plain", "--resume")
    assert code == 0
    assert "finished before" not in output
    code, output = train(tmp_path, *words, str(second), "--method", "plain,gfsa", "--missing")
    assert code == 0
    # plain on B is there by now, from the line above
    assert "1 of 1 runs done" in output
    rows = read_rows(tmp_path / "results" / "image.csv")
    assert [(row.task, row.method) for row in rows] == [
        ("folder=A deit_tiny-d1", "plain"),
        ("folder=B deit_tiny-d1", "plain"),
        ("folder=B deit_tiny-d1", "gfsa"),
    ]
    assert [row.data.split()[0] for row in rows] == ["14+2+8", "22+2+12", "22+2+12"]
    page = results(tmp_path)
    assert "### image: folder=A deit_tiny-d1\n" in page
    assert "### image: folder=B deit_tiny-d1\n" in page


def test_missing_does_not_have_the_runs_of_another_folder(tmp_path: Path) -> None:
    first, second = image_folder(tmp_path / "A", 2), image_folder(tmp_path / "B", 3)
    words = ["image", *TINY, "--missing", "--data-dir"]
    for folder in (first, second):
        code, output = train(tmp_path, *words, str(folder))
        assert code == 0
        assert "1 of 1 runs done" in output
    assert "has all of these runs" in train(tmp_path, *words, str(second))[1]


def test_a_method_is_not_compared_with_plain_on_another_folder(tmp_path: Path) -> None:
    for name, method, classes in (("A", "plain", 2), ("B", "gfsa", 3)):
        folder = image_folder(tmp_path / name, classes)
        words = ["image", *TINY, "--data-dir", str(folder), "--method", method]
        assert train(tmp_path, *words)[0] == 0
    assert "No run of plain with these settings" in results(tmp_path)


def test_folders_of_one_name_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    first = image_folder(tmp_path / "x" / "pets", 2)
    second = image_folder(tmp_path / "y" / "pets", 2, seed=1)
    words = ["image", *TINY, "--data-dir"]
    assert train(tmp_path, *words, str(first))[0] == 0
    code, output = train(tmp_path, *words, str(second), "--resume")
    assert code == 1
    told = " ".join(output.split())
    assert "holds a finished run on other data, from " in told
    assert "as many examples, 14+2+8, but different ones: " in told
    assert len(read_rows(tmp_path / "results" / "image.csv")) == 1


def test_rows_on_other_data_are_told_of_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    first, second = write_toy(tmp_path / "a", 0), write_toy(tmp_path / "b", 5)
    words = [TOY, "--set", "max_steps=1", "--data-dir"]
    assert train(tmp_path, *words, str(first), "--method", "plain", "--seeds", "0,1")[0] == 0
    told = [warning for warning in recwarn if "on other data" in str(warning.message)]
    assert not told
    # by its name it is the same data, and what is there is left out without reading any
    more = ["--method", "plain,gfsa", "--seeds", "0-2", "--missing", "--jobs", "1"]
    code, output = train(tmp_path, *words, str(second), *more)
    assert code == 0
    assert "4 of 4 runs done" in output
    told = [str(w.message) for w in recwarn if "on other data" in str(w.message)]
    known = read_rows(tmp_path / "results" / "toy.csv")
    assert len(told) == 1
    assert f"(plain on {known[0].data}, seed 0, 1): they are not compared" in told[0]
    assert f"runs on data {known[-1].data}" in told[0]
    assert ": toy (data " in results(tmp_path)


def test_a_row_that_got_lost_is_added_though_there_is_one_on_other_data(tmp_path: Path) -> None:
    words = [TOY, "--set", "max_steps=1", "--data-dir"]
    first, second = write_toy(tmp_path / "a", 0), write_toy(tmp_path / "b", 5)
    assert train(tmp_path, *words, str(first))[0] == 0
    table = tmp_path / "results" / "toy.csv"
    kept = table.read_bytes()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert train(tmp_path, *words, str(second))[0] == 0
    table.write_bytes(kept)
    for _ in range(2):
        assert train(tmp_path, *words, str(second), "--resume")[0] == 0
        assert len({row.data for row in read_rows(table)}) == 2
        assert len(read_rows(table)) == 2
