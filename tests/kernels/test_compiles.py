"""Every fused kernel compiles, GPU or not; ``pytest -s`` shows what it takes.

For Hopper, and those that need none of its features for Ampere, Ada and Blackwell too.
"""

from __future__ import annotations

import inspect
import itertools
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
    routes,
    short,
    sweep,
    two_pass,
)
from gfsa.kernels.launching import Launch, Options, Problem  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
# what Triton calls the types of arguments that are no tiles
TYPES = {
    **dict.fromkeys(["lse_in", "lse_out", "delta_in", "delta_out", "dc_out"], "*fp32"),
    **dict.fromkeys(["coeffs", "shares", "sums", "theta", "base", "basis"], "*fp32"),
    **dict.fromkeys(["dc", "dtheta", "parts_in", "total_out"], "*fp32"),
    **dict.fromkeys(["q_in", "v_in", "out", "u_out"], "*bf16"),
    **dict.fromkeys(["spans", "flags", "arrived"], "*i32"),
    **dict.fromkeys(["scale", "dropout_p"], "fp32"),
    "seed_in": "*i64",
    "zero": "*i32",
}

GLUON = pytest.mark.skipif(
    routes.TRITON != routes.MEASURED_TRITON, reason="Gluon changes with Triton's version"
)


@pytest.fixture(autouse=True)
def _multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (short, sweep):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def problem(
    dim: int = 64,
    length: int = 1024,
    causal: bool = True,
    mask: int = launching.NO_MASK,
    dropout: bool = False,
    exclusive: bool = False,
) -> Problem:
    options = Options(0.1, causal, 0.1 * dropout, exclusive)
    return Problem(2, 4, 4, length, dim, torch.bfloat16, None, options, (0, 0, 0, 0), mask)


def compiled_launch(
    launch: Launch, target: GPUTarget = HOPPER, number: str = "bf16"
) -> tuple[Any, str]:
    """What is compiled for a launch, and what :func:`compile_for` says of it."""
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = launch.kernel.function
    names = kernel.arg_names
    in_gluon = launch.kernel.describe is not launching.describe
    types: dict[str, Any] = {}
    for name, block in zip(names, launch.blocks, strict=False):
        if in_gluon:
            types[name] = tile_type(block, "fp32" if block[2] == 1 else number)
        else:
            tile = f"tensordesc<{number}{list(block)}>"
            types[name] = tile if target.arch >= 90 else address()
    constants = dict(zip(names[-len(launch.constants) :], launch.constants, strict=True))
    spans = constants.get("MASK") == launching.SPANS
    types["mask"] = "*i32" if spans or "DEGREE" in constants else "*u8"
    if "group" in names:
        constants["group"] = 1
    source = GluonASTSource if in_gluon else ASTSource
    return compile_for(target, source, kernel, types, constants, **launch.options)


def tile_type(block: tuple[int, ...], number: str) -> str:
    """A tile of tokens, or of numbers in float32, as Gluon kernels take it."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits = 32 if number == "fp32" else 16
    layout = NVMMASharedLayout(128 if bits == 16 else 0, bits, 4)
    return f"tensordesc<{number}{list(block)},{layout!r}>"


def compile_for(
    target: GPUTarget, source: Any, kernel: Any, types: Any, constants: Any, **options: Any
) -> tuple[Any, str]:
    """What is compiled, and the assembler's line on registers, stack and shared memory."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, TYPES.get(name, "i32"))
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
    compiled = triton.compile(source(kernel, signature, fixed, attributes), target, options)
    usage = by_tool("cuobjdump", "--dump-resource-usage", compiled.asm["cubin"])
    taken = f"{re.search(r'REG:[0-9]+ STACK:[0-9]+', usage)[0]} shared {compiled.metadata.shared}"
    print(kernel.fn.__name__, taken)
    return compiled, taken


def by_tool(tool: str, option: str, cubin: bytes) -> str:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_of(usage: str) -> int:
    return int(re.search(r"STACK:(\d+)", usage)[1])


def registers_of(usage: str) -> int:
    return int(re.search(r"REG:(\d+)", usage)[1])


def address(number: str = "bf16") -> tuple[str, ...]:
    """What stands in for a descriptor on GPUs without a copy engine."""
    return f"*{number}", "i32", "i32", "i32", "i32", "i32"


@pytest.mark.parametrize("spans", [False, True], ids=["", "spans"])
@pytest.mark.parametrize("name", two_pass._KERNELS)
def test_passes(name: str, spans: bool) -> None:
    """The kernels of any length take no more registers than there are."""
    call = problem(causal=spans, mask=launching.SPANS if spans else launching.NO_MASK)
    _, usage = compiled_launch(two_pass._launches(call)[name])
    assert stack_of(usage) == 0


# KiB of shared memory that a program may take, by compute capability
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}

# bytes that a thread of degree 2 spills at most, by compute capability and head dim: all that
# routes lets through, but head dims of Hopper that have kernels of their own, which are below
MOST_STACK = {
    (80, 64): 64, (86, 64): 64, (89, 64): 64, (100, 64): 40, (103, 64): 40, (120, 64): 160,
    (80, 128): 640, (100, 128): 32, (103, 128): 32, (90, 256): 288,
}  # fmt: skip
QUICK_PASSES = ((80, 64), (86, 64), (89, 64), (100, 64), (100, 128))


def variants() -> list[Any]:
    """Every kernel under a causal mask, and the tall tiles of one without it."""
    found = []
    for capability, dim in MOST_STACK:
        for name, causal in [
            *((name, True) for name in two_pass._KERNELS),
            ("grad_first_pass", False),
        ]:
            # before Hopper tall tiles spill hundreds of bytes
            if not causal and capability < 90:
                continue
            marks = () if (capability, dim) in QUICK_PASSES else pytest.mark.slow
            found.append(pytest.param(name, capability, dim, causal, marks=marks))
    return found


@pytest.mark.parametrize(("name", "capability", "dim", "causal"), variants())
def test_passes_on_other_gpus(name: str, capability: int, dim: int, causal: bool) -> None:
    """Loads run ahead there as well, there is room for them, and little spills."""
    target = GPUTarget("cuda", capability, 32)
    asked = problem(dim, causal=causal)
    if dim == 256:
        # what takes the most room
        asked = problem(dim, causal=causal, mask=launching.FULL_MASK, dropout=True)
    compiled, usage = compiled_launch(two_pass._launches(asked)[name], target)
    assert stack_of(usage) <= MOST_STACK[capability, dim]
    assert compiled.metadata.shared <= SHARED[capability] * 1024
    ahead = "cp.async.bulk.tensor" if capability >= 90 else "cp.async.cg.shared.global"
    assert ahead in compiled.asm["ptx"]


def launch_around(name: str, dim: int, exclusive: bool) -> Launch:
    shape, device = torch.Size((1, 4, 1024, dim)), torch.device("meta")
    return degree_one._launch(name, shape, 1, 2, torch.bfloat16, device, exclusive)


@pytest.mark.parametrize("capability", [80, 89])
def test_around_attention_on_older_gpus(capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    compiled, usage = compiled_launch(launch_around("combine_around", 128, True), target)
    assert stack_of(usage) == 0
    # eight numbers at a time
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("name", degree_one._KERNELS)
def test_steps_around_attention(name: str, dim: int, exclusive: bool) -> None:
    assert stack_of(compiled_launch(launch_around(name, dim, exclusive))[1]) == 0


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
    tokens = ["q_in", "k_in", "v_in", "u_rows", "y_out"]
    types = {**dict.fromkeys(tokens, f"*{number}"), "mask": "*u8", "length": "*i64"}
    keys, warps = decode.tile_of(dim)
    constants = {
        "D": dim, "WIDTH": dim, "BN": keys, "LEARNED": degree + 1, "BY_HEAD": False,
        "MASK": True, "ON_DEVICE": True, "SPLITS": 16, "STAGES": decode.STAGES, "DEGREE": degree,
        "EXCLUSIVE": exclusive,
    }  # fmt: skip
    kernel = decode.decode_token
    compiled, usage = compile_for(HOPPER, ASTSource, kernel, types, constants, num_warps=warps)
    assert stack_of(usage) <= stack
    assert registers_of(usage) <= registers
    # also on GPUs with 99 KiB
    assert compiled.metadata.shared <= 99 * 1024
    # loads of the next keys, values and with degree 2 of U that the loop does not wait for
    assert decode.STAGES == 3
    assert re.search(rf"cp\.async\.wait_group\s+{degree + 1};", compiled.asm["ptx"])
    # with degree 1 nothing of U: neither its address nor its strides are used
    u = [f"_param_{kernel.arg_names.index(name)}]" for name in ("u_rows", "u_b", "u_h", "u_n")]
    assert [name in compiled.asm["ptx"] for name in u] == [degree == 2] * 4
    # what all threads have written is there for the program that counts last
    written = compiled.asm["ptx"].partition("atom.global.gpu.acq_rel.add")[0].splitlines()
    barrier = max(i for i, line in enumerate(written) if "bar.sync" in line)
    assert barrier > max(i for i, line in enumerate(written) if "st.global" in line)


def test_coefficients() -> None:
    """``c`` from θ, and the gradients back."""
    for launch in (
        coefficients._fold(None, 16, 2, 2),
        coefficients._unfold(None, 16, 2, 4096, 2, 3),
        coefficients._add_parts(None, 48, 4096),
    ):
        assert stack_of(compiled_launch(launch)[1]) == 0


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
    call = problem(64, length, length == 256, mask, dropout)
    for launch, most in zip(
        (short.forward_launch(call, True), short.backward_launch(call)), most_stack, strict=True
    ):
        assert stack_of(compiled_launch(launch)[1]) <= most


def sweeps() -> list[Any]:
    found = []
    for degree, exclusive in ((2, False), (1, False), (1, True)):
        for dim, mask in itertools.product((64, 128), (launching.NO_MASK, launching.SPANS)):
            most_stack = 0 if dim == 64 else 32 if degree == 2 else 16 * (mask == launching.SPANS)
            is_quick = dim == 64 and (degree == 2 or mask == launching.SPANS)
            marks = () if is_quick else pytest.mark.slow
            found.append(pytest.param(degree, exclusive, dim, mask, True, most_stack, marks=marks))
        for dim in (64, 80, 96):
            if degree == 1:
                marks = () if dim == 64 and exclusive else pytest.mark.slow
                found.append(pytest.param(1, exclusive, dim, 0, False, 0, marks=marks))
    return found


@GLUON
@pytest.mark.parametrize(("degree", "exclusive", "dim", "mask", "causal", "most_stack"), sweeps())
def test_one_sweep(
    degree: int, exclusive: bool, dim: int, mask: int, causal: bool, most_stack: int
) -> None:
    """A program fits on a multiprocessor, nothing spills in a loop, and products run beside it."""
    call = problem(dim, causal=causal, mask=mask, exclusive=exclusive)
    keeps = degree == 2 or exclusive
    compiled, usage = compiled_launch(sweep._launch(call, degree, 3, keeps, (1, 1, 1)))
    assert stack_of(usage) <= most_stack
    assert compiled.metadata.shared <= SHARED[90] * 1024
    # the next scores are waited for while the products of this tile, one a power, are in flight,
    # and the exponentials follow before these are waited for: in each warpgroup's loop. A last tile
    # of degree 1 waits like that, too, but is no part of a loop
    sass = by_tool("cuobjdump", "-sass", compiled.asm["cubin"])
    wait = r"WARPGROUP\.DEPBAR"
    loops = re.findall(rf"{wait}\.LE gsb0, 0x{degree} ;(.*?){wait}", sass, re.DOTALL)
    assert len(loops) == 4 // degree
    keys = sweep.KEYS[degree, hopper.width_of(call)]
    beside = [loop for loop in loops if loop.count("MUFU.EX2") == keys // 2 + 2]
    assert len(beside) == 2
    assert degree == 2 or not any(re.search(r"\b(LDL|STL)\b", loop) for loop in beside)
    # the assembler runs products one by one where it cannot prove that their registers are free:
    # it then waits once for each of them
    most = 14 if degree == 1 else 16 if mask == launching.NO_MASK else 18
    assert len(re.findall(wait, sass)) <= most
    # two warpgroups, and with degree 2 the warps that load and store U
    copying = ["bar.warp.sync"] * 2 if degree == 2 else []
    assert releases(compiled.asm["ptx"]) == ["bar.sync", "bar.sync", *copying]


def test_plan_of_a_causal_sweep() -> None:
    assert stack_of(compiled_launch(sweep._plan(problem(mask=launching.SPANS)))[1]) == 0


def releases(ptx: str) -> list[str]:
    """What keeps a partition's warps together before one thread gives an item's slot back.

    Without it a warp could read an item's number after the next one is written there.
    """
    from gfsa.kernels import gluon_sweep

    lines = inspect.getsourcelines(gluon_sweep.next_item.fn)
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
    launch = hopper._launch(name, problem(used, causal=causal, mask=mask), False)
    assert launch.blocks[0][3] == width
    compiled, usage = compiled_launch(launch)
    assert stack_of(usage) == 0
    # three programs share a multiprocessor's 64 Ki registers where heads are narrow
    assert width == 128 or registers_of(usage) <= 168
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
    launch = hopper._launch("grad_keys", problem(128, causal=causal), True)
    compiled, usage = compiled_launch(launch, number=number)
    assert stack_of(usage) <= most_stack
    assert compiled.metadata.shared <= SHARED[90] * 1024
    ptx = compiled.asm["ptx"]
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 8
    assert "serialized" not in remarks(ptx)


@GLUON
@pytest.mark.parametrize("mask", [launching.NO_MASK, launching.SPANS])
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exclusive", [False, True], ids=["", "exclusive"])
@pytest.mark.parametrize("kernel", [0, 1], ids=["grad_queries_one", "grad_keys_one"])
def test_degree_one_for_hopper(kernel: int, exclusive: bool, dim: int, mask: int) -> None:
    """Nothing spills, narrow programs share a multiprocessor, and products run beside the rest."""
    launch = hopper._launches_once(problem(dim, mask=mask, exclusive=exclusive), 3)[kernel]
    compiled, usage = compiled_launch(launch)
    assert stack_of(usage) == 0
    together = 3 if dim == 64 else 2
    assert together * registers_of(usage) * launch.options["num_warps"] * 32 <= 64 * 1024
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
