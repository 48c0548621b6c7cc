"""Every fused kernel compiles, GPU or not; ``pytest -s`` shows what it takes.

For Hopper, and those that need none of its features for Ampere, Ada and Blackwell too.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gfsa.kernels import (  # noqa: E402
    coefficients,
    decode,
    degree_one,
    hopper,
    launching,
    one_pass,
    routes,
    short,
    sweep,
    two_pass,
)

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS = {
    "attend": two_pass.attend,
    "combine": two_pass.combine,
    "grad_first_pass": two_pass.grad_first_pass,
    "grad_keys": two_pass.grad_keys,
    "grad_queries": two_pass.grad_queries,
}
# what Triton calls the types of arguments that are no tiles
TYPES = {
    **dict.fromkeys(["lse_in", "lse_out", "delta_in", "delta_out", "dc_out"], "*fp32"),
    **dict.fromkeys(["coeffs", "sums"], "*fp32"),
    **dict.fromkeys(["scale", "dropout_p"], "fp32"),
    "mask": "*u8",
    "seed_in": "*i64",
    "zero": "*i32",
}


GLUON = pytest.mark.skipif(
    routes.TRITON != routes.MEASURED_TRITON, reason="Gluon changes with Triton's version"
)


def tile_type(block: tuple[int, ...] | list[int], number: str = "bf16") -> str:
    """A tile of tokens, or of numbers in float32, as Gluon kernels take it."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits = 32 if number == "fp32" else 16
    layout = NVMMASharedLayout(128 if bits == 16 else 0, bits, 4)
    return f"tensordesc<{number}{list(block)},{layout!r}>"


def tile_types(kernel: Any, tiles: Any, width: int, number: str = "bf16") -> dict[str, Any]:
    """The tiles of a gradient's kernel, whose arguments' names end in the side they are on."""
    blocks = {name: hopper.block_of(name, tiles, width) for name in kernel.arg_names}
    return {
        name: tile_type(block, "fp32" if block[2] == 1 else number)
        for name, block in blocks.items()
        if block is not None
    }


def compile_for(
    target: GPUTarget,
    source: Any,
    kernel: Any,
    tiles: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
    **options: Any,
) -> tuple[Any, str]:
    """What is compiled, and the assembler's line on registers, stack and shared memory."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else tiles.get(name, TYPES.get(name, "i32"))
        for name in names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {}
    for index, name in enumerate(names):
        # the address is the first part of a tuple
        if isinstance(signature[name], tuple):
            attributes[index, 0] = aligned
        elif signature[name].startswith("*"):
            attributes[index,] = aligned
    fixed = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        source(kernel, signature, fixed, attributes), target, {"num_warps": warps, **options}
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = re.search(r"REG:\d+ STACK:\d+", usage)[0]
    return compiled, f"{taken} shared {compiled.metadata.shared}"


def compile_for_hopper(
    source: Any, kernel: Any, tiles: dict[str, Any], constants: dict[str, Any], warps: int
) -> str:
    return compile_for(HOPPER, source, kernel, tiles, constants, warps)[1]


def address(number: str = "bf16") -> tuple[str, ...]:
    """What stands in for a descriptor on GPUs without a copy engine."""
    return f"*{number}", "i32", "i32", "i32", "i32", "i32"


@pytest.mark.parametrize("spans", [False, True], ids=["", "spans"])
@pytest.mark.parametrize("name", KERNELS)
def test_passes(name: str, spans: bool) -> None:
    """The kernels of any length take no more registers than there are."""
    tiles = two_pass.tiles(name, 64, 1024, spans, False, spans)
    kernel = KERNELS[name]
    sides = {"_rows": tiles.rows, "_cols": tiles.cols}
    described = {
        argument: f"tensordesc<bf16[1, 1, {sides[argument[-5:]]}, 64]>"
        for argument in kernel.arg_names
        if argument[-5:] in sides
    }
    constants = {
        "D": 64, "BM": tiles.rows, "BN": tiles.cols, "STAGES": tiles.stages, "CAUSAL": spans,
        "MASK": launching.SPANS if spans else launching.NO_MASK, "DROPOUT": False, "group": 1,
    }  # fmt: skip
    if spans:
        described["mask"] = "*i32"
    usage = compile_for_hopper(ASTSource, kernel, described, constants, tiles.warps)
    print(name, usage)
    assert "STACK:0 " in usage


# KiB of shared memory that a program may take, by compute capability
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}

# bytes that a thread of degree 2 spills at most, by compute capability and head dim: all that
# routes lets through, but Hopper, whose own kernels are below
MOST_STACK = {
    (80, 64): 64, (86, 64): 64, (89, 64): 64, (100, 64): 40, (103, 64): 40, (120, 64): 160,
    (80, 128): 640, (100, 128): 32, (103, 128): 32,
}  # fmt: skip
QUICK_PASSES = ((80, 64), (86, 64), (89, 64), (100, 64), (100, 128))


def variants() -> list[Any]:
    """Every kernel under a causal mask, and the tall tiles of one without it."""
    found = []
    for capability, dim in MOST_STACK:
        for name, causal in [*((name, True) for name in KERNELS), ("grad_first_pass", False)]:
            # before Hopper tall tiles spill hundreds of bytes
            if not causal and capability < 90:
                continue
            marks = () if (capability, dim) in QUICK_PASSES else pytest.mark.slow
            found.append(pytest.param(name, capability, dim, causal, marks=marks))
    return found


@pytest.mark.parametrize(("name", "capability", "dim", "causal"), variants())
def test_passes_on_other_gpus(name: str, capability: int, dim: int, causal: bool) -> None:
    """Loads run ahead there as well, there is room for them, and little spills."""
    tiles = two_pass.tiles(name, dim, 1024, causal, False)
    kernel = KERNELS[name]
    sides = {"_rows": tiles.rows, "_cols": tiles.cols}
    described: dict[str, Any] = {
        argument: f"tensordesc<bf16[1, 1, {sides[argument[-5:]]}, {dim}]>"
        if capability >= 90
        else address()
        for argument in kernel.arg_names
        if argument[-5:] in sides
    }
    constants = {
        "D": dim, "BM": tiles.rows, "BN": tiles.cols, "STAGES": tiles.stages, "CAUSAL": causal,
        "MASK": 0, "DROPOUT": False, "group": 1,
    }  # fmt: skip
    target = GPUTarget("cuda", capability, 32)
    compiled, usage = compile_for(target, ASTSource, kernel, described, constants, tiles.warps)
    print(name, capability, dim, usage)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= MOST_STACK[capability, dim]
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    ahead = "cp.async.bulk.tensor" if capability >= 90 else "cp.async.cg.shared.global"
    assert ahead in compiled.asm["ptx"]


@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
def test_degree_one_in_one_pass(exclusive: bool) -> None:
    kernel = one_pass.attend_once
    tiles = one_pass.tiles(1024, True)
    described: dict[str, Any] = dict.fromkeys(["q_in", "v_in"], "*bf16")
    described["zero"] = "i32"
    for argument in kernel.arg_names:
        rows = {"_rows": tiles.rows, "_cols": tiles.cols}.get(argument[-5:])
        if rows is not None:
            described[argument] = f"tensordesc<bf16[1, 1, {rows}, 64]>"
    constants = {
        "UNITS": 8, "D": 64, "BM": tiles.rows, "BN": tiles.cols, "STAGES": tiles.stages,
        "POWERS": 2, "CAUSAL": True, "KEEPS": exclusive, "EXCLUSIVE": exclusive, "group": 1,
    }  # fmt: skip
    compiled, usage = compile_for(HOPPER, ASTSource, kernel, described, constants, tiles.warps)
    print(usage)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) == 0
    assert compiled.metadata.shared <= SHARED[90] * 1024
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 89])
def test_around_attention_on_older_gpus(capability: int) -> None:
    kernel = degree_one.combine_around
    described = {name: address() for name in kernel.arg_names if name.endswith("_rows")}
    constants = {
        "BM": degree_one.ROWS, "D": 128, "POWERS": 3, "GROUP": 4, "EXCLUSIVE": True,
    }  # fmt: skip
    target = GPUTarget("cuda", capability, 32)
    compiled, usage = compile_for(target, ASTSource, kernel, described, constants, 4)
    print(capability, usage)
    assert "STACK:0 " in usage
    # eight numbers at a time
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
@pytest.mark.parametrize(
    ("degree", "dim", "number", "registers", "stack"),
    [
        # six programs of 128 threads have room on a processor, or two of 256
        (1, 64, "bf16", 80, 0),
        (1, 128, "bf16", 128, 0),
        # two registers on the stack, so that there is room for two
        (1, 256, "fp32", 128, 8),
        # four programs of 128 threads, or two of 256
        (2, 64, "bf16", 128, 0),
        (2, 128, "bf16", 128, 0),
        (2, 256, "fp32", 255, 0),
    ],
)
def test_a_decoded_token(
    degree: int, dim: int, number: str, registers: int, stack: int, exclusive: bool
) -> None:
    """A program keeps its sums in registers, and works while the next keys are on their way."""
    types = {
        **dict.fromkeys(["q_in", "k_in", "v_in", "u_rows", "y_out"], f"*{number}"),
        **dict.fromkeys(["theta", "base", "basis", "sums"], "*fp32"),
        "length": "*i64",
        "arrived": "*i32",
    }
    tile = decode.tile_of(dim)
    constants = {
        "D": dim, "WIDTH": dim, "BN": tile.keys, "LEARNED": degree + 1, "BY_HEAD": False,
        "MASK": True, "ON_DEVICE": True, "SPLITS": 16, "STAGES": tile.stages, "DEGREE": degree,
        "EXCLUSIVE": exclusive,
    }  # fmt: skip
    kernel = decode.decode_token
    compiled, usage = compile_for(HOPPER, ASTSource, kernel, types, constants, tile.warps)
    print(dim, degree, usage)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= stack
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= registers
    # also on GPUs with 99 KiB
    assert compiled.metadata.shared <= 99 * 1024
    # loads of the next keys, values and with degree 2 of U that the loop does not wait for
    assert tile.stages == 3
    assert re.search(rf"cp\.async\.wait_group\s+{degree + 1};", compiled.asm["ptx"])
    # with degree 1 nothing of U: neither its address nor its strides are used
    u = [f"_param_{kernel.arg_names.index(name)}]" for name in ("u_rows", "u_b", "u_h", "u_n")]
    assert [name in compiled.asm["ptx"] for name in u] == [degree == 2] * 4
    # what all threads have written is there for the program that counts last
    written = compiled.asm["ptx"].partition("atom.global.gpu.acq_rel.add")[0].splitlines()
    barrier = max(i for i, line in enumerate(written) if "bar.sync" in line)
    assert barrier > max(i for i, line in enumerate(written) if "st.global" in line)


@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
@pytest.mark.parametrize("dim", [128, 256])
def test_steps_around_attention(dim: int, exclusive: bool) -> None:
    shape, device = torch.Size((1, 4, 1024, dim)), torch.device("meta")
    for name, (kernel, tensors) in degree_one._KERNELS.items():
        launch = degree_one._launch(name, shape, 1, 3, torch.bfloat16, device, exclusive)
        names = kernel.function.arg_names
        described = {
            argument: f"tensordesc<bf16{list(launch.blocks[0])}>"
            for argument in names
            if argument.endswith("_rows")
        }
        assert len(described) == tensors
        constants = dict(zip(names[-len(launch.constants) :], launch.constants, strict=True))
        usage = compile_for_hopper(ASTSource, kernel.function, described, constants, 4)
        print(name, usage)
        assert "STACK:0 " in usage


@pytest.mark.parametrize("name", ["fold", "unfold", "add_parts"])
def test_coefficients(name: str) -> None:
    kernel = getattr(coefficients, name)
    constants = {"L": 2, "LANES": 16, "ROWS": 16, "BLOCK": 4096, "POWERS": 2, "GIVEN": 3}
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    numbers = ["theta", "base", "basis", "dc", "dtheta", "parts_in", "total_out"]
    pointers = dict.fromkeys(numbers, "*fp32")
    usage = compile_for_hopper(ASTSource, kernel, pointers, constants, 8)
    print(name, usage)
    assert "STACK:0 " in usage


@GLUON
@pytest.mark.parametrize(
    ("length", "mask", "dropout", "most_stack"),
    [
        (128, 0, False, (0, 0)),
        pytest.param(128, 2, False, (0, 0), marks=pytest.mark.slow),
        pytest.param(128, 0, True, (0, 0), marks=pytest.mark.slow),
        pytest.param(197, 0, False, (32, 128), marks=pytest.mark.slow),
        (197, 2, False, (512, 160)),
        pytest.param(256, 0, False, (200, 256), marks=pytest.mark.slow),
        # before numbers that lie two in a register were kept so: 688 and 1584
        (256, 0, True, (224, 480)),
    ],
)
def test_short(length: int, mask: int, dropout: bool, most_stack: tuple[int, int]) -> None:
    """The whole filter of one head in one program, forward and backward."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gfsa.kernels.gluon_short import filter_short, grad_short

    options = {"CAUSAL": length == 256, "MASK": mask, "DROPOUT": dropout, "group": 1}
    even = {"MERGED": length > 128, "EVEN": length == 256}
    for kernel, width, more, most in (
        (filter_short, 64, {"WHOLE": length <= 208}, most_stack[0]),
        (grad_short, 128 if length == 128 else 64, even, most_stack[1]),
    ):
        cut = short.chunks(length, width)
        types = {
            argument: tile_type((1, 1, cut.rows, 64))
            for argument in kernel.arg_names
            if argument.endswith(("_in", "_out")) and argument not in TYPES
        }
        sizes = dict(zip(("N", "D", "BN", "FULL", "TAIL"), cut.constants, strict=True))
        usage = compile_for_hopper(
            GluonASTSource, kernel, types, {**sizes, **options, **more}, cut.rows // 16
        )
        print(kernel.__name__, length, mask, dropout, usage)
        assert int(re.search(r"STACK:(\d+)", usage)[1]) <= most


def compile_sweep(degree: int, dim: int, mask: int, exclusive: bool) -> tuple[Any, str]:
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = launching.gluon_kernel("gluon_sweep", "filter_sweep").function
    keys = sweep.KEYS[degree, dim]
    types = dict.fromkeys(("q_in", "u_io", "out_io"), tile_type((1, 1, sweep.HALF, dim)))
    types |= dict.fromkeys(("k_in", "v_in"), tile_type((1, 1, sweep.COPIED[degree], dim)))
    types |= {"out": "*bf16", "u_out": "*bf16", "flags": "*i32", "mask": "*i32"}
    constants = {
        "D": dim, "TILE": keys, "STAGES": sweep.STAGES[degree], "MASK": mask, "group": 1,
        "DEGREE": degree, "POWERS": 3, "KEEPS": exclusive, "EXCLUSIVE": exclusive,
    }  # fmt: skip
    compiled, usage = compile_for(HOPPER, GluonASTSource, kernel, types, constants, 4)
    print(degree, dim, mask, exclusive, usage)
    return compiled, usage


@GLUON
@pytest.mark.parametrize(
    ("dim", "mask", "most_stack"),
    [
        (64, launching.NO_MASK, 0),
        (64, launching.SPANS, 0),
        pytest.param(128, launching.NO_MASK, 32, marks=pytest.mark.slow),
        pytest.param(128, launching.SPANS, 32, marks=pytest.mark.slow),
    ],
)
def test_one_causal_sweep(dim: int, mask: int, most_stack: int) -> None:
    """A program fits on a multiprocessor, and products run beside the softmax."""
    compiled, usage = compile_sweep(2, dim, mask, False)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= most_stack
    assert compiled.metadata.shared <= SHARED[90] * 1024
    # the next scores are waited for while two products are in flight, and the exponentials follow
    # before these are waited for
    sass = disassembled(compiled.asm["cubin"])
    wait = r"WARPGROUP\.DEPBAR"
    loops = re.findall(rf"{wait}\.LE gsb0, 0x2 ;(.*?){wait}", sass, re.DOTALL)
    assert len(loops) == 2
    assert all(loop.count("MUFU.EX2") == sweep.KEYS[2, dim] // 2 + 2 for loop in loops)
    # the assembler runs products one by one where it cannot prove that their registers are free:
    # it then waits once for each of them
    assert len(re.findall(wait, sass)) <= (16 if mask == launching.NO_MASK else 18)
    # two warpgroups, and the warps that load and store U
    assert releases(compiled.asm["ptx"]) == ["bar.sync", "bar.sync", *["bar.warp.sync"] * 2]


def test_plan_of_a_causal_sweep() -> None:
    constants = {
        "ROWS": sweep.ROWS, "HALF": sweep.HALF, "TILE": 2 * sweep.HALF,
        "LOOKED_AT": sweep.LOOKED_AT, "WINDOWS": sweep.WINDOWS, "FLAGS": sweep.FLAGS,
    }  # fmt: skip
    pointers = {"spans": "*i32", "flags": "*i32"}
    usage = compile_for_hopper(ASTSource, sweep.plan_blocks, pointers, constants, 8)
    print(usage)
    assert "STACK:0 " in usage


@GLUON
@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
@pytest.mark.parametrize(
    ("dim", "mask", "most_stack"),
    [
        pytest.param(64, launching.NO_MASK, 0, marks=pytest.mark.slow),
        (64, launching.SPANS, 0),
        pytest.param(128, launching.NO_MASK, 0, marks=pytest.mark.slow),
        pytest.param(128, launching.SPANS, 16, marks=pytest.mark.slow),
    ],
)
def test_degree_one_in_one_causal_sweep(
    dim: int, mask: int, most_stack: int, exclusive: bool
) -> None:
    """Nothing spills in a loop, and the softmax runs beside a product."""
    compiled, usage = compile_sweep(1, dim, mask, exclusive)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= most_stack
    assert compiled.metadata.shared <= SHARED[90] * 1024
    # the next scores are waited for while a product is in flight, and the exponentials follow
    # before that is waited for: in each warpgroup's loop, of which a last tile is not part
    sass = disassembled(compiled.asm["cubin"])
    wait = r"WARPGROUP\.DEPBAR"
    loops = re.findall(rf"{wait}\.LE gsb0, 0x1 ;(.*?){wait}", sass, re.DOTALL)
    assert len(loops) == 4
    beside = [loop for loop in loops if loop.count("MUFU.EX2") == sweep.KEYS[1, dim] // 2 + 2]
    assert len(beside) == 2
    assert not any(re.search(r"\b(LDL|STL)\b", loop) for loop in beside)
    # as above
    assert len(re.findall(wait, sass)) <= 14
    assert releases(compiled.asm["ptx"]) == ["bar.sync", "bar.sync"]


def releases(ptx: str) -> list[str]:
    """What keeps a partition's warps together before one thread gives an item's slot back.

    Without it a warp could read an item's number after the next one is written there.
    """
    from gfsa.kernels import gluon_sweep

    lines = inspect.getsourcelines(gluon_sweep.done_with.fn)
    within = range(lines[1], lines[1] + len(lines[0]))
    file = re.search(r'\.file\s+(\d+) "[^"]*gluon_sweep\.py"', ptx)[1]
    found, here, last = [], False, ""
    for line in ptx.splitlines():
        place = re.match(r"\s*\.loc\s+(\d+) (\d+)", line)
        if place:
            here = place[1] == file and int(place[2]) in within
        elif re.search(r"\bbar\.(warp\.)?sync\b|\bld\.shared\b|\bmbarrier\b", line):
            if here and "mbarrier.arrive" in line:
                found.append(last)
            last = re.search(r"bar\.warp\.sync|bar\.sync|ld\.shared|mbarrier", line)[0]
    return sorted(found)


def disassembled(cubin: bytes) -> str:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@GLUON
@pytest.mark.parametrize(
    ("width", "used", "mask", "causal"),
    [
        (64, 64, launching.NO_MASK, True),
        (64, 64, launching.SPANS, True),
        pytest.param(64, 64, launching.NO_MASK, False, marks=pytest.mark.slow),
        pytest.param(64, 64, launching.KEY_MASK, True, marks=pytest.mark.slow),
        pytest.param(128, 128, launching.NO_MASK, True, marks=pytest.mark.slow),
        pytest.param(128, 128, launching.NO_MASK, False, marks=pytest.mark.slow),
        pytest.param(128, 128, launching.SPANS, True, marks=pytest.mark.slow),
        pytest.param(128, 80, launching.KEY_MASK, True, marks=pytest.mark.slow),
        pytest.param(128, 96, launching.NO_MASK, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", hopper.TILES)
def test_backward_for_hopper(name: str, width: int, used: int, mask: int, causal: bool) -> None:
    """Nothing spills, and products run while something else is computed."""
    compiled, usage = compile_backward(name, width, used, mask, causal=causal)
    print(name, width, usage)
    assert "STACK:0 " in usage
    # three programs share a multiprocessor's 64 Ki registers where heads are narrow
    assert width == 128 or int(re.search(r"REG:(\d+)", usage)[1]) <= 168
    assert compiled.metadata.shared <= SHARED[90] * 1024
    assert "serialized" not in remarks(compiled.asm["ptx"])


@GLUON
@pytest.mark.parametrize(
    ("number", "causal", "most_stack"),
    [
        ("bf16", True, 144),
        pytest.param("fp16", True, 144, marks=pytest.mark.slow),
        pytest.param("bf16", False, 160, marks=pytest.mark.slow),
    ],
)
def test_backward_for_hopper_that_adds_up_dq(number: str, causal: bool, most_stack: int) -> None:
    """Little spills, and four numbers are added at a time."""
    given = ("grad_keys", 128, 128, launching.NO_MASK, number)
    compiled, usage = compile_backward(*given, with_queries=True, causal=causal)
    print(number, causal, usage)
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= most_stack
    assert compiled.metadata.shared <= SHARED[90] * 1024
    ptx = compiled.asm["ptx"]
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 8
    assert "serialized" not in remarks(ptx)


@GLUON
@pytest.mark.parametrize("with_queries", [False, True])
def test_launches_for_hopper_have_every_argument(with_queries: bool) -> None:
    """Tiles, then pointers, numbers and constants, in the order of the kernel's arguments."""
    q = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    call = launching.problem_of(q, q, None, launching.Options(0.1, True))
    launches = hopper._launches(call, with_queries)
    pointers = {"grad_first_pass": 4, "grad_keys": 3, "grad_queries": 4, "finish_queries": 1}
    for name, launch in launches.items():
        rest = launch.kernel.function.arg_names[len(launch.blocks) + pointers[name] :]
        named = dict(zip(rest, (*launch.numbers, *launch.constants), strict=True))
        assert (named["heads"], named["scale"], named["D"]) == (16, 0.1, 128)
        assert named["BN"] == launches["grad_keys"].blocks[0][2]
        assert named.get("n", 4096) == 4096
        assert named.get("WITH_QUERIES", with_queries) == with_queries


def compile_backward(
    name: str,
    width: int,
    used: int,
    mask: int,
    number: str = "bf16",
    with_queries: bool = False,
    causal: bool = True,
) -> tuple[Any, str]:
    from triton.experimental.gluon._runtime import GluonASTSource

    tiles = hopper.TILES[name][width]
    kernel = launching.gluon_kernel("gluon_hopper", name).function
    types = tile_types(kernel, tiles, width, number)
    constants = {
        "D": width, "BM": tiles.rows, "BN": tiles.cols, "CAUSAL": causal,
        "USED": used, "MASK": mask, "group": 1,
    }  # fmt: skip
    if name == "grad_keys":
        constants["WITH_QUERIES"] = with_queries
    if mask == launching.SPANS:
        types["mask"] = "*i32"
    most = hopper.REGISTERS.get((name, width, mask))
    options = {} if most is None else {"maxnreg": most}
    return compile_for(HOPPER, GluonASTSource, kernel, types, constants, tiles.warps, **options)


@GLUON
@pytest.mark.parametrize("mask", [launching.NO_MASK, launching.SPANS])
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
@pytest.mark.parametrize("name", one_pass.HOPPER_KERNELS)
def test_degree_one_for_hopper(name: str, exclusive: bool, dim: int, mask: int) -> None:
    """Nothing spills, narrow programs share a multiprocessor, and products run beside the rest."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gfsa.kernels import gluon_hopper as kernels

    tiles = one_pass.HOPPER_TILES
    kernel = getattr(kernels, name)
    types = tile_types(kernel, tiles, dim)
    constants = {
        "D": dim, "BM": tiles.rows, "BN": tiles.cols, "CAUSAL": True,
        "POWERS": 3, "MASK": mask, "EXCLUSIVE": exclusive, "group": 1,
    }  # fmt: skip
    types["mask"] = "*i32"
    compiled, usage = compile_for(HOPPER, GluonASTSource, kernel, types, constants, tiles.warps)
    print(name, mask, usage)
    assert "STACK:0 " in usage
    together = 3 if dim == 64 else 2
    registers = int(re.search(r"REG:(\d+)", usage)[1]) * tiles.warps * 32
    assert together * registers <= 64 * 1024
    assert together * compiled.metadata.shared <= SHARED[90] * 1024
    assert "serialized" not in remarks(compiled.asm["ptx"])


def remarks(ptx: str) -> str:
    """What the assembler has to say; it notes where it runs products one by one."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            tools / "ptxas",
            "-arch=sm_90a",
            "-v",
            source,
            "-o",
            Path(folder, "kernel.cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    # a remark on every kernel: without it the search above would find nothing in any case
    assert "registers" in done.stderr
    return done.stderr
