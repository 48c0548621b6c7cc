"""Corrupted filter files by number: what a bad disk, a bad program or an attacker could write."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

Json = Any

EVIL: list[Json] = [
    *(None, True, False, 0, -1, 1, 2, 3, 4, 5, 300, 999, 1000, 1001, 65536, 2**31, 2**63, 10**400),
    *(0.5, 1.5, -0.0, 1e-300, 1e-45, 3e38, 1e39, 1e300, float("inf"), float("nan")),
    *("", "GFSA", "exact", "junk", "../../etc/passwd", "__class__", "\ud800", "x" * 20_000),
    *([], [[]], [0], [0, 1, 2, 3], [0] * 5000, list(range(5000)), [None], [1e300] * 4, [[1.0] * 4]),
    *({}, {"a": 1}, {"num_heads": 4}),
]
KINDS = ["GFSA", "Polynomial", "PartialPolynomial", "PageRank", "Twicing", "Laplacian", "AttnScale"]
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
        parent["kind"] = dice.choice(KINDS)
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
