"""Filter files that are damaged or written by an attacker: refused, or loaded as what they say.

A thousand corruptions by number, each within 1 s and 200 MB of the memory that was in use before;
``make fuzz`` tries more of them: ``GFSA_FUZZ=20000 pytest tests/scale/test_hostile_files.py``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import random
import re
import resource
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn

import gfsa
from gfsa.filters import PartialPolynomial
from gfsa.filters.spec import KINDS
from gfsa.plugs.saving import files
from gfsa.plugs.saving.files import FILE
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


Change = Callable[[dict[str, Any]], object]
HUGE = 10**12


def top(**changes: Any) -> Change:
    return lambda description: description.update(changes)


def entry(**changes: Any) -> Change:
    return lambda description: description["filters"][LAYER].update(changes)


def arguments(**changes: Any) -> Change:
    return lambda description: description["filters"][LAYER]["arguments"].update(changes)


def of_kind(kind: str, **arguments: Any) -> Change:
    return entry(kind=kind, arguments={"num_heads": 4} | arguments)


def layer(name: str) -> Change:
    return lambda d: d["filters"].update({name: d["filters"].pop(LAYER)})


DESCRIPTIONS: dict[str, Change] = {
    "a list of filters": top(filters=[1]),
    "an entry that is none": top(filters={LAYER: 7}),
    "a kind that is none": entry(kind=["GFSA"]),
    "arguments that are none": entry(arguments=[4]),
    "huge heads": arguments(num_heads=HUGE),
    "many heads": arguments(num_heads=65536),
    "heads that are none": arguments(num_heads=True),
    "heads as a fraction": arguments(num_heads=4.0),
    "huge K": arguments(K=HUGE, power="exact"),
    "a huge degree": of_kind("Polynomial", degree=HUGE),
    "huge hops": of_kind("PageRank", hops=HUGE),
    "an infinite rate": arguments(lr_multiplier=10**400),
    "a rate that is none in float32": arguments(lr_multiplier=1e-300),
    "weights that are none": arguments(learn=["wK"], w0={"a": 1}),
    "a number that is one in float64 only": arguments(learn=["wK"], w0=1e300),
    "a layer with a path for a name": layer("../../../etc/passwd"),
    "a layer that is a method": layer("__class__.__init__"),
    "a long name": layer("x" * 10**6),
    "dropout elsewhere": entry(dropout_after="junk"),
    "dropout nowhere": entry(dropout_after=None),
    "a format as a fraction": top(format=1.0),
    "a tower of tables": of_kind("PartialPolynomial", degree=1000, high=[0, 1, 2, 3]),
    "heads that do many passes": of_kind(
        "PartialPolynomial", num_heads=65536, degree=2, high=list(range(65536))
    ),
    "a long list": of_kind("PartialPolynomial", degree=2, high=[0] * 200_000),
    "a long kind": entry(kind="x" * 10**6),
    "a long model": top(model="x" * 10**6, layers={}),
    "depths that are none": top(layers=[HUGE]),
    "no depths": top(layers=None),
}


@pytest.mark.parametrize("what", DESCRIPTIONS)
def test_descriptions(what: str, saved: Path) -> None:
    rewrite(saved, DESCRIPTIONS[what])
    refused(saved)


TEXTS = {
    "empty": "",
    "null": "null",
    "list": "[]",
    "bom": "\ufeff{}",
    "cut off": '{"format": 1',
    "deep": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "inf": '{"format": 1e999999, "filters": {}}',
    "digits": "9" * 5_000,
    "big": " " * (9 * 2**20),
    "nan": '{"format": NaN}',
}


@pytest.mark.parametrize("what", TEXTS)
def test_what_is_no_description(what: str, saved: Path) -> None:
    rewrite_text(saved, TEXTS[what])
    refused(saved)


def test_a_key_twice(saved: Path) -> None:
    """Readers differ in which of the two they take."""
    text = parts_of((saved / FILE).read_bytes())[0]["__metadata__"]["gfsa"]
    rewrite_text(saved, text.replace('"format": 1', '"format": 1, "format": 1'))
    assert "the same key twice" in refused(saved)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00{", b"{}", b"[" * 200_000])
def test_a_description_of_an_older_version(content: bytes, saved: Path) -> None:
    """In a file of its own; it is read if the header has none."""
    _, tensors = files.read(saved)
    save_file(tensors, saved / FILE)
    (saved / files.OLD_DESCRIPTION).write_bytes(content)
    refused(saved)


def header_of(dtype: str = "F32", shape: str = "4,3", offsets: str = "0,48") -> bytes:
    tensor = f'{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}'
    return f'{{"{LAYER}.theta":{tensor}}}'.encode()


HEADERS = {
    "none": b"",
    "deep": b"{" * 1000,
    "huge shape": header_of(shape="1000000000000,3", offsets="0,8"),
    "beyond the end": header_of(offsets="0,99999999999"),
    "before the start": header_of(offsets="-8,40"),
    "unknown dtype": header_of(dtype="PICKLE"),
}


@pytest.mark.parametrize("what", HEADERS)
@pytest.mark.parametrize("claimed", [None, 2**62, 99 * 10**6])
def test_headers(what: str, claimed: int | None, saved: Path) -> None:
    header = HEADERS[what]
    length = struct.pack("<Q", len(header) if claimed is None else claimed)
    (saved / FILE).write_bytes(length + header + b"\0" * 48)
    (saved / files.OLD_DESCRIPTION).write_text("{}")
    refused(saved)


TENSORS = {
    "int": torch.zeros(4, 3, dtype=torch.int64),
    "bool": torch.zeros(4, 3, dtype=torch.bool),
    "complex": torch.zeros(4, 3, dtype=torch.complex64),
    "float8": torch.zeros(4, 3).to(torch.float8_e4m3fn),
    "nan": torch.full((4, 3), torch.nan),
    "inf": torch.full((4, 3), torch.inf),
    "too wide": torch.zeros(4, 4),
    "flat": torch.zeros(12),
    "inf in float32": torch.full((4, 3), 1e300, dtype=torch.float64),
    "inf as a sum": torch.full((4, 3), 3e38),
    "beyond sense": torch.full((4, 3), 1e5),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors(what: str, saved: Path) -> None:
    rewrite_tensors(saved, {f"{LAYER}.theta": TENSORS[what]})
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
    message = refused(saved, heads=heads)
    assert ("coefficients" if right else "heads") in message
    assert peak_resident_bytes() - before < 200 * 2**20


def resident_bytes() -> int:
    """After the largest value so far has been forgotten."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


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


def test_a_file_that_is_too_large_is_not_read(saved: Path) -> None:
    with (saved / FILE).open("r+b") as file:
        file.truncate(2**34)
    assert "more than" in refused(saved)


def test_nothing_is_run(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A pickle in the place of the tensors is bytes, not a program."""
    evidence = tmp_path_factory.mktemp("evidence") / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (evidence,)

    torch.save({f"{LAYER}.theta": Evil()}, saved / FILE)
    refused(saved)
    assert not evidence.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"x": "../../elsewhere/model.safetensors"}}', "a file outside of it"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"weight_map": 3}', "is damaged"),
        ('{"weight_map": {"a": []}}', "is damaged"),
        ("{", "is damaged"),
    ],
)
def test_an_index_of_shards(text: str, message: str, tmp_path: Path) -> None:
    from gfsa.plugs.saving.pretrained import files_of

    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        files_of(tmp_path, {})


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


Json = Any

EVIL: list[Json] = [
    *(None, True, False, 0, -1, 1, 2, 3, 4, 5, 300, 999, 1000, 1001, 65536, 2**31, 2**63, 10**400),
    *(0.5, 1.5, -0.0, 1e-300, 1e-45, 3e38, 1e39, 1e300, float("inf"), float("nan")),
    *("", "GFSA", "exact", "junk", "../../etc/passwd", "__class__", "\ud800", "x" * 20_000),
    *([], [[]], [0], [0, 1, 2, 3], [0] * 5000, list(range(5000)), [None], [1e300] * 4, [[1.0] * 4]),
    *({}, {"a": 1}, {"num_heads": 4}),
]
CLASSES = [
    *("GFSA", "Polynomial", "PartialPolynomial", "PageRank", "Twicing", "Laplacian", "AttnScale")
]
ARGUMENTS = [
    *("num_heads", "K", "learn", "power", "lr_multiplier", "w0", "w1", "wK", "degree", "hops"),
    *("alpha", "high", "filter", "self"),
]


def corrupted(content: bytes, number: int) -> bytes:
    """The file with the corruption of this number, the same at every call."""
    dice = random.Random(number)
    kind = dice.random()
    if kind < 0.3:
        return damaged(content, dice)
    header, data = parts_of(content)
    if kind > 0.75:
        return edited_tensors(header, bytearray(data), dice)
    description = json.loads(header["__metadata__"]["gfsa"])
    for _ in range(dice.randint(1, 3)):
        description = edited(description, dice)
    text = json.dumps(description)
    if kind < 0.4:
        text = damaged(text.encode(), dice).decode(errors="replace")
    header["__metadata__"]["gfsa"] = text
    return joined(header, data)


def parts_of(content: bytes) -> tuple[Json, bytes]:
    """The header and the numbers of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Json, data: bytes, claimed: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Bytes turned over, cut out, doubled, inserted or cut off."""
    data = bytearray(content)
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice([1, 1, 4, 40]))
    ways: list[Callable[[], Any]] = [
        lambda: data.__setitem__(start, data[start] ^ (1 << dice.randrange(8))),
        lambda: data.__setitem__(start, dice.randrange(256)),
        lambda: data.__delitem__(slice(start, end)),
        lambda: data.__setitem__(slice(start, start), data[start:end]),
        lambda: data.__setitem__(slice(start, end), dice.randbytes(end - start)),
        lambda: data.__delitem__(slice(start, None)),
        lambda: data.__setitem__(slice(start, start), dice.choice([b"[", b'{"a":']) * 50_000),
        lambda: data.__setitem__(slice(0, 0), struct.pack("<Q", dice.randrange(2**64))),
        lambda: data.__setitem__(slice(start, start), b"9" * 5000),
    ]
    dice.choice(ways)()
    return bytes(data)


def edited(content: Json, dice: random.Random) -> Json:
    """One value anywhere in a JSON tree replaced, removed, renamed or added."""
    content = copy.deepcopy(content)
    parents = [content] if isinstance(content, (dict, list)) else []
    for parent in parents:
        inner = parent.values() if isinstance(parent, dict) else parent
        parents.extend(value for value in inner if isinstance(value, (dict, list)))
    parents = [parent for parent in parents if parent]
    if not parents:
        return dice.choice(EVIL)
    # the deeper ones, which are more, are where the settings of filters are
    parent = dice.choice(parents)
    key = dice.choice(list(parent)) if isinstance(parent, dict) else dice.randrange(len(parent))
    way = dice.choice(["replace", "replace", "replace", "remove", "add", "rename", "kind"])
    if way == "remove":
        del parent[key]
    elif way == "add" and isinstance(parent, dict):
        parent[dice.choice(ARGUMENTS)] = copy.deepcopy(dice.choice(EVIL))
    elif way == "rename" and isinstance(parent, dict):
        parent[dice.choice(["", "theta", *ARGUMENTS])] = parent.pop(key)
    elif way == "kind" and isinstance(parent, dict) and "kind" in parent:
        parent["kind"] = dice.choice(CLASSES)
    else:
        parent[key] = copy.deepcopy(dice.choice(EVIL))
    return content


def edited_tensors(header: Json, data: bytearray, dice: random.Random) -> bytes:
    """A safetensors file with another header, or other numbers."""
    names = [name for name in header if name != "__metadata__"]
    way = dice.choice(["header", "numbers", "double", "half", "shape", "name", "length"])
    if way == "header" or not names:
        header = edited(header, dice)
    elif way == "numbers":
        for start in range(0, len(data) - 3, 4):
            value = dice.choice([0.0, 1.0, 3e38, -3e38, 1e-45, float("nan"), float("inf")])
            data[start : start + 4] = struct.pack("<f", value)
    elif way in ("double", "half"):
        # the same shapes in another precision
        code, size, name = ("<d", 8, "F64") if way == "double" else ("<e", 2, "F16")
        values = [float(x) for (x,) in struct.iter_unpack("<f", data)]
        scale = dice.choice([1.0, 1.0, 1e300 if way == "double" else 1.0])
        data = bytearray(b"".join(struct.pack(code, value * scale) for value in values))
        for entry in (header[name] for name in names):
            entry["dtype"] = name
            entry["data_offsets"] = [offset // 4 * size for offset in entry["data_offsets"]]
    elif way == "shape":
        entry = header[dice.choice(names)]
        entry["shape"] = dice.choice([entry["shape"][::-1], [*entry["shape"], 1], [2**40, 0], []])
    elif way == "name":
        header[dice.choice(["", "theta", "../x"])] = header.pop(dice.choice(names))
    claimed = dice.choice([0, 2**62, len(json.dumps(header)) + 1]) if way == "length" else None
    return joined(header, bytes(data), claimed)


COUNT = int(os.environ.get("GFSA_FUZZ", "1000"))
MOST_BYTES = 200 * 10**6
MOST_SECONDS = 1.0

SAVED: dict[str, Callable[[int], gfsa.GraphFilter]] = {
    "gfsa": lambda heads: gfsa.GFSA(heads, w0=0.25, wK=[0.1, 0.2, 0.3, 0.4]),
    "exact": lambda heads: gfsa.GFSA(heads, K=4, power="exact", learn=("wK",), w0=[1.0, 2, 3, 4]),
    "polynomial": lambda heads: gfsa.Polynomial(heads, degree=3, lr_multiplier=2.0),
    "pagerank": lambda heads: gfsa.PageRank(heads, alpha=0.2, hops=3),
    "pruned": lambda heads: PartialPolynomial(heads, 2, [0, 2]),
}


def build() -> nn.Module:
    return TinyEncoder(depth=2, dim=8, heads=4)


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    """What earlier tests left would make room, were it collected within the limit."""
    gc.collect()


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Inside, an allocation beyond the limit fails instead of being served."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def try_to_load(model: nn.Module, folder: Path) -> bool:
    """Whether the folder loads; if not, with a documented error and the model as it was."""
    before = state_of(model)
    message = None
    start = time.process_time()
    try:
        with limited_memory():
            gfsa.load(model, folder)
    except ValueError as error:
        message = str(error)
    assert time.process_time() - start < MOST_SECONDS
    if message is not None:
        assert 0 < len(message) < 3000
        assert state_of(model) == before
    return message is None


def check_exact(model: nn.Module, file: bytes) -> None:
    """The model's filters are what the file says, to the bit."""
    content = json.loads(parts_of(file)[0]["__metadata__"]["gfsa"])
    numbers = safetensors.torch.load(file)
    filters = gfsa.filters_of(model)
    assert filters.keys() == content["filters"].keys()
    for name, entry in content["filters"].items():
        filter = filters[name]
        assert type(filter) is KINDS[entry["kind"]]
        assert filter.config() == KINDS[entry["kind"]](**entry["arguments"]).config()
        assert filter.dropout_after == entry.get("dropout_after", "attention")
        assert filter.coefficients().isfinite().all()
        own = {key: value for key, value in filter.state_dict().items() if key != "_extra_state"}
        for key, value in own.items():
            assert torch.equal(value, numbers.pop(f"{name}.{key}").to(value.dtype))
    assert not numbers


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The file of a save of each kind."""
    found = []
    for kind, factory in SAVED.items():
        folder = tmp_path_factory.mktemp(kind)
        model = build()
        gfsa.plug(model, filter=factory)
        gfsa.save(model, folder)
        found.append((folder / FILE).read_bytes())
    return found


def test_refused_or_exact(saves: list[bytes], tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(COUNT):
        file = corrupted(saves[number % len(saves)], number)
        (tmp_path / FILE).write_bytes(file)
        model = build()
        if number % 3 == 0:
            # a model that is plugged already, with other numbers
            gfsa.plug(model, filter=SAVED[list(SAVED)[number % len(saves)]])
            with torch.no_grad():
                for filter in gfsa.filters_of(model).values():
                    for parameter in filter.parameters():
                        parameter.add_(1.0)
        try:
            if not try_to_load(model, tmp_path):
                outcomes["refused"] += 1
                continue
            check_exact(model, file)
            outcomes["what it says"] += 1
        except BaseException as error:
            raise AssertionError(f"file {number}: {error!r:.500}") from error
    assert outcomes.total() == COUNT
    # the files are worth trying only if some get past all checks
    assert outcomes["refused"] > 0.6 * COUNT
    assert outcomes["what it says"] > 0.01 * COUNT
