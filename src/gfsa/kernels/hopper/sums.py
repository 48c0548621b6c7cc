"""dQ as a sum of the parts of many programs: where its numbers lie, how they are added and read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gfsa.kernels.hopper.tiles import tile_of

# four numbers of a thread, which lie next to each other
_ADD = gl.constexpr("""{
.reg .u64 at;
mul.wide.u32 at, $5, 4;
add.u64 at, at, $9;
red.relaxed.gpu.global.add.v4.f32 [at], {$1, $2, $3, $4};
mov.u32 $0, 0;
}""")
_GET = gl.constexpr("""{
.reg .u64 at;
mul.wide.u32 at, $4, 4;
add.u64 at, at, $8;
ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [at];
}""")


@gluon.constexpr_function
def query_layout(warps, features):
    """The layout of a tile of dQ of 64 queries: each warpgroup has a part of the features."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, features * 4 // warps, 16]
    )


@gluon.jit
def places(ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the numbers of a tile lie: four of a thread next to each other, then the next thread's.

    That is the order in which a product leaves them in registers, so that they do not go through
    shared memory, and an instruction adds four of them: of two rows, eight apart, and of two
    features. The four have one place, that of the first.
    """
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    return (i // 16 * 128 + i % 8 * 16)[:, None] + (d // 8 * (8 * ROWS) + d % 8 // 2 * 4)[None, :]


@gluon.jit
def add(x, at, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Add a tile to the one that begins at ``at``."""
    gl.inline_asm_elementwise(
        _ADD, "=r,f,f,f,f,r,r,r,r,l,l,l,l", [x, places(ROWS, D, LAYOUT), at.to(gl.int64)],
        dtype=gl.int8, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def get(at, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """The tile that begins at ``at``."""
    return gl.inline_asm_elementwise(
        _GET, "=f,=f,=f,=f,r,r,r,r,l,l,l,l", [places(ROWS, D, LAYOUT), at.to(gl.int64)],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["heads"])
def finish_queries(dq_cols, sums, heads, scale, D: gl.constexpr, BN: gl.constexpr):
    """``dQ = sum·scale`` in 16 bits, for BN queries of one head."""
    LAYOUT: gl.constexpr = query_layout(gl.num_warps(), D)
    tile = gl.program_id(0)
    bh = gl.program_id(1)
    at = sums + (bh.to(gl.int64) * gl.num_programs(0) + tile) * (BN * D)
    dq = get(at, BN, D, LAYOUT) * scale
    stage = gl.allocate_shared_memory(dq_cols.dtype, [1, 1, BN, D], dq_cols.layout)
    tile_of(stage, BN, D).store(dq.to(dq_cols.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(dq_cols, [bh // heads, bh % heads, tile * BN, 0], stage)
    tma.store_wait(0)
