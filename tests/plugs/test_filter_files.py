"""gfsa.save writes its file whole: killed, interrupted, out of space, or with another writer."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import gfsa
from gfsa.plugs.saving import files as saved_files
from support.interrupting import interrupted_everywhere
from support.tiny import TinyEncoder


def model_of(K: int) -> TinyEncoder:
    """Filters that differ in K and in their numbers."""
    model = TinyEncoder(depth=1)
    gfsa.plug(model, K=K, w0=float(K))
    return model


def loaded(folder: Path) -> tuple[int, float]:
    """K and w0 of the filter in ``folder``."""
    model = TinyEncoder(depth=1)
    gfsa.load(model, folder)
    (filter,) = gfsa.filters_of(model).values()
    assert isinstance(filter, gfsa.GFSA)
    assert filter.K is not None
    return filter.K, float(filter.weights()["w0"][0])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILE = ["filters.safetensors"]


def save_as_two_files(K: int, folder: Path) -> None:
    """Save as older versions did: the description in a file of its own."""
    gfsa.save(model_of(K), folder)
    description, tensors = saved_files.read(folder)
    safetensors.torch.save_file(tensors, folder / "filters.safetensors")
    (folder / "filters.json").write_text(json.dumps({**description, "sha256": "of both files"}))


def test_two_files_of_an_older_version_load_and_become_one(tmp_path: Path) -> None:
    save_as_two_files(3, tmp_path)
    # nothing but the two files is read
    (tmp_path / ".filters.safetensors.1-2.tmp").write_bytes(b"x")
    assert loaded(tmp_path) == (3, 3.0)
    gfsa.save(model_of(5), tmp_path)
    assert "filters.json" not in files(tmp_path)
    assert loaded(tmp_path) == (5, 5.0)
    # as if the save had been killed before it removed the second file
    save_as_two_files(3, tmp_path / "old")
    (tmp_path / "old" / "filters.json").rename(tmp_path / "filters.json")
    assert loaded(tmp_path) == (5, 5.0)


def fails_at(call: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """``function``, but its call with this number (from 1) raises."""
    count = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise error
        return function(*args, **kwargs)

    return run


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("saved_before", [False, True])
def test_a_full_disk_keeps_the_last_save(
    saved_before: bool, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if saved_before:
        gfsa.save(model_of(3), tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fails_at(1, getattr(os, function), full))
        with pytest.raises(OSError, match="No space left"):
            gfsa.save(model_of(5), tmp_path)
    assert files(tmp_path) == (FILE if saved_before else [])
    if saved_before:
        assert loaded(tmp_path) == (3, 3.0)
    gfsa.save(model_of(5), tmp_path)
    assert loaded(tmp_path) == (5, 5.0)


@pytest.mark.parametrize("broken", ["serialise", "unknown filter", "not finite"])
def test_what_cannot_be_saved_leaves_no_folder(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(3)
    error: type[Exception] = ValueError
    if broken == "serialise":
        # as where numpy is not installed
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        error = ImportError
    elif broken == "unknown filter":
        gfsa.unplug(model)
        gfsa.plug(model, filter=type("Mine", (gfsa.Twicing,), {}))
    else:
        next(iter(gfsa.filters_of(model).values())).theta.data[0, 0] = torch.nan
    with pytest.raises(error):
        gfsa.save(model, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_an_interrupted_save(tmp_path: Path) -> None:
    """At any line: the folder holds the last save, or the new one."""
    gfsa.save(model_of(3), tmp_path)
    model = model_of(5)
    seen = set()

    def check(finished: bool) -> None:
        found = loaded(tmp_path)
        seen.add(found)
        assert found in ((3, 3.0), (5, 5.0))
        if finished:
            assert found == (5, 5.0)
        gfsa.save(model_of(3), tmp_path)

    interrupted_everywhere(
        lambda: gfsa.save(model, tmp_path), check, inside=["plugs/saving/files.py"]
    )
    assert len(seen) == 2


def forked(action: Callable[[], Any]) -> int:
    """Run ``action`` in a process of its own; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            action()
        finally:
            os._exit(1)
    return process


def save_and_die(K: int, folder: Path, where: str) -> None:
    """Save filters, killed at the call of a function of ``os``."""
    setattr(os, where, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    gfsa.save(model_of(K), folder)


def killed_save(K: int, folder: Path, where: str) -> None:
    _, status = os.waitpid(forked(lambda: save_and_die(K, folder, where)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_killed_save(where: str, tmp_path: Path) -> None:
    """The last save loads; what the killed one left is not read."""
    killed_save(5, tmp_path, where)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        loaded(tmp_path)
    gfsa.save(model_of(3), tmp_path)
    killed_save(5, tmp_path, where)
    assert loaded(tmp_path) == (3, 3.0)


def save_again_and_again(K: int, folder: Path) -> None:
    model = model_of(K)
    while True:
        gfsa.save(model, folder)


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[int]]:
    """Two processes that save different filters into one folder until they are killed."""
    started = [forked(lambda K=K: save_again_and_again(K, tmp_path)) for K in (3, 5)]
    yield started
    for process in started:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_two_writers_and_a_reader(writers: list[int], tmp_path: Path) -> None:
    seen: set[tuple[int, float]] = set()
    give_up = time.monotonic() + 60
    while len(seen) < 2 and time.monotonic() < give_up:
        if (tmp_path / "filters.safetensors").exists():
            seen.add(loaded(tmp_path))
    for _ in range(60):
        assert loaded(tmp_path) in ((3, 3.0), (5, 5.0))
    assert all(os.waitpid(process, os.WNOHANG) == (0, 0) for process in writers)
    assert len(seen) == 2


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "filters.safetensors").mkdir()
    with pytest.raises(OSError, match=r"filters\.safetensors"):
        gfsa.save(model_of(3), tmp_path)
    assert files(tmp_path) == FILE


class GFSA(gfsa.GFSA):
    """A user's filter with the name of one of ours, and other coefficients."""

    def coefficients(self) -> torch.Tensor:
        return -super().coefficients()


def test_a_subclass_with_the_name_of_ours_is_not_ours(tmp_path: Path) -> None:
    model = TinyEncoder(depth=1)
    gfsa.plug(model, filter=GFSA)
    with pytest.raises(ValueError, match=r"is a .*test_filter_files\.GFSA, which gfsa\.load can"):
        gfsa.save(model, tmp_path)
    ours = TinyEncoder(depth=1)
    gfsa.plug(ours, filter=gfsa.GFSA)
    gfsa.save(ours, tmp_path)
    with pytest.raises(ValueError, match=r"plugged with a .*test_filter_files\.GFSA .* a GFSA"):
        gfsa.load(model, tmp_path)
    # in a whole checkpoint, too, in both directions
    for source, target in ((model, ours), (ours, model)):
        with pytest.raises(ValueError, match="the checkpoint has a filter"):
            target.load_state_dict(source.state_dict())
    again = TinyEncoder(depth=1)
    gfsa.plug(again, filter=GFSA)
    again.load_state_dict(model.state_dict())


def test_layers_whose_names_differ_by_a_prefix_only_are_not_mixed(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.module = TinyEncoder(depth=1).blocks, TinyEncoder(depth=1)

    model = Both()
    gfsa.plug(model)
    with pytest.raises(ValueError, match="have the same names without the prefixes"):
        gfsa.save(model, tmp_path)
    gfsa.save(model_of(3), tmp_path)
    gfsa.unplug(model)
    with pytest.raises(ValueError, match=r"which blocks\.0\.attention, module\.blocks\.0\."):
        gfsa.load(model, tmp_path)
    assert not gfsa.filters_of(model)
