"""Hostile filter files: refused with an error, without a change of the model or of memory."""

from __future__ import annotations

import json
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import gfsa
from gfsa.filters.partial import PartialPolynomial
from gfsa.plugs.saving import files
from gfsa.plugs.saving.files import FILE
from support.corrupted_filters import joined, parts_of
from support.tiny import TinyEncoder

LAYER = "blocks.0.attention"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the filter of one layer."""
    model = TinyEncoder(depth=1)
    gfsa.plug(model)
    gfsa.save(model, tmp_path)
    return tmp_path


def refused(folder: Path, most_megabytes: float = 64, heads: int = 4) -> str:
    """Load into a fresh model: a ValueError, nothing plugged, little allocated."""
    model: nn.Module = TinyEncoder(depth=1, dim=max(16, heads), heads=heads)
    keys = list(model.state_dict())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r".") as caught:
            gfsa.load(model, folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_megabytes * 2**20
    assert len(str(caught.value)) < 2000
    assert not gfsa.filters_of(model)
    assert list(model.state_dict()) == keys
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    description, tensors = files.read(folder)
    change(description)
    files.write(folder, description, tensors)


def rewrite_text(folder: Path, text: str) -> None:
    """Replace the description by any text."""
    header, data = parts_of((folder / FILE).read_bytes())
    header["__metadata__"]["gfsa"] = text
    (folder / FILE).write_bytes(joined(header, data))


def rewrite_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    description, _ = files.read(folder)
    files.write(folder, description, tensors)


HUGE = 10**12
DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a future format": lambda d: d.update(format=2),
    "no filters": lambda d: d.update(filters={}),
    "a list of filters": lambda d: d.update(filters=[1]),
    "an entry that is none": lambda d: d["filters"].update({LAYER: 7}),
    "a kind that is none": lambda d: d["filters"][LAYER].update(kind=["GFSA"]),
    "a kind from elsewhere": lambda d: d["filters"][LAYER].update(kind="os.system"),
    "arguments that are none": lambda d: d["filters"][LAYER].update(arguments=[4]),
    "an argument too many": lambda d: d["filters"][LAYER]["arguments"].update(evil=1),
    "huge heads": lambda d: d["filters"][LAYER]["arguments"].update(num_heads=HUGE),
    "many heads": lambda d: d["filters"][LAYER]["arguments"].update(num_heads=65536),
    "huge K": lambda d: d["filters"][LAYER]["arguments"].update(K=HUGE, power="exact"),
    "a huge degree": lambda d: d["filters"][LAYER].update(
        kind="Polynomial", arguments={"num_heads": 4, "degree": HUGE}
    ),
    "huge hops": lambda d: d["filters"][LAYER].update(
        kind="PageRank", arguments={"num_heads": 4, "hops": HUGE}
    ),
    "an infinite rate": lambda d: d["filters"][LAYER]["arguments"].update(lr_multiplier=10**400),
    "weights that are none": lambda d: d["filters"][LAYER]["arguments"].update(
        learn=["wK"], w0={"a": 1}
    ),
    "a layer with a path for a name": lambda d: d["filters"].update(
        {"../../../etc/passwd": d["filters"].pop(LAYER)}
    ),
    "a layer that is a method": lambda d: d["filters"].update(
        {"__class__.__init__": d["filters"].pop(LAYER)}
    ),
    "dropout elsewhere": lambda d: d["filters"][LAYER].update(dropout_after="junk"),
    "dropout nowhere": lambda d: d["filters"][LAYER].update(dropout_after=None),
    "a number that is one in float64 only": lambda d: d["filters"][LAYER]["arguments"].update(
        learn=["wK"], w0=1e300
    ),
    "a rate that is none in float32": lambda d: d["filters"][LAYER]["arguments"].update(
        lr_multiplier=1e-300
    ),
    "heads that are none": lambda d: d["filters"][LAYER]["arguments"].update(num_heads=True),
    "heads as a fraction": lambda d: d["filters"][LAYER]["arguments"].update(num_heads=4.0),
    "a format as a fraction": lambda d: d.update(format=1.0),
    "a tower of tables": lambda d: d["filters"][LAYER].update(
        kind="PartialPolynomial",
        arguments={"num_heads": 4, "degree": 1000, "high": [0, 1, 2, 3]},
    ),
    "heads that do many passes": lambda d: d["filters"][LAYER].update(
        kind="PartialPolynomial",
        arguments={"num_heads": 65536, "degree": 2, "high": list(range(65536))},
    ),
    "a long list": lambda d: d["filters"][LAYER].update(
        kind="PartialPolynomial",
        arguments={"num_heads": 4, "degree": 2, "high": [0] * 200_000},
    ),
    "a long name": lambda d: d["filters"].update({"x" * 10**6: d["filters"].pop(LAYER)}),
    "a long kind": lambda d: d["filters"][LAYER].update(kind="x" * 10**6),
    "a long model": lambda d: d.update(model="x" * 10**6, layers={}),
    "another backbone": lambda d: d["filters"][LAYER].update(backbone={"class": "X"}),
    "depths that are none": lambda d: d.update(layers=[HUGE]),
    "no depths": lambda d: d.update(layers=None),
}


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_descriptions(what: str, saved: Path) -> None:
    rewrite(saved, DESCRIPTIONS[what])
    refused(saved)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "\ufeff{}",
        '{"format": 1',
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"format": 1e999999, "filters": {}}',
        "9" * 5_000,
        " " * (9 * 2**20),
    ],
    ids=["empty", "null", "list", "bom", "cut off", "deep", "deep objects", "inf", "digits", "big"],
)
def test_what_is_no_description(text: str, saved: Path) -> None:
    rewrite_text(saved, text)
    refused(saved)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00{", b"{}", b"[" * 200_000])
def test_a_description_of_an_older_version(content: bytes, saved: Path) -> None:
    """In a file of its own; it is read if the header has none."""
    _, tensors = files.read(saved)
    save_file(tensors, saved / FILE)
    (saved / files.OLD_DESCRIPTION).write_bytes(content)
    refused(saved)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{" * 1000,
        b'{"blocks.0.attention.theta":{"dtype":"F32","shape":[1000000000000,3],"data_offsets":[0,8]}}',
        b'{"blocks.0.attention.theta":{"dtype":"F32","shape":[4,3],"data_offsets":[0,99999999999]}}',
        b'{"blocks.0.attention.theta":{"dtype":"F32","shape":[4,3],"data_offsets":[-8,40]}}',
        b'{"blocks.0.attention.theta":{"dtype":"PICKLE","shape":[4,3],"data_offsets":[0,48]}}',
    ],
    ids=["none", "deep", "huge shape", "beyond the end", "before the start", "unknown dtype"],
)
@pytest.mark.parametrize("claimed", [None, 2**62, 99 * 10**6])
def test_headers(header: bytes, claimed: int | None, saved: Path) -> None:
    length = struct.pack("<Q", len(header) if claimed is None else claimed)
    (saved / FILE).write_bytes(length + header + b"\0" * 48)
    (saved / files.OLD_DESCRIPTION).write_text("{}")
    refused(saved)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3, dtype=torch.int64),
        torch.zeros(4, 3, dtype=torch.bool),
        torch.zeros(4, 3, dtype=torch.complex64),
        torch.zeros(4, 3).to(torch.float8_e4m3fn),
        torch.full((4, 3), torch.nan),
        torch.full((4, 3), torch.inf),
        torch.zeros(4, 4),
        torch.zeros(12),
        torch.full((4, 3), 1e300, dtype=torch.float64),
        torch.full((4, 3), 3e38),
        torch.full((4, 3), 1e5),
    ],
    ids=[
        *("int", "bool", "complex", "float8", "nan", "inf", "too wide", "flat"),
        *("inf in float32", "inf as a sum", "beyond sense"),
    ],
)
def test_tensors(tensor: torch.Tensor, saved: Path) -> None:
    rewrite_tensors(saved, {f"{LAYER}.theta": tensor})
    assert LAYER in refused(saved)


def test_a_high_degree_is_for_callers_who_ask_for_it(saved: Path) -> None:
    """Every degree is an attention pass: a small file could make each forward slow."""
    gfsa.plug(model := TinyEncoder(depth=1), K=1000, power="exact")
    gfsa.save(model, saved)
    assert "max_degree=1000" in refused(saved)
    fresh = TinyEncoder(depth=1)
    gfsa.load(fresh, saved, max_degree=1000)
    assert gfsa.filters_of(fresh)[LAYER].degree == 1000


@pytest.mark.parametrize("right", [False, True], ids=["other heads", "the model's heads"])
def test_a_small_file_asks_for_little_memory(right: bool, saved: Path) -> None:
    """Of a model with many heads, too; measured by the system, not by Python."""
    heads = 300
    arguments = {"num_heads": heads + (not right), "degree": 1000, "high": [0]}
    filter = {"kind": "PartialPolynomial", "arguments": arguments}
    rewrite(saved, lambda d: d.update(filters={LAYER: filter}))
    before = resident_bytes()
    start = time.perf_counter()
    message = refused(saved, heads=heads)
    assert ("coefficients" if right else "heads") in message
    assert time.perf_counter() - start < 1.0
    assert peak_resident_bytes() - before < 200 * 2**20


def resident_bytes() -> int:
    """After the largest value so far has been forgotten."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    ['{"format": 1, "format": 1, "filters": {}}', '{"format": NaN}', '{"format": -Infinity}'],
)
def test_json_that_is_ambiguous(text: str, saved: Path) -> None:
    rewrite_text(saved, text)
    assert "is damaged" in refused(saved)


@pytest.mark.parametrize(
    "build",
    [
        lambda: PartialPolynomial(65536, 1000, [0]),
        lambda: gfsa.Polynomial(65536, degree=1000),
        lambda: gfsa.PageRank(65536, hops=1000),
        lambda: gfsa.GFSA(65536, K=1000, power="exact"),
        lambda: gfsa.GFSA(4, w0=1e308, learn=("wK",)),
        lambda: gfsa.GFSA(4, w0=1e30, lr_multiplier=1e-20),
        lambda: gfsa.GFSA(4, lr_multiplier=1e-40),
    ],
)
def test_filters_beyond_any_model_are_refused(build: Callable[[], gfsa.GraphFilter]) -> None:
    before = resident_bytes()
    with pytest.raises(ValueError, match=r"coefficients|float32"):
        build()
    assert peak_resident_bytes() - before < 64 * 2**20


def test_many_heads_take_linear_time() -> None:
    start = time.perf_counter()
    PartialPolynomial(65536, 2, range(65536))
    assert time.perf_counter() - start < 5.0


def test_tensors_too_many(saved: Path) -> None:
    tensors = {f"{LAYER}.theta": torch.zeros(4, 3), f"{LAYER}.extra": torch.zeros(2)}
    rewrite_tensors(saved, tensors)
    assert "not expected" in refused(saved)


def test_a_file_that_is_too_large_is_not_read(saved: Path) -> None:
    with (saved / FILE).open("r+b") as file:
        file.truncate(2**34)
    assert "more than" in refused(saved)


@settings(max_examples=60)
@given(data=st.data())
def test_damage_anywhere(data: st.DataObject, tmp_path: Path) -> None:
    """A file cut off or with a byte turned over is refused in words, or loads."""
    # the file's length depends on the weights
    torch.manual_seed(0)
    model = TinyEncoder(depth=1)
    gfsa.plug(model)
    gfsa.save(model, tmp_path)
    file = tmp_path / FILE
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    other = TinyEncoder(depth=1)
    try:
        gfsa.load(other, tmp_path)
    except ValueError:
        assert not gfsa.filters_of(other)


def test_nothing_is_run(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A pickle in the place of the tensors is bytes, not a program."""
    evidence = tmp_path_factory.mktemp("evidence") / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (evidence,)

    torch.save({f"{LAYER}.theta": Evil()}, saved / FILE)
    refused(saved)
    assert not evidence.exists()


def test_shards_outside_of_the_folder_are_not_opened(tmp_path: Path) -> None:
    from gfsa.plugs.saving.pretrained import _files

    index = {"weight_map": {"x": "../../elsewhere/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names a file outside of it"):
        _files(tmp_path, {})


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "{"]
)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    from gfsa.plugs.saving.pretrained import _files

    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is damaged"):
        _files(tmp_path, {})


def test_filters_in_a_checkpoint_that_are_no_filters_are_not_read(tmp_path: Path) -> None:
    from gfsa.plugs.saving.pretrained import has_filters

    numbers = 2**28
    entry = {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}
    header = json.dumps({"layer.gfsa.theta": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * numbers)
    before = resident_bytes()
    with pytest.raises(ValueError, match="filters are a few numbers per head"):
        has_filters(tmp_path)
    assert peak_resident_bytes() - before < 200 * 2**20


def test_a_description_in_a_checkpoint_is_short() -> None:
    filter = gfsa.GFSA(4)
    with pytest.raises(ValueError, match="description of a filter has 5000000 bytes"):
        filter.set_extra_state(torch.zeros(5_000_000, dtype=torch.uint8))
