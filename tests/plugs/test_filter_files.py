"""gfsa.save writes two files as one: killed, interrupted, out of space, or with another writer."""

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
import torch
from torch import nn

import gfsa
from gfsa.plugs import filter_files
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


BOTH = ["filters.json", "filters.safetensors"]


def test_files_of_two_saves_do_not_load(tmp_path: Path) -> None:
    for K in (3, 5):
        gfsa.save(model_of(K), tmp_path / str(K))
    tensors = (tmp_path / "5" / "filters.safetensors").read_bytes()
    (tmp_path / "3" / "filters.safetensors").write_bytes(tensors)
    with pytest.raises(ValueError, match=r"filters\.safetensors is damaged, or is not what"):
        loaded(tmp_path / "3")


def test_a_changed_description_does_not_load(tmp_path: Path) -> None:
    gfsa.save(model_of(3), tmp_path)
    file = tmp_path / "filters.json"
    file.write_text(file.read_text().replace('"K": 3', '"K": 7'))
    with pytest.raises(ValueError, match="delete its 'sha256'"):
        loaded(tmp_path)
    # another layout is the same description
    file.write_text(json.dumps(json.loads(file.read_text().replace('"K": 7', '"K": 3'))))
    assert loaded(tmp_path) == (3, 3.0)


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


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("folder", ["new/folder", "old"])
def test_a_full_disk_keeps_the_last_save(
    folder: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / folder
    if folder == "old":
        gfsa.save(model_of(3), path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_at(call, os.fsync, full))
        with pytest.raises(OSError, match="No space left"):
            gfsa.save(model_of(5), path)
    if folder == "old":
        assert files(path) == BOTH
        assert loaded(path) == (3, 3.0)
    else:
        assert not (tmp_path / "new").exists()
    gfsa.save(model_of(5), path)
    assert loaded(path) == (5, 5.0)


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


# Ctrl-C in a destructor is reported, and raised nowhere
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
        assert files(tmp_path) == BOTH

    interrupted_everywhere(
        lambda: gfsa.save(model, tmp_path), check, inside=["plugs/filter_files.py"]
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
    """Save filters, killed at a call of a function of ``os``: "fsync 2" is its second call."""
    name, count = where.split()
    function, left = getattr(os, name), int(count)

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(os, name, killed)
    gfsa.save(model_of(K), folder)


def killed_save(K: int, folder: Path, where: str) -> None:
    _, status = os.waitpid(forked(lambda: save_and_die(K, folder, where)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def drop_digest(folder: Path) -> None:
    """Make a save one of an older version."""
    file = folder / "filters.json"
    description = json.loads(file.read_text())
    del description["sha256"]
    file.write_text(json.dumps(description))


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("where", ["fsync 1", "fsync 2", "replace 1", "replace 2", "fsync 3"])
def test_a_killed_save(where: str, older: bool, tmp_path: Path) -> None:
    """The last save loads, or the new one."""
    gfsa.save(model_of(3), tmp_path)
    if older:
        drop_digest(tmp_path)
    killed_save(5, tmp_path, where)
    found = files(tmp_path)
    assert loaded(tmp_path) == ((5, 5.0) if where in ("replace 2", "fsync 3") else (3, 3.0))
    # loading changes nothing
    assert files(tmp_path) == found
    gfsa.save(model_of(4), tmp_path)
    assert loaded(tmp_path) == (4, 4.0)
    # what the killed one left is gone
    assert files(tmp_path) == BOTH


@pytest.mark.parametrize("before", [False, True])
def test_a_save_that_was_killed_between_its_renames_stays_until_the_next(
    before: bool, tmp_path: Path
) -> None:
    if before:
        gfsa.save(model_of(3), tmp_path)
    killed_save(5, tmp_path, "replace 2")
    assert loaded(tmp_path) == (5, 5.0)
    killed_save(7, tmp_path, "replace 1")
    assert loaded(tmp_path) == (5, 5.0)
    # without its tensors nothing loads: those of the other saves belong to another description
    for file in tmp_path.glob(".filters.safetensors.*.tmp"):
        file.unlink()
    error, message = (
        (ValueError, "interrupted between its two files")
        if before
        else (FileNotFoundError, "does not exist")
    )
    with pytest.raises(error, match=message):
        loaded(tmp_path)


def test_tensors_of_another_killed_save_are_not_taken(tmp_path: Path) -> None:
    killed_save(5, tmp_path, "replace 2")
    (left,) = tmp_path.glob(".filters.safetensors.*.tmp")
    gfsa.save(model_of(3), tmp_path / "other")
    left.write_bytes((tmp_path / "other" / "filters.safetensors").read_bytes())
    with pytest.raises(ValueError, match="no file that a killed save left beside it"):
        loaded(tmp_path)


@pytest.mark.parametrize(("call", "expected"), [(1, (3, 3.0)), (2, (5, 5.0))])
def test_a_rename_that_fails_leaves_a_save_that_loads(
    call: int, expected: tuple[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gfsa.save(model_of(3), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails_at(call, os.replace, PermissionError("not now")))
        with pytest.raises(PermissionError, match="not now"):
            gfsa.save(model_of(5), tmp_path)
    assert loaded(tmp_path) == expected
    gfsa.save(model_of(4), tmp_path)
    assert files(tmp_path) == BOTH


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
        if (tmp_path / "filters.json").exists():
            seen.add(loaded(tmp_path))
    for _ in range(60):
        assert loaded(tmp_path) in ((3, 3.0), (5, 5.0))
    assert all(os.waitpid(process, os.WNOHANG) == (0, 0) for process in writers)
    assert len(seen) == 2


def test_without_locks_the_digest_still_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_files, "fcntl", None)
    gfsa.save(model_of(3), tmp_path)
    assert loaded(tmp_path) == (3, 3.0)


def test_files_are_readable_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        gfsa.save(model_of(3), tmp_path)
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in BOTH} == {0o644}


def test_a_folder_in_the_place_of_a_file_is_not_half_replaced(tmp_path: Path) -> None:
    (tmp_path / "filters.json").mkdir()
    with pytest.raises(IsADirectoryError, match="filters are saved as files"):
        gfsa.save(model_of(3), tmp_path)
    assert files(tmp_path) == ["filters.json"]


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
    with pytest.raises(ValueError, match=r"plugged with a .*test_filter_files\.GFSA, .* a GFSA"):
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
    with pytest.raises(ValueError, match=r"both blocks\.0\.attention and module\.blocks\.0"):
        gfsa.load(model, tmp_path)
    assert not gfsa.filters_of(model)


class Guest(nn.Module):
    """Attention of x to y, which no adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(-2)


class GuestAttention(Guest):
    pass


def test_load_takes_no_layer_that_plug_refuses(tmp_path: Path) -> None:
    """Only a file that was saved from a traced layer has one traced."""
    traced, plain = tmp_path / "traced", tmp_path / "plain"
    model = nn.ModuleDict({"attention": GuestAttention()})
    with pytest.raises(ValueError, match="no adapter knows GuestAttention"):
        gfsa.plug(model)
    gfsa.plug(model, unknown="trace")
    gfsa.save(model, traced)
    gfsa.unplug(model)
    gfsa.load(model, traced)
    gfsa.unplug(model)
    description = json.loads((traced / "filters.json").read_text())
    del description["filters"]["attention"]["traced"], description["sha256"]
    filter_files.write_files(plain, description, (traced / "filters.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"cannot take the filter.*no adapter knows"):
        gfsa.load(model, plain)
    assert not gfsa.filters_of(model)
