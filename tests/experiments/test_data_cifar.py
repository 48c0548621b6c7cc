"""CIFAR: the official files and the JPEG layout, read exactly or refused with a reason."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gfsa_experiments.tasks.image import cifar
from gfsa_experiments.tasks.image.cifar import read_cifar
from support.tiny_images import pictures, write_cifar10, write_jpegs

pytestmark = pytest.mark.filterwarnings("ignore:.*results are not those of the official")


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    cifar._read.cache_clear()
    monkeypatch.delenv("GFSA_CACHE", raising=False)


@pytest.mark.parametrize("inside", ["", "cifar10", "cifar-10-batches-bin"])
def test_binary_files_are_read_in_order_from_the_folder_or_its_parent(
    tmp_path: Path, inside: str
) -> None:
    pixels = write_cifar10(tmp_path / inside)
    parts = read_cifar(tmp_path, "cifar10")
    assert np.array_equal(parts["train"].pixels.numpy(), pixels)
    assert parts["train"].labels[:10].tolist() == [*range(8), 0, 1]
    assert len(parts["test"]) == 10


def test_jpegs_decode_to_what_pillow_sees(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "cifar10" / "cifar10_jpeg.npz")
    images = read_cifar(tmp_path, "cifar10")["train"]
    file = io.BytesIO()
    Image.fromarray(pictures(40, 10, seed=40)[0][7]).save(file, "JPEG", quality=75)
    assert np.array_equal(images.pixels[7].numpy(), np.asarray(Image.open(file)))
    assert images.labels[7] == 7


def test_decoded_jpegs_are_kept_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jpegs(tmp_path / "cifar10_jpeg.npz")
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    first = read_cifar(tmp_path, "cifar10")
    assert read_cifar(tmp_path, "cifar10") is first
    kept = sorted((tmp_path / "cache").iterdir())
    assert [path.suffix for path in kept] == [".npy", ".npy"]

    cifar._read.cache_clear()
    monkeypatch.setattr(cifar, "_parse_jpeg", lambda _: pytest.fail("decoded again"))
    again = read_cifar(tmp_path, "cifar10")
    assert torch.equal(again["train"].pixels, first["train"].pixels)

    # other JPEGs are not taken for these
    cifar._read.cache_clear()
    monkeypatch.undo()
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    write_jpegs(tmp_path / "cifar10_jpeg.npz", train=50)
    assert len(read_cifar(tmp_path, "cifar10")["train"]) == 50


def test_a_cache_of_another_shape_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jpegs(tmp_path / "cifar10_jpeg.npz")
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    read_cifar(tmp_path, "cifar10")
    cifar._read.cache_clear()
    for path in (tmp_path / "cache").iterdir():
        np.save(path, np.zeros((3, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="delete it"):
        read_cifar(tmp_path, "cifar10")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    # would raise something else if it were unpickled
    (folder / "data_batch_1").write_bytes(b"\x80\x04cposix\nsystem\n")
    with pytest.raises(FileNotFoundError, match=r"not read: unpickling runs.*binary\.tar\.gz"):
        read_cifar(tmp_path, "cifar10")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin.*cifar10_jpeg\.npz.*toronto"):
        read_cifar(tmp_path, "cifar10")
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_3\.bin"):
        read_cifar(tmp_path, "cifar10")


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    whole = (tmp_path / "test_batch.bin").read_bytes()
    (tmp_path / "test_batch.bin").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"test_batch\.bin is damaged.*rows of 3073"):
        read_cifar(tmp_path, "cifar10")


def test_a_wrong_label_is_reported_and_many_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path, per_file=200)
    data = np.fromfile(tmp_path / "data_batch_2.bin", np.uint8).reshape(-1, 3073)
    data[5, 0] = 10
    data.tofile(tmp_path / "data_batch_2.bin")
    with pytest.warns(UserWarning, match=r"1 of 200 rows.*line 6: label 10, expected 0 to 9"):
        assert len(read_cifar(tmp_path, "cifar10")["train"]) == 999
    cifar._read.cache_clear()
    data[:50, 0] = 200
    data.tofile(tmp_path / "data_batch_2.bin")
    with pytest.raises(ValueError, match="50 of 200 rows"):
        read_cifar(tmp_path, "cifar10")


def test_spoilt_jpegs_are_left_out_with_their_labels(tmp_path: Path) -> None:
    write_jpegs(tmp_path / "cifar10_jpeg.npz", train=300, broken=(3,), wrong_labels=(7,))
    with pytest.warns(UserWarning, match=r"2 of 300 rows.*line 4: no JPEG.*line 8: label 77"):
        images = read_cifar(tmp_path, "cifar10")["train"]
    assert len(images) == 298
    assert images.labels[:8].tolist() == [0, 1, 2, 4, 5, 6, 8, 9]


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cifar10_jpeg.npz"
    write_jpegs(path)
    arrays = dict(np.load(path))
    np.savez(path, **{name: arrays[name] for name in arrays if name != "header"})
    with pytest.raises(ValueError, match="has no array header"):
        read_cifar(tmp_path, "cifar10")
    np.savez(path, **arrays | {"offset_train": arrays["offset_train"][:-1]})
    with pytest.raises(ValueError, match="offset_train should rise in 41 steps"):
        read_cifar(tmp_path, "cifar10")
    np.savez(path, **arrays)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="no npz file \\(Bad CRC"):
        read_cifar(tmp_path, "cifar10")
    path.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="damaged or no npz file"):
        read_cifar(tmp_path, "cifar10")
