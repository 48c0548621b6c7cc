"""Operands of products that stay in registers for a whole loop: in PTX, and as assembled.

ptxas 12.8 and 13.0 may give such an operand's registers to another value within the loop, so that
products are right in the first step only. No error and no warning tells; the instructions do.
"""

from __future__ import annotations

import re

_PTX_PRODUCT = re.compile(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*\{([^}]*)\}")
_PTX_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_PTX_RESULT = re.compile(r"^\s*(?:@!?%p\d+\s+)?[\w.:]+\s+(\{[^}]*\}|%\w+)")
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.M)
_SASS_PRODUCT = re.compile(r"^HGMMA\.\d+x(\d+)\S*\s+R(\d+),\s*(?:R(\d+),)?")
_SASS_BRANCH = re.compile(r"^BRA\S*\s.*?0x([0-9a-f]+)")
_SASS_RESULT = re.compile(r"^(\S+)\s+(?:!?U?P[T\d]+,\s*)*R(\d+)\b")
# their first register is read
_SASS_STORES = ("ST", "RED", "SYNCS", "UTMA", "BAR", "BRA", "WARPGROUP", "R2UR")


def kept_in_ptx(ptx: str) -> int:
    """How many products of a loop have a left operand that the loop does not change."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$")}
    branches = [(at, _PTX_BRANCH.search(line)) for at, line in enumerate(lines)]
    loops = [(labels[to[1]], at) for at, to in branches if to and labels.get(to[1], at) < at]
    results: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        if result := _PTX_RESULT.match(line):
            for register in re.findall(r"%\w+", result[1]):
                results.setdefault(register, []).append(at)
    kept = 0
    for at, line in enumerate(lines):
        product = _PTX_PRODUCT.search(line)
        around = [loop for loop in loops if loop[0] <= at <= loop[1]]
        if product is None or not around:
            continue
        first, last = min(around, key=lambda loop: loop[1] - loop[0])
        registers = re.findall(r"%\w+", product[1])
        kept += not any(first <= x <= last for each in registers for x in results.get(each, []))
    return kept


def kept_in_sass(sass: str) -> int:
    """The same of what was assembled."""
    code = [(int(at, 16), re.sub(r"^@!?U?P\w+\s+", "", text)) for at, text in _SASS.findall(sass)]
    # waits that fail go on behind the end, and come back from there
    end = max((at for at, text in code if text.startswith("EXIT")), default=0)
    branches = [(at, _SASS_BRANCH.match(text)) for at, text in code if at < end]
    loops = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) < at]
    kept = 0
    for at, text in code:
        product = _SASS_PRODUCT.match(text)
        around = [loop for loop in loops if loop[0] <= at <= loop[1]]
        if product is None or product[3] is None or not around:
            continue
        first, last = min(around, key=lambda loop: loop[1] - loop[0])
        operand = set(range(int(product[3]), int(product[3]) + 4))
        kept += not any(operand & _written(each) for x, each in code if first <= x <= last)
    return kept


def _written(text: str) -> set[int]:
    """The registers that an instruction writes."""
    if product := _SASS_PRODUCT.match(text):
        return set(range(int(product[2]), int(product[2]) + int(product[1]) // 2))
    result = _SASS_RESULT.match(text)
    if result is None or text.startswith(_SASS_STORES):
        return set()
    name, first = result[1], int(result[2])
    count = (
        4 if ".128" in name or "M88.4" in name else 2 if re.search(r"\.64|WIDE|M88\.2", name) else 1
    )
    return set(range(first, first + count))
