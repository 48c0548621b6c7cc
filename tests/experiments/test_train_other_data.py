"""``gfsa train`` and ``gfsa results`` on more than one set of data: nothing is mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from gfsa.cli import build
from gfsa_experiments.runs import missing
from gfsa_experiments.runs.row import read_rows
from gfsa_experiments.runs.run import Run, data_of
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
    assert "folder=A deit_tiny-d1" in page
    assert "folder=B deit_tiny-d1" in page


def test_missing_does_not_have_the_runs_of_another_folder(tmp_path: Path) -> None:
    first, second = image_folder(tmp_path / "A", 2), image_folder(tmp_path / "B", 3)
    words = ["image", *TINY, "--missing", "--data-dir"]
    for folder in (first, second):
        code, output = train(tmp_path, *words, str(folder))
        assert code == 0
        assert "1 of 1 runs done" in output
    assert "has all of these runs" in train(tmp_path, *words, str(second))[1]


def test_rows_on_other_data_are_told_of_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    first, second = write_toy(tmp_path / "a", 0), write_toy(tmp_path / "b", 5)
    words = [TOY, "--set", "max_steps=1", "--data-dir"]
    assert train(tmp_path, *words, str(first), "--method", "plain", "--seeds", "0,1")[0] == 0
    told = [warning for warning in recwarn if "on other data" in str(warning.message)]
    assert not told
    # by its name it is the same data, but no row is on it
    (tmp_path / "runs").rename(tmp_path / "runs on a")
    more = ["--method", "plain,gfsa", "--seeds", "0-2", "--missing", "--jobs", "1"]
    code, output = train(tmp_path, *words, str(second), *more)
    assert code == 0
    assert "6 of 6 runs done" in output
    told = [str(w.message) for w in recwarn if "on other data" in str(w.message)]
    known = read_rows(tmp_path / "results" / "toy.csv")
    assert len(told) == 1
    assert f"(plain on {known[0].data}, seed 0, 1): they are not compared" in told[0]
    assert f"runs on data {known[-1].data}" in told[0]
    assert ": toy (data " in results(tmp_path)


def test_missing_reads_the_data_once_and_only_if_there_is_a_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Run] = []

    def watched(run: Run) -> str:
        read.append(run)
        return data_of(run)

    monkeypatch.setattr(missing, "data_of", watched)
    folder = write_toy(tmp_path / "a", 0)
    words = [TOY, "--set", "max_steps=1", "--data-dir", str(folder), "--seeds", "0,1", "--missing"]
    assert "2 of 2 runs done" in train(tmp_path, *words)[1]
    # the folders of the runs record their data
    assert "has all of these runs" in train(tmp_path, *words)[1]
    assert not read
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert "has all of these runs" in train(tmp_path, *words)[1]
    assert len(read) == 1


def test_missing_says_if_it_cannot_compare(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "a", 0)
    words = [TOY, "--set", "max_steps=1", "--missing", "--data-dir", str(folder)]
    assert train(tmp_path, *words)[0] == 0
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    (folder / "first_seed.txt").write_text("no number")
    with pytest.warns(UserWarning, match=r"toy plain seed 0, which have a row; .*no number"):
        code, output = train(tmp_path, *words)
    assert code == 0
    assert "has all of these runs" in output


LRA = [
    *("lra", "--set", "dim=8", "--set", "depth=1", "--set", "num_heads=2", "--set", "ffn_dim=8"),
    *("--set", "length=32", "--set", "max_steps=1", "--set", "batch_size=8"),
    *("--set", "workers=0", "--set", "tensorboard=false"),
]


def lines(name: str) -> str:
    return "text,label\n" + "".join(f"{name} {n},{n % 2}\n" for n in range(40))


def test_one_label_to_train_on_makes_other_data(tmp_path: Path) -> None:
    """Though sizes, and whatever is validated and tested on, are the same."""
    folder = tmp_path / "my"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"{part}.csv").write_text(lines(part))
    words = [*LRA, "--set", f"data={folder}", "--missing"]
    assert "1 of 1 runs done" in train(tmp_path, *words)[1]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    # not one of the examples that are hashed one by one
    corrected = lines("train").replace("train 10,0", "train 10,1")
    assert corrected != lines("train")
    (folder / "train.csv").write_text(corrected)
    _clear_readers()
    assert "1 of 1 runs done" in train(tmp_path, *words)[1]
    (folder / "train.csv").write_text(corrected.replace("train 12,0", "train 12,1"))
    _clear_readers()
    # the folder of the last run is there, but its data was written since
    assert "holds a run already" in " ".join(train(tmp_path, *words)[1].split())
    output = train(tmp_path, *words[:-1], "--resume")[1]
    assert "holds a finished run on other data" in " ".join(output.split())
    rows = read_rows(tmp_path / "results" / "lra.csv")
    assert {row.data.split()[0] for row in rows} == {"40+40+40"}
    assert len({row.data for row in rows}) == 2


def _clear_readers() -> None:
    """As in another process."""
    from gfsa_experiments.data.labelled import read_labelled
    from gfsa_experiments.tasks.lra.own import read_texts

    read_labelled.cache_clear()
    read_texts.cache_clear()


def test_a_table_in_the_working_folder_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder records neither the working folder nor, then, the whole path."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.csv").write_text(lines(folder))
    words = [*LRA, "--set", "data=my.csv", "--data-dir", str(tmp_path)]
    monkeypatch.chdir(tmp_path / "one")
    assert train(tmp_path, *words)[0] == 0
    assert "finished before" in train(tmp_path, *words, "--resume")[1]
    monkeypatch.chdir(tmp_path / "two")
    _clear_readers()
    code, output = train(tmp_path, *words, "--resume")
    assert code == 1
    assert "holds a finished run on other data" in " ".join(output.split())


def test_a_method_is_not_compared_with_plain_on_another_folder(tmp_path: Path) -> None:
    for name, method, classes in (("A", "plain", 2), ("B", "gfsa", 3)):
        folder = image_folder(tmp_path / name, classes)
        words = ["image", *TINY, "--data-dir", str(folder), "--method", method]
        assert train(tmp_path, *words)[0] == 0
    assert "no run of plain with these settings" in results(tmp_path)
