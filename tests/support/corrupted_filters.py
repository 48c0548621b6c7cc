"""Corrupted filter folders by number: what a bad disk, a bad program or an attacker could write."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any

DIGEST = "sha256"
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


def corrupted(description: bytes, tensors: bytes, number: int) -> tuple[bytes, bytes]:
    """The two files with the corruption of this number, the same at every call."""
    dice = random.Random(number)
    kind = dice.random()
    if kind < 0.25:
        return damaged(description, dice), tensors
    if kind < 0.4:
        return description, damaged(tensors, dice)
    content = json.loads(description)
    if kind < 0.75:
        for _ in range(dice.randint(1, 3)):
            content = edited(content, dice)
    else:
        tensors = edited_tensors(tensors, dice)
    if isinstance(content, dict):
        # an attacker writes a right digest, or none; what another program changes keeps the old one
        signing = dice.choice(["right", "right", "none", "none", "old"])
        if signing != "old":
            content.pop(DIGEST, None)
        if signing == "right":
            content[DIGEST] = digest(content, tensors)
    return json.dumps(content).encode(), tensors


def digest(content: Json, tensors: bytes) -> str:
    unsigned = {key: value for key, value in content.items() if key != DIGEST}
    text = json.dumps(unsigned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + tensors).hexdigest()


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


def edited_tensors(tensors: bytes, dice: random.Random) -> bytes:
    """A safetensors file with another header, or other numbers."""
    (length,) = struct.unpack("<Q", tensors[:8])
    header, data = json.loads(tensors[8 : 8 + length]), bytearray(tensors[8 + length :])
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
    text = json.dumps(header).encode()
    claimed = dice.choice([0, 2**62, len(text) + 1]) if way == "length" else len(text)
    return struct.pack("<Q", claimed) + text + bytes(data)
