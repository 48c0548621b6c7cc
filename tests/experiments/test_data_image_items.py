"""Folders of images: classes by name, and errors that name the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gfsa_experiments.tasks.image.items import FolderImages, list_images
from support.tiny_images import write_folder


def test_classes_are_numbered_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    files = list_images(tmp_path, holdout=0.0)
    assert files.classes == ["n000", "n001", "n002"]
    assert set(files.parts) == {"train", "test"}
    assert [label for _, label in files.parts["train"]] == [0, 0, 1, 1, 2, 2]
    image, label = FolderImages(files.parts["test"])[2]
    assert image.mode == "RGB"
    assert image.size == (40, 44)
    assert label == 2


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the folders train and val in"):
        list_images(tmp_path)
    write_folder(tmp_path, {"train": 2, "val": 1})
    (tmp_path / "val" / "n777").mkdir()
    with pytest.raises(ValueError, match="classes that train lacks: n777"):
        list_images(tmp_path)
    (tmp_path / "val" / "n777").rmdir()
    (tmp_path / "train" / "n777").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"no images .* of the classes n777.*has nothing in it"
    ):
        list_images(tmp_path)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    path = tmp_path / "val" / "n001" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    images = FolderImages(list_images(tmp_path).parts["test"])
    with pytest.raises(ValueError, match=r"n001/1\.JPEG is no readable image"):
        images[1]


def test_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    for name in ("a.gif", "b.GIF", "notes.txt", ".hidden"):
        (tmp_path / "train" / "n001" / name).touch()
    with pytest.warns(UserWarning, match=r"train: 3 files .* left out \(2 \.gif, 1 \.txt\)"):
        list_images(tmp_path)
