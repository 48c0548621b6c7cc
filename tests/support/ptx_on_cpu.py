"""What compiled code computes, on a CPU: PTX without branches, all threads of a program at once.

For code in which a thread's registers, its place in a tile and exchanges between lanes matter,
which Triton's interpreter does not model. Registers are bits; an unknown instruction raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Bits = np.ndarray
_LANES = 32
_SELECTORS = {0x5410: (0, 1, 4, 5), 0x7632: (2, 3, 6, 7)}


def run(ptx: str, arguments: list[Any], threads: int) -> None:
    """Run the one kernel of ``ptx``; arrays among ``arguments`` are memory that it may change."""
    Program(arguments, threads).run(ptx)


class Program:
    def __init__(self, arguments: list[Any], threads: int) -> None:
        self.threads = np.arange(threads)
        self.registers: dict[str, Bits] = {}
        self.memory = [x for x in arguments if isinstance(x, np.ndarray)]
        # an address is the number of an array, in the upper bits, and an offset in bytes
        places = iter(range(1, 1 + len(self.memory)))
        self.parameters = [
            next(places) << 40 if isinstance(x, np.ndarray) else bits_of(x) for x in arguments
        ]

    def run(self, ptx: str) -> None:
        body = ptx[ptx.index(".visible .entry") :]
        body = body[body.index("{") + 1 :]
        for line in re.sub(r"//.*", "", body).replace(";", ";\n").splitlines():
            line = line.strip().rstrip(";").lstrip("{ ")
            if line.startswith("ret"):
                return
            if not line or line.startswith((".", "$")) or line == "}":
                continue
            operation, _, rest = line.partition(" " if " " in line else "\t")
            operation, _, more = operation.partition("\t")
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", f"{more} {rest}")
            self.step(operation, operands)
        raise AssertionError("the kernel does not return")

    def step(self, operation: str, operands: list[str]) -> None:
        kind, *types = operation.split(".")
        target, *sources = operands
        if kind == "ld" and types[0] == "param":
            (number,) = re.findall(r"_param_(\d+)", sources[0])
            value = self.parameters[int(number)]
            self.write(target, np.full(self.threads.shape, value, np.uint64))
        elif kind == "ld":
            array, offset = self.place(sources[0])
            self.write(target, array.view(np.uint64)[offset // 8])
        elif kind == "st":
            array, offset = self.place(target)
            for step, name in enumerate(re.findall(r"%\w+", sources[0])):
                array.view(np.uint32)[offset // 4 + step] = self.read(name)
        elif kind == "shfl":
            assert types == ["sync", "bfly", "b32"]
            assert sources[2:] == ["0x1f", "0xffffffff"]
            self.write(target, self.read(sources[0])[self.threads ^ int(sources[1])])
        else:
            values = [self.read(name) for name in sources]
            self.write(target, computed(kind, types, values))

    def place(self, text: str) -> tuple[np.ndarray, Bits]:
        name, _, more = text.strip("[] ").partition("+")
        address = self.read(name.strip()) + np.uint64(int(more or 0))
        (number,) = set((address >> np.uint64(40)).tolist())
        return self.memory[number - 1], (address & np.uint64(2**40 - 1)).astype(np.int64)

    def read(self, text: str) -> Bits:
        if text == "%tid.x":
            return self.threads.astype(np.uint64)
        if text.startswith("{"):
            low, high = (self.read(name) for name in re.findall(r"%?\w+", text))
            return low | high << np.uint64(16)
        if text in self.registers:
            return self.registers[text]
        value = int(text[2:], 16) if text.startswith("0f") else int(text, 0) % 2**64
        return np.full(self.threads.shape, value, np.uint64)

    def write(self, text: str, value: Bits) -> None:
        names = re.findall(r"%?\w+", text)
        if len(names) == 2:
            self.registers[names[0]] = value & np.uint64(0xFFFF)
            self.registers[names[1]] = value >> np.uint64(16)
        else:
            self.registers[names[0]] = value


def bits_of(value: Any) -> int:
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)


def computed(kind: str, types: list[str], x: list[Bits]) -> Bits:
    """The result of one instruction on whole registers."""
    wide = types[-1] in ("s64", "u64", "b64") or "wide" in types
    if types[-1] == "f32" and kind in ("mul", "fma", "neg", "setp", "selp", "mov"):
        return _of_floats(kind, types, x)
    if kind == "cvt":
        return _converted(types, x)
    if kind == "setp":
        compare: Callable[[Bits, Bits], Bits] = {"ge": np.greater_equal, "ne": np.not_equal}[
            types[0]
        ]
        return compare(_word(x[0]), _word(x[1]))
    if kind == "max":
        halves = [_halves(value, types[0]) for value in (x[0], x[1])]
        return _joined([np.maximum(a, b) for a, b in zip(*halves, strict=True)], types[0])
    operations: dict[str, Callable[[], Bits]] = {
        "mov": lambda: x[0],
        "and": lambda: x[0] & x[1],
        "or": lambda: x[0] | x[1],
        "xor": lambda: x[0] ^ x[1],
        "add": lambda: x[0] + x[1],
        "sub": lambda: x[0] - x[1],
        "shl": lambda: x[0] << x[1],
        "shr": lambda: _shifted(x[0], x[1], types[0]),
        "bfe": lambda: x[0] >> x[1] & (np.uint64(1) << x[2]) - np.uint64(1),
        "mul": lambda: x[0] * x[1] >> np.uint64(32 if "hi" in types else 0),
        "mad": lambda: x[0] * x[1] + x[2],
        "lop3": lambda: _parity(x),
        "prmt": lambda: _permuted(x),
        "selp": lambda: np.where(x[2], x[0], x[1]),
    }
    result = operations[kind]()
    return result if wide else _word(result)


def _word(x: Bits) -> Bits:
    return x & np.uint64(0xFFFFFFFF)


def _floats(x: Bits) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def _of_floats(kind: str, types: list[str], x: list[Bits]) -> Bits:
    if kind == "selp":
        return np.where(x[2], x[0], x[1])
    if kind == "mov":
        return x[0]
    y = [_floats(value).astype(np.float64) for value in x]
    if kind == "setp":
        assert types[0] == "gt"
        return y[0] > y[1]
    # one rounding at the end: a product of two such numbers is exact before it
    result = -y[0] if kind == "neg" else y[0] * y[1] + (y[2] if kind == "fma" else 0.0)
    return result.astype(np.float32).view(np.uint32).astype(np.uint64)


def _converted(types: list[str], x: list[Bits]) -> Bits:
    to, of = types[-2:]
    if to in ("bf16x2", "f16x2"):
        return _joined([_floats(x[1]), _floats(x[0])], to)
    if (to, of) == ("u32", "u64"):
        return _word(x[0])
    if (to, of) == ("s32", "f32"):
        return _word(_floats(x[0]).astype(np.int64).astype(np.uint64))
    if (to, of) in (("f32", "s32"), ("f32", "u32")):
        number = x[0].astype(np.uint32).view(np.int32).astype(np.float32)
        return number.view(np.uint32).astype(np.uint64)
    assert to == "f32"
    number = _halves(x[0], f"{of}x2")[0].astype(np.float32)
    return number.view(np.uint32).astype(np.uint64)


def _halves(x: Bits, kind: str) -> list[np.ndarray]:
    """The two 16-bit numbers of a register, as float32."""
    parts = [x & np.uint64(0xFFFF), _word(x) >> np.uint64(16)]
    if kind == "bf16x2":
        return [_floats(part << np.uint64(16)) for part in parts]
    return [part.astype(np.uint16).view(np.float16).astype(np.float32) for part in parts]


def _joined(numbers: list[np.ndarray], kind: str) -> Bits:
    """Two float32 numbers rounded to 16 bits, in one register."""
    parts = []
    for number in numbers:
        if kind == "bf16x2":
            bits = number.view(np.uint32).astype(np.uint64)
            # to the nearest, and to even between two
            bits += np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))
            parts.append(bits >> np.uint64(16) & np.uint64(0xFFFF))
        else:
            parts.append(number.astype(np.float16).view(np.uint16).astype(np.uint64))
    return parts[0] | parts[1] << np.uint64(16)


def _shifted(x: Bits, by: Bits, kind: str) -> Bits:
    if kind == "s32":
        signed = x.astype(np.uint32).view(np.int32) >> by.astype(np.int32)
        return signed.view(np.uint32).astype(np.uint64)
    return _word(x) >> by


def _parity(x: list[Bits]) -> Bits:
    (table,) = set(x[3].tolist())
    assert table == 0x96
    return x[0] ^ x[1] ^ x[2]


def _permuted(x: list[Bits]) -> Bits:
    (selector,) = set(x[2].tolist())
    result = np.zeros_like(x[0])
    for place, byte in enumerate(_SELECTORS[selector]):
        some = x[byte // 4] >> np.uint64(8 * (byte % 4)) & np.uint64(0xFF)
        result |= some << np.uint64(8 * place)
    return result
