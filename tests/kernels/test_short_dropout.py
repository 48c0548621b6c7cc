"""Which entries the short kernels drop: compiled for Hopper, and what is compiled run on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from gfsa.kernels import routes  # noqa: E402
from support import ptx_on_cpu  # noqa: E402
from support.dropout import surviving  # noqa: E402

pytestmark = pytest.mark.skipif(
    routes.TRITON != routes.MEASURED_TRITON, reason="Gluon changes with Triton's version"
)

if routes.TRITON == routes.MEASURED_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from gfsa.kernels.short.backward import _kept
    from gfsa.kernels.short.tiles import drop, drop_threshold, product_layout, widened

    @gluon.jit
    def dropped(
        out, kept_out, seed_in, n, stream, dropout_p,
        ROWS: gl.constexpr, WIDTH: gl.constexpr, START: gl.constexpr, KEYS_FIRST: gl.constexpr,
        dt: gl.constexpr,
    ):  # fmt: skip
        """A chunk of the numbers 1, 2, … after dropout, and what is left of it for products."""
        LAYOUT: gl.constexpr = product_layout(gl.num_warps(), WIDTH)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        at = row * WIDTH + column
        p = drop(
            (at + 1).to(gl.float32), row, START // 2 + (column >> 1), n, gl.load(seed_in), stream,
            drop_threshold(dropout_p), dt, KEYS_FIRST, KEYS_FIRST,
        )  # fmt: skip
        gl.store(out + at, widened(p))
        gl.store(kept_out + at, widened(_kept(p, KEYS_FIRST)))

    @gluon.jit
    def threshold(out, dropout_p):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        at = gl.arange(0, 32, layout=LAYOUT)
        gl.store(out + at, at.to(gl.float32) * 0.0 + drop_threshold(dropout_p).to(gl.float32))


def run(
    rows: int, width: int, start: int, keys_first: bool, number: str, *call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk, and its products' operand, for ``call``: seed, length, stream and dropout_p."""
    seed, length, stream, dropout_p = call
    constants = {
        "ROWS": rows, "WIDTH": width, "START": start, "KEYS_FIRST": keys_first,
        "dt": gl.bfloat16 if number == "bf16" else gl.float16,
    }  # fmt: skip
    types = {
        **dict.fromkeys(["out", "kept_out"], "*fp32"), "seed_in": "*i64",
        "n": "i32", "stream": "i32", "dropout_p": "fp32",
    }  # fmt: skip
    names = dropped.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(dropped, signature, fixed, {})
    warps = rows // 16
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
    results = [np.full(rows * width, np.nan, np.float32) for _ in range(2)]
    arguments = [*results, np.array([seed], np.int64), length, stream, float(dropout_p)]
    ptx_on_cpu.run(compiled.asm["ptx"], arguments, 32 * warps)
    first, second = (torch.from_numpy(x).view(rows, width) for x in results)
    return first, second


@pytest.mark.parametrize(
    ("rows", "width", "start", "keys_first", "number"),
    [
        (256, 64, 192, False, "bf16"),
        (256, 64, 128, True, "bf16"),
        (64, 16, 32, True, "fp16"),
        (128, 128, 0, False, "fp16"),
    ],
)
@pytest.mark.parametrize(
    ("seed", "odd", "dropout_p"), [(2**31 + 12345, 0, 0.2), (7, 1, 0.5), (-3, 0, 0.99999)]
)
def test_drops_what_the_other_kernels_drop(
    rows: int, width: int, start: int, keys_first: bool, number: str,
    seed: int, odd: int, dropout_p: float,
) -> None:  # fmt: skip
    # fewer tokens than rows: entries beyond the last token are of no concern
    length, stream = max(rows, start + width) - odd, 5
    found, operand = run(rows, width, start, keys_first, number, seed, length, stream, dropout_p)
    exact = float(np.float32(dropout_p))
    stays = surviving(1, stream + 1, length, seed, exact)[0, stream]
    stays = (stays.T if keys_first else stays)[:rows, start : start + width]
    size = stays.shape
    numbers = torch.arange(1.0, 1 + rows * width).view(rows, width)
    numbers = numbers.to(torch.bfloat16 if number == "bf16" else torch.float16).float()
    numbers, found, operand = (x[: size[0], : size[1]] for x in (numbers, found, operand))
    zeros = torch.zeros_like(numbers)
    assert 0.4 < stays.float().mean() / (1 - exact) < 1.6 or exact > 0.9
    assert torch.equal(found, torch.where(stays, numbers, -numbers if keys_first else zeros))
    assert torch.equal(operand, torch.where(stays, numbers, zeros))


@pytest.mark.parametrize("share", [0.0, 1.0, 0.5, 0.50001, 13107.2, 13107.5, 65535.4, 65535.9])
def test_threshold(share: float) -> None:
    """The number of 16-bit draws that drop an entry, at and beside their halves."""
    dropout_p = np.float32(share / 65536)
    drawn = np.arange(65536, dtype=np.float32)
    expected = int((drawn + np.float32(0.5) < dropout_p * np.float32(65536)).sum())
    source = GluonASTSource(threshold, {"out": "*fp32", "dropout_p": "fp32"}, {}, {})
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 1})
    found = np.full(32, np.nan, np.float32)
    ptx_on_cpu.run(compiled.asm["ptx"], [found, float(dropout_p)], 32)
    assert found.tolist() == [expected] * 32
