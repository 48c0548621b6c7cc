"""Folders of images: classes by name, and errors that name the place."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gfsa_experiments.tasks.image import broken
from gfsa_experiments.tasks.image.broken import reason_against, refuse_broken
from gfsa_experiments.tasks.image.items import FolderImages, list_images, read_image
from gfsa_experiments.tasks.image.recipe import ImageConfig, build
from support.tiny_images import write_folder


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were looked at."""
    paths: list[str] = []
    monkeypatch.setattr(
        "gfsa_experiments.tasks.image.broken.reason_against",
        lambda path: paths.append(path) or reason_against(path),
    )
    return paths


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


def test_grey_images_of_16_bits_keep_their_shades(tmp_path: Path) -> None:
    shades = np.arange(0, 2**16, 2**12, dtype=np.uint16).reshape(4, 4)
    Image.fromarray(shades).save(tmp_path / "grey.png")
    image = read_image(str(tmp_path / "grey.png"))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.stack([shades // 256] * 3, -1))


@pytest.mark.parametrize(("holdout", "error"), [(0.01, "in valid"), (0.9, "to train on")])
def test_what_is_held_out_leaves_every_class(tmp_path: Path, holdout: float, error: str) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    with pytest.raises(ValueError, match=f"holdout={holdout} leaves no image .*{error}"):
        list_images(tmp_path, holdout)


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


def test_broken_images_are_named_before_training(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 5, "val": 2})
    config = ImageConfig(model="deit_tiny", depth=1, image_size=32, patch_size=16)
    assert build(config, tmp_path).own_data is not None
    files = sorted(path for path in tmp_path.rglob("*.JPEG") if "n000" not in path.parts)
    for path in files[:12]:
        # the header is there
        path.write_bytes(path.read_bytes()[:-200])
    # what was found of a folder is kept for all runs of a process
    other = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name} again"))
    with pytest.raises(ValueError, match=r"12 of 21 images .* cannot be read") as found:
        build(config, other)
    message = str(found.value)
    assert message.count("truncated") == 10
    assert "; and 2 more. Replace or delete them" in message
    assert str(files[0].relative_to(tmp_path)) in message
    # found by training then
    assert build(ImageConfig(**vars(config) | {"check_images": False}), other).own_data is not None


def test_why_a_file_is_no_image(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 30))
    for name in ("a.png", "a.jpg", "a.bmp", "a.webp"):
        image.save(tmp_path / name)
    (tmp_path / "empty.png").touch()
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:-30])
    # cameras and editors write more behind the end
    (tmp_path / "more.jpg").write_bytes((tmp_path / "a.jpg").read_bytes() + bytes(200))
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    found = {path.name: reason_against(str(path)) for path in tmp_path.iterdir()}
    good = {"a.png", "a.jpg", "a.bmp", "a.webp", "more.jpg"}
    assert {name for name, reason in found.items() if reason is None} == good
    assert found["empty.png"] == "it is empty"
    assert found["page.jpg"] == "no format that Pillow knows"
    assert "No such file" in str(found["gone.jpg"])
    assert found["cut.png"]


def test_a_folder_is_looked_at_once(tmp_path: Path, looked: list[str]) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    (tmp_path / "train" / "n001" / "1.JPEG").write_bytes(b"no image")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1 of 9 images .*train/n001/1\.JPEG \(no format"):
            refuse_broken(tmp_path, 0.1)
    assert len(looked) == 9


def test_of_several_processes_one_looks(tmp_path: Path, looked: list[str]) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    (tmp_path / "train" / "n001" / "1.JPEG").write_bytes(b"no image")
    # __wrapped__ remembers nothing, like a process of its own
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: broken._broken.__wrapped__(tmp_path, 0.1), range(4)))
    # the other three at the broken one again
    assert len(looked) == 9 + 3
    assert found == [(["train/n001/1.JPEG (no format that Pillow knows)"], 9)] * 4


def test_a_folder_that_was_changed_is_looked_at_again(tmp_path: Path, looked: list[str]) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    path = tmp_path / "train" / "n001" / "1.JPEG"
    whole = path.read_bytes()
    assert broken._broken.__wrapped__(tmp_path, 0.1) == ([], 9)
    # as many bytes
    path.write_bytes(bytes(len(whole)))
    assert len(broken._broken.__wrapped__(tmp_path, 0.1)[0]) == 1
    path.write_bytes(whole)
    assert broken._broken.__wrapped__(tmp_path, 0.1) == ([], 9)
    assert len(looked) == 27


def test_a_file_that_can_be_read_now_is_not_refused_for_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    denied = str(tmp_path / "train" / "n001" / "1.JPEG")
    with monkeypatch.context() as patch:
        # permissions, or a network drive: neither changes the size or the time of the file
        patch.setattr(broken, "reason_against", lambda path: "denied" if path == denied else None)
        assert len(broken._broken.__wrapped__(tmp_path, 0.1)[0]) == 1
    assert broken._broken.__wrapped__(tmp_path, 0.1) == ([], 9)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_the_name_of_a_folder_need_not_be_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    write_folder(folder, {"train": 2, "val": 1})
    assert broken._broken.__wrapped__(folder, 0.1) == ([], 9)


def test_what_was_kept_may_be_damaged_or_unwritable(
    tmp_path: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    assert broken._broken.__wrapped__(tmp_path, 0.1) == ([], 9)
    (kept,) = Path(os.environ["GFSA_CACHE"]).glob("*.json")
    kept.write_text("[")
    assert broken._broken.__wrapped__(tmp_path, 0.1) == ([], 9)
    monkeypatch.setenv("GFSA_CACHE", str(kept))
    assert broken._broken.__wrapped__(tmp_path, 0.1) == ([], 9)
    assert len(looked) == 27


def test_an_image_too_large_to_decode_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"train": 2, "val": 1})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(ValueError, match=r"n000/\d\.JPEG is no readable image: .*exceeds limit"):
        FolderImages(list_images(tmp_path).parts["test"])[0]
