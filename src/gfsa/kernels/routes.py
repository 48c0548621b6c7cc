"""Which kernels serve a call: one table, asked once.

A call is reduced to a :class:`Situation`, plain values that can be hashed. :data:`ROUTES` lists the
ways to compute a filter, the fastest first. :func:`decide` returns the first route that takes the
situation, the kernels of its gradient, and why the routes before it do not serve. Everything asks
here: the façade (``operators/attention.py``), the torch operators of the kernels, decoding,
:func:`gfsa.which_backend`, ``gfsa info``, and the table in docs/kernels.md
(:func:`as_markdown`).

Limits are those of measurements on an H200 (results/kernels.md) or of a kernel's code. Importing
this imports no Triton.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gfsa.kernels import tuned
from gfsa.operators.call import AttentionCall, is_exporting
from gfsa.operators.operator import Coefficients
from gfsa.operators.visibility import refusal_of_spans

Backend = Literal["auto", "dense", "sdpa", "fused"]
# torch 2.6's compiler cannot call get_args
_BACKENDS = get_args(Backend)


def _installed_triton() -> tuple[int, ...]:
    """Triton's version, empty if it is not installed; it is not imported for this."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def turned_off(value: str) -> bool:
    """Whether ``GFSA_FUSED`` with this value turns the fused kernels off."""
    if value not in ("", "0", "1"):
        raise ValueError(f"GFSA_FUSED must be 0 (no fused kernels) or 1, got {value!r}")
    return value == "0"


# read once: a process that has compiled a call keeps the operator that served it
TURNED_OFF = turned_off(os.environ.get("GFSA_FUSED", ""))
TRITON = _installed_triton()
MINIMAL_TRITON = (3, 6)
# bfloat16 in matrix products, and loads that run ahead
MINIMAL_MAJOR = 8
# where the kernels were measured, and what those in Gluon are written for: the interface of
# Triton's lower-level language changes from version to version
HOPPER = (9, 0)
MEASURED_TRITON = (3, 6)
# dropout counts entries of one head's map in 32 bits
LONGEST_WITH_DROPOUT = 65536
# CUDA's limit for the second dimension of a launch
MOST_HEADS = 65535

# largest head dim of the kernels, and of those of them that were measured; degree 1 beyond that
# is computed around torch's attention
HEAD_DIM = 256
MEASURED_HEAD_DIM = 128
# most tokens and largest head dim of the short kernels, which hold a whole sequence on chip, and
# largest strides of a mask, whose entries they count in 32 bits
SHORT_LENGTH = 256
SHORT_HEAD_DIM = 64
SHORT_MASK_STRIDE = 2**20
# degree 1 in one sweep with a gradient, without the exclusive term: least tokens at which it is at
# least as fast as the short kernels, which do not have that term
ONCE_FROM = 128
# degree 2 in one sweep: least tokens, counted once for each head; with fewer, programs wait for
# each other's blocks
SWEEP_TOKENS = 96 * 1024

# the kernel for one decoded token: largest head dim, and most rows of a cache, free ones included,
# which it counts in 32 bits
DECODE_HEAD_DIM = 256
DECODE_LENGTH = 2**30
# benchmarks turn it off to compare the kernel with torch's calls
DECODES_BY_KERNEL = True

# kinds of masks
NO_MASK = "none"
KEYS = "keys"
"""The same for every query and head: padding."""
FAR_KEYS = "far keys"
"""The same, with a stride that needs 64 bits."""
PAIRS = "pairs"
"""Over queries and keys, the same for every head, with contiguous rows."""
OTHER_PAIRS = "other pairs"
"""Any other bool mask over queries and keys."""
SPANS = "spans"
"""Causal windows and documents, see :func:`gfsa.kernels.launching.are_spans`."""
ADDITIVE = "additive"
UNDESCRIBED = "not spans"
"""A visibility that spans do not describe."""


class Hardware(NamedTuple):
    """What a call runs on, and why no kernel of the library may run there."""

    gpu: tuple[int, int] | None
    """The compute capability; None if it is not an NVIDIA GPU."""
    triton: tuple[int, ...]
    refusal: str | None


class Situation(NamedTuple):
    """All that a decision about a call depends on, but for measurements by ``gfsa tune``."""

    degree: int
    hardware: Hardware
    device: torch.device
    dtype: torch.dtype
    dims: int
    batch: int
    heads: int
    tokens: int
    head_dim: int
    value_dim: int
    mask: str = NO_MASK
    mask_words: str | None = None
    """Why spans do not describe the visibility of an UNDESCRIBED mask."""
    causal: bool = False
    dropout_p: float = 0.0
    positive_scale: bool = True
    grad: bool = True
    compiling: bool = False
    only_torch: str | None = None
    """Why torch's attention alone can compute A."""
    exclusive: bool = False
    """Whether the filter takes the part along a token's own value out."""
    drops_filter: bool = False
    """Whether dropout drops entries of H, not of A."""
    fixed_generator: bool = False
    """Whether dropout needs the random generator reset between passes, and it cannot be."""


class Decision(NamedTuple):
    """What serves a call, and why.

    Args:
        backend: whose attention kernels run: ``"dense"``, ``"sdpa"`` (torch's) or ``"fused"``.
        route: the name of the route in :data:`ROUTES`. While a model is compiled, the torch
            operator that the graph holds; it chooses its route when it runs.
        gradient: the kernels of the gradient, ``"none"`` where autograd is off.
        reason: why, as a sentence.
        rejected: ``(route, reason)`` of what was preferred and does not serve.
    """

    backend: str
    route: str
    gradient: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.route} (backend {self.backend}, gradient {self.gradient}): {self.reason}"]
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.rejected)])


# --- the situation of a call -------------------------------------------------------------------


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, a constant to the compiler."""
    return _capability(device)


# all that torch.compiler.assume_constant_result does, which imports the whole compiler to do it
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def hardware_of(q: Tensor) -> Hardware:
    """What the tokens lie on."""
    gpu = None
    if q.is_cuda and torch.version.hip is None:
        # unpacked: the compiler cannot compare a tuple that is a constant to it
        major, minor = capability(q.device)
        gpu = (major, minor)
    return Hardware(gpu, TRITON, _refusal_of_tensor(q, gpu))


def _refusal_of_tensor(q: Tensor, gpu: tuple[int, int] | None) -> str | None:
    if TURNED_OFF:
        return "GFSA_FUSED=0 in the environment turns the fused kernels off"
    if gpu is None:
        return f"the fused kernels need an NVIDIA GPU, the tokens are on {q.device}"
    if gpu[0] < MINIMAL_MAJOR:
        return (
            f"the fused kernels need a GPU of compute capability {MINIMAL_MAJOR}.0 (Ampere) or "
            f"newer, this one has {gpu[0]}.{gpu[1]}"
        )
    if TRITON < MINIMAL_TRITON:
        return f"the fused kernels need Triton {MINIMAL_TRITON} or newer, found {TRITON or 'none'}"
    if q.is_nested or type(q).__name__ == "DTensor":
        return f"the fused kernels take plain tensors, not {type(q).__name__}"
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        # the trace would return memory that nothing writes
        return "torch.jit.trace does not record the fused kernels"
    return None


def situation_of(call: AttentionCall, v: Tensor, degree: int, exclusive: bool = False) -> Situation:
    """The situation of a filter of ``degree`` on ``v``."""
    call = call.with_key_mask()
    q, visible, dropout_p = call.q, call.visible, call.dropout_p
    batch = heads = tokens = head_dim = value_dim = 0
    # sizes of nested tensors are symbols, and torch's attention serves them whatever they are
    if not q.is_nested:
        tokens, head_dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    if q.dim() == 4 and not q.is_nested:
        batch, heads = q.shape[0], q.shape[1]
    mask, mask_words, causal = NO_MASK, None, call.is_causal
    if visible is not None:
        mask_words = refusal_of_spans(visible)
        mask, causal = (SPANS, True) if mask_words is None else (UNDESCRIBED, visible.causal)
    elif call.attn_mask is not None:
        mask = kind_of(call.attn_mask, tokens, copies=True)
    return Situation(
        degree,
        *(hardware_of(q), q.device, q.dtype, q.dim()),
        *(batch, heads, tokens, head_dim, value_dim),
        mask=mask,
        mask_words=mask_words,
        causal=causal,
        dropout_p=dropout_p,
        positive_scale=call.scale is None or call.scale > 0.0,
        grad=torch.is_grad_enabled(),
        compiling=torch.compiler.is_compiling(),
        only_torch=call.reason_for_torch_alone(),
        exclusive=exclusive,
        drops_filter=bool(dropout_p) and call.dropout_after == "filter",
        fixed_generator=bool(dropout_p) and degree > 1 and _generator_cannot_be_reset(q.device),
    )


def situation_of_kernels(
    q: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    exclusive: bool,
    degree: int,
) -> Situation:
    """The situation of a call that the kernels take, by what they are given.

    Args:
        mask: bool; or spans, see :func:`gfsa.kernels.launching.are_spans`.
    """
    batch, heads, tokens, head_dim = q.shape
    return Situation(
        degree,
        *(hardware_of(q), q.device, q.dtype, q.dim()),
        *(batch, heads, tokens, head_dim, head_dim),
        mask=NO_MASK if mask is None else kind_of(mask, tokens, copies=False),
        causal=causal,
        dropout_p=dropout_p,
        positive_scale=scale > 0.0,
        grad=torch.is_grad_enabled(),
        exclusive=exclusive,
    )


def kind_of(mask: Tensor, tokens: int, copies: bool) -> str:
    """The kind of a mask, as it is or, if it ``copies``, as by :func:`with_contiguous_rows`."""
    if mask.dtype == torch.int32:
        return SPANS
    if mask.dtype != torch.bool:
        return ADDITIVE
    if is_key_mask(mask):
        far = mask.dim() > 0 and mask.stride(-1) > SHORT_MASK_STRIDE
        return FAR_KEYS if far else KEYS
    row, key = mask.stride()[-2:]
    same_for_heads = _is_constant_over(mask, -3)
    if copies and tokens <= SHORT_LENGTH and key != 1 and not mask.is_contiguous():
        row, key = mask.shape[-1], 1
        same_for_heads = mask.dim() < 3 or mask.shape[-3] == 1
    whole_rows = mask.shape[-1] == tokens and key == 1 and row <= SHORT_MASK_STRIDE
    return PAIRS if same_for_heads and whole_rows else OTHER_PAIRS


def with_contiguous_rows(mask: Tensor, tokens: int) -> Tensor:
    """``mask`` as the short kernels read it: a copy of one that is broadcast over keys.

    Compiled models of transformers make such a mask where nothing is hidden.
    """
    if tokens > SHORT_LENGTH or is_key_mask(mask) or mask.stride(-1) == 1:
        return mask
    return mask.contiguous()


def is_key_mask(mask: Tensor) -> bool:
    """Whether a mask is the same for every query and head."""
    return _is_constant_over(mask, -2) and _is_constant_over(mask, -3)


def _is_constant_over(mask: Tensor, dim: int) -> bool:
    return mask.dim() < -dim or mask.shape[dim] == 1 or mask.stride(dim) == 0


def _generator_cannot_be_reset(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# --- what each route refuses -------------------------------------------------------------------


def refusal_by_fused(s: Situation) -> str | None:
    """Why no kernel of the library takes the call, or None if one does."""
    if s.degree not in (1, 2):
        return f"the fused kernels are for filters of degree 1 and 2, this one has {s.degree}"
    if s.hardware.refusal is not None:
        return s.hardware.refusal
    if s.dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take bfloat16 and float16, not {s.dtype}"
    if s.dims != 4:
        return f"the fused kernels take tokens (B, H, N, D), got {s.dims} dimensions"
    if s.value_dim != s.head_dim:
        return (
            "the fused kernels need values of the queries' head dim "
            f"({s.head_dim}), got {s.value_dim}"
        )
    if s.head_dim % 8 or not 8 <= s.head_dim <= HEAD_DIM:
        return (
            f"the fused kernels take head dims up to {HEAD_DIM} that are multiples of 8, "
            f"got {s.head_dim}"
        )
    if s.batch == 0 or s.heads == 0 or s.tokens == 0:
        return "there are no tokens"
    if s.batch * s.heads > MOST_HEADS:
        return (
            f"the fused kernels take {MOST_HEADS} heads of all sequences together, "
            f"got {s.batch * s.heads}"
        )
    if s.exclusive and s.degree == 2:
        return "the fused kernels of degree 2 have no exclusive term"
    if s.mask == ADDITIVE:
        return "the fused kernels take bool masks, not additive ones"
    if s.mask == UNDESCRIBED:
        return f"the fused kernels take causal windows and documents alone, here {s.mask_words}"
    if s.dropout_p >= 1.0:
        return f"the fused kernels need dropout_p below 1, got {s.dropout_p}"
    if s.dropout_p and s.tokens > LONGEST_WITH_DROPOUT:
        return f"the fused kernels take {LONGEST_WITH_DROPOUT} tokens at most with dropout"
    # degree 1 has kernels for wide heads everywhere, but for windows and documents
    spans = s.mask == SPANS and not s.exclusive and s.head_dim <= MEASURED_HEAD_DIM
    if (s.degree == 2 or spans) and s.head_dim > _widest_of_two_passes(s):
        major, minor = s.hardware.gpu or (0, 0)
        return (
            "the fused kernels of degree 2, and of windows and documents, take head dims up to "
            f"{_widest_of_two_passes(s)} in the shared memory of a program on a GPU of compute "
            f"capability {major}.{minor}, got {s.head_dim}"
        )
    return None


def _widest_of_two_passes(s: Situation) -> int:
    """The largest head dim at which the tiles of the two passes' gradient fit.

    They take 145 KiB at a head dim of 128; 195 at 256 on Hopper, and on Blackwell all there is. A
    program has 99 KiB on some GPUs, by the table of compute capabilities in CUDA's guide.
    """
    major, minor = s.hardware.gpu or HOPPER
    if major == 12 or (major == 8 and minor in (6, 9)):
        return SHORT_HEAD_DIM
    return HEAD_DIM if (major, minor) == HOPPER else MEASURED_HEAD_DIM


def _refusal_by_gluon(s: Situation) -> str | None:
    gpu, triton, _ = s.hardware
    if gpu != HOPPER:
        return "it is written for Hopper GPUs"
    if triton != MEASURED_TRITON:
        return f"it is written for Triton {MEASURED_TRITON}, found {triton}"
    return None


def _left_to_others(s: Situation) -> str | None:
    if s.grad and s.tokens < ONCE_FROM and not s.exclusive and s.mask != SPANS:
        return f"with a gradient the short kernels are as fast below {ONCE_FROM} tokens"
    if s.grad and not s.causal and s.head_dim in (96, 128):
        return "with a gradient it takes causal calls only at this head dim"
    return None


def _too_little_or_too_much(s: Situation) -> str | None:
    if s.batch * s.heads * s.tokens < SWEEP_TOKENS:
        return f"it takes {SWEEP_TOKENS} tokens or more, counted once for each head"
    if s.heads * s.head_dim * s.tokens >= 2**31:
        return "it counts a sequence's output in 32 bits"
    return None


def _written_out_by_torch(s: Situation) -> str | None:
    """Of degree 1, with c2 = 0, where torch's attention would write a mask of N×N.

    Torch takes no spans, and of padding and causality one at a time.
    """
    if s.degree == 2:
        return None
    if s.head_dim > MEASURED_HEAD_DIM:
        return f"of degree 1 it takes head dims up to {MEASURED_HEAD_DIM}"
    if s.mask == SPANS:
        return None
    if s.mask not in (KEYS, FAR_KEYS) or not s.causal or s.dropout_p:
        return "of degree 1 it takes padded causal rows, windows and documents"
    return (
        None if s.head_dim <= _widest_of_two_passes(s) else "its gradient needs more shared memory"
    )


# --- the kernels of the gradient ---------------------------------------------------------------


def _filter_gradient(s: Situation) -> str:
    return "two_pass" if refusal_by_hopper_gradient(s) is not None else "hopper"


def refusal_by_hopper_gradient(s: Situation) -> str | None:
    """Why the Hopper kernels do not serve the gradient of a sweep or of two passes."""
    if s.dropout_p:
        return "it has no dropout"
    if s.mask in (PAIRS, OTHER_PAIRS):
        return "it takes no masks over queries and keys"
    if s.head_dim > MEASURED_HEAD_DIM:
        return f"it takes head dims up to {MEASURED_HEAD_DIM}"
    if s.tokens % 4:
        # rows of logsumexps, which the copy engine takes from multiples of 16 bytes on
        return "it takes lengths that are multiples of 4"
    return _refusal_by_gluon(s)


# --- the table ---------------------------------------------------------------------------------


MASKS = (NO_MASK, KEYS, FAR_KEYS, PAIRS, OTHER_PAIRS, SPANS)


class Route(NamedTuple):
    """One way to compute a filter, and which of the calls it takes that the fused kernels take."""

    name: str
    operation: str
    """What a graph holds: a torch operator, which chooses among its routes when it runs."""
    backend: str
    degrees: tuple[int, ...]
    gradient: Callable[[Situation], str]
    lengths: dict[int, tuple[int, int]] | None
    """By head dim least and most tokens; None for any."""
    masks: tuple[str, ...]
    takes: str
    """For readers."""
    gradients: str
    narrower: bool = False
    """Whether it takes smaller head dims than those of ``lengths``, too."""
    packed: bool = False
    """Whether it takes windows and documents of any length."""
    causal: bool = False
    """Whether it takes causal calls alone."""
    dropout: bool = False
    exclusive: bool = False
    in_gluon: bool = True
    """Whether it is written for one GPU and one version of Triton, and takes positive scales."""
    further: Callable[[Situation], str | None] = lambda s: None
    """Whatever else it refuses."""


def _refusal(route: Route, s: Situation) -> str | None:
    """Why a route does not take a call that the fused kernels take, or None if it does."""
    if route.causal and not s.causal:
        return "it takes causal calls only"
    if s.mask not in route.masks:
        return f"it takes masks of the kinds {', '.join(route.masks)}, this one is of {s.mask}"
    if s.dropout_p and not route.dropout:
        return "it has no dropout"
    if s.exclusive and not route.exclusive:
        return "it has no exclusive term"
    if route.in_gluon and not s.positive_scale:
        return "it takes positive scales only"
    if route.lengths is not None:
        dims = tuple(route.lengths)
        dim = max(s.head_dim, dims[0]) if route.narrower else s.head_dim
        if dim not in dims:
            return f"it takes head dims {'up to' if route.narrower else 'of'} {dims}"
        least, most = route.lengths[dim]
        if not (route.packed and s.mask == SPANS) and not least <= s.tokens <= most:
            return f"it takes {least} to {most} tokens at this head dim"
    return route.further(s) or (_refusal_by_gluon(s) if route.in_gluon else None)


# from the fastest to the most general
ROUTES = (
    Route(
        *("one_sweep", "once", "fused", (1,), lambda s: "hopper"),
        lengths={64: (64, 8192), **dict.fromkeys((80, 96, 128), (512, 4096))},
        masks=(NO_MASK, SPANS),
        packed=True,
        exclusive=True,
        further=_left_to_others,
        takes=f"head dim 64, {ONCE_FROM} to 8192 tokens, from 64 on without a gradient or with the "
        "exclusive term; head dims 80, 96 and 128, 512 to 4096 tokens (96 and 128 with a gradient: "
        "causal); windows and documents of any length",
        gradients="hopper",
    ),
    Route(
        *("short", "filter", "fused", (1, 2), lambda s: "short"),
        lengths={SHORT_HEAD_DIM: (1, SHORT_LENGTH)},
        narrower=True,
        masks=(NO_MASK, KEYS, PAIRS),
        dropout=True,
        takes=f"up to {SHORT_LENGTH} tokens and a head dim of {SHORT_HEAD_DIM}, masks that are the "
        "same for every head, dropout",
        gradients="short",
    ),
    Route(
        *("sweep", "filter", "fused", (2,), _filter_gradient),
        lengths={64: (1024, 32768), 128: (1024, 32768)},
        masks=(NO_MASK, SPANS),
        causal=True,
        further=_too_little_or_too_much,
        takes=f"causal, head dims 64 and 128, 1024 to 32768 tokens and {SWEEP_TOKENS} or more of "
        "all heads, windows and documents",
        gradients="hopper; two_pass for lengths that are not multiples of 4",
    ),
    Route(
        *("two_pass", "filter", "fused", (1, 2), _filter_gradient),
        lengths={HEAD_DIM: (1, 2**31)},
        narrower=True,
        masks=MASKS,
        dropout=True,
        in_gluon=False,
        further=_written_out_by_torch,
        takes="degree 2: every call; degree 1: padded causal rows, windows and documents",
        gradients="hopper on Hopper GPUs; two_pass with dropout, masks over queries and keys, and "
        "lengths that are not multiples of 4",
    ),
    Route(
        *("around_torch", "around", "sdpa", (1,), lambda s: "around_torch"),
        lengths=None,
        masks=MASKS,
        dropout=True,
        exclusive=True,
        in_gluon=False,
        takes="every call, with the exclusive term too, head dims up to "
        f"{HEAD_DIM}: torch's attention, and one kernel that combines the powers",
        gradients="torch's, and one kernel before it",
    ),
)
_BY_NAME = {route.name: route for route in ROUTES}
OPERATION = {route.name: route.operation for route in ROUTES}


class Kernels(NamedTuple):
    """The routes of a call's forward and gradient, and what was preferred and does not serve."""

    forward: str
    gradient: str
    rejected: tuple[tuple[str, str], ...] = ()


@functools.lru_cache(maxsize=4096)
def kernels_of(s: Situation) -> Kernels:
    """The kernels of a call that the fused kernels take."""
    rejected: list[tuple[str, str]] = []
    for route in ROUTES:
        if s.degree not in route.degrees:
            continue
        refusal = _refusal(route, s)
        if refusal is None:
            gradient = route.gradient(s) if s.grad else "none"
            return Kernels(route.name, gradient, tuple(rejected))
        rejected.append((route.name, refusal))
    raise AssertionError(f"no route takes {s}")


def operation_of(s: Situation) -> str:
    """The torch operator of a call that the fused kernels take.

    It asks for no more than decides between operators: a graph that is compiled for many lengths is
    compiled again at each limit that it has been asked for.
    """
    if s.degree == 2:
        return "filter"
    for name in ("one_sweep", "short", "two_pass"):
        if _refusal(_BY_NAME[name], s) is None:
            return _BY_NAME[name].operation
    return "around"


# --- the decision ------------------------------------------------------------------------------


def decide(s: Situation, wanted: Backend = "auto") -> Decision:
    """What serves a call. A backend asked for by name runs or raises; no other runs in its place.

    ``"fused"`` asks for kernels of the library wherever it has one for the call: with degree 1 that
    may be the kernel around torch's attention.
    """
    if wanted not in _BACKENDS:
        raise ValueError(f"backend must be one of {_BACKENDS}, got {wanted!r}")
    if s.compiling:
        return _decide(s, wanted, _reason_by_measurements(s))
    return _decided(s, wanted, _reason_by_measurements(s))


def _decide(s: Situation, wanted: Backend, slower: str | None) -> Decision:
    by_dense = by_sdpa = None
    if s.drops_filter:
        by_dense = "entries of H can only be dropped where H is built, by the dense operator"
    if s.fixed_generator:
        by_sdpa = (
            "one dropout mask for all passes needs the random generator reset between them, "
            "which a compiled or captured graph cannot do; the dense operator can"
        )
    by_fused = refusal_by_fused(s)
    if s.only_torch is not None:
        refusal = by_dense or by_sdpa
        if refusal is not None:
            raise _unserved(wanted, f"{s.only_torch}, and sdpa cannot serve it: {refusal}")
        if wanted not in ("auto", "sdpa"):
            raise _unserved(wanted, f"{s.only_torch}; use 'auto' or 'sdpa'")
        return _by_torch(s.only_torch)
    by_name = "asked for by name"
    if wanted == "dense" or (by_dense is not None and wanted == "auto"):
        return Decision("dense", "dense", "autograd", by_dense or by_name)
    if wanted != "auto":
        refusal = by_dense or (by_sdpa if wanted == "sdpa" else by_fused)
        if refusal is not None:
            raise _unserved(wanted, refusal)
        return _by_torch(by_name) if wanted == "sdpa" else _own(s, by_name)
    against = by_fused or slower
    if against is None:
        return _own(s, "the fastest for this call")
    if by_sdpa is None:
        reason = f"torch's own attention kernels, one pass a power: {against}"
        return _by_torch(reason, (("fused", against),))
    if by_fused is None and s.head_dim <= MEASURED_HEAD_DIM:
        return _own(s, f"a fused kernel covers this call, and sdpa does not: {by_sdpa}")
    rejected = (("fused", against), ("sdpa", by_sdpa))
    return Decision("dense", "dense", "autograd", by_sdpa, rejected)


def _unserved(wanted: str, refusal: str) -> ValueError:
    return ValueError(f"backend={wanted!r} cannot serve this call: {refusal}")


def _by_torch(reason: str, rejected: tuple[tuple[str, str], ...] = ()) -> Decision:
    return Decision("sdpa", "sdpa", "autograd", reason, rejected)


_decided = functools.lru_cache(maxsize=4096)(_decide)


def _own(s: Situation, reason: str) -> Decision:
    """By a kernel of the library."""
    if s.compiling:
        operation = operation_of(s)
        backend = "sdpa" if operation == "around" else "fused"
        return Decision(backend, operation, "chosen when it runs", reason)
    forward, gradient, rejected = kernels_of(s)
    return Decision(_BY_NAME[forward].backend, forward, gradient, reason, rejected)


def _reason_by_measurements(s: Situation) -> str | None:
    """Why torch's attention may serve a call faster than the fused kernels, which take it.

    Calls that have not been measured are left to torch's own kernels, but for a few whose kernels
    were measured on calls like them; docs/kernels.md names these.
    """
    if refusal_by_fused(s) is not None:
        return None
    if s.degree == 2 and s.head_dim > MEASURED_HEAD_DIM:
        return f"degree 2 is not measured at head dims beyond {MEASURED_HEAD_DIM}"
    gpu, triton, _ = s.hardware
    if gpu != HOPPER or triton != MEASURED_TRITON:
        return _reason_by_tuning(s)
    if s.degree == 1 and s.compiling and operation_of(s) == "around":
        return "the compiler puts what a filter of degree 1 adds into one kernel by itself"
    if s.mask == SPANS:
        if s.dropout_p or s.tokens <= SHORT_LENGTH:
            return (
                "windows and documents are measured without dropout, in rows of more than "
                f"{SHORT_LENGTH} tokens"
            )
        return None
    by_query = s.mask in (PAIRS, OTHER_PAIRS)
    if s.degree == 1 and (s.tokens > SHORT_LENGTH or s.head_dim > SHORT_HEAD_DIM):
        return None
    if by_query and s.tokens > SHORT_LENGTH:
        return "with a mask over queries and keys, torch's kernels are faster beyond 256 tokens"
    if s.head_dim > SHORT_HEAD_DIM and (by_query or s.dropout_p):
        return "dropout and masks over queries are not measured for head dims beyond 64"
    return None


def _reason_by_tuning(s: Situation) -> str | None:
    """The same on a machine that is known by ``gfsa tune`` alone."""
    if s.mask == SPANS:
        return "gfsa tune measures neither windows nor documents"
    if s.dropout_p or s.mask in (PAIRS, OTHER_PAIRS):
        return "gfsa tune measures neither dropout nor masks over queries and keys"
    if s.degree == 1 and s.compiling:
        return "the compiler puts what a filter of degree 1 adds into one kernel by itself"
    shape = tuned.shape_of(s.degree, s.head_dim, s.tokens, s.causal, s.mask != NO_MASK)
    return tuned.reason_against(s.device, *shape)


# --- one decoded token -------------------------------------------------------------------------


def refusal_of_decoding(
    call: AttentionCall,
    v: Tensor,
    coeffs: Tensor | Coefficients,
    exclusive: Tensor | None = None,
) -> str | None:
    """Why the kernel for one decoded token does not serve ``call``, or None if it does."""
    q, k, mask = call.q, call.k, call.attn_mask
    hardware = hardware_of(q)
    if hardware.refusal is not None:
        return hardware.refusal
    kernel = "the kernel for a decoded token"
    if not DECODES_BY_KERNEL:
        return f"{kernel} is turned off"
    if is_exporting():
        return "an exported program has torch's own operators alone"
    if hardware.gpu != HOPPER or hardware.triton != MEASURED_TRITON:
        return f"{kernel} is not measured on this GPU"
    learned, numbers = (
        (coeffs.theta, coeffs.base) if isinstance(coeffs, Coefficients) else (coeffs, coeffs)
    )
    if numbers.shape[-1] not in (2, 3):
        degree = numbers.shape[-1] - 1
        return f"{kernel} takes filters of degree 1 and 2, this one has {degree}"
    given = (q, k, v, learned) if exclusive is None else (q, k, v, learned, exclusive)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return f"{kernel} has no gradient"
    if q.numel() == 0:
        return "there are no tokens"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{kernel} takes 16 and 32 bits, not {q.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return f"the kernel takes one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    # it takes addresses, and would read those of another device
    if numbers.device != q.device or (mask is not None and mask.device != q.device):
        return f"{kernel} takes a filter and a mask on {q.device}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > DECODE_HEAD_DIM:
        return (
            f"{kernel} takes keys and values of one head dim, a multiple of 8 up to "
            f"{DECODE_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
        )
    if mask is not None and mask.dtype != torch.bool:
        return f"{kernel} takes bool masks, not additive ones"
    if call.dropout_p:
        return f"{kernel} takes no dropout"
    if k.shape[-2] > DECODE_LENGTH:
        return f"{kernel} takes caches of {DECODE_LENGTH} rows at most, got {k.shape[-2]}"
    return None


# --- the documentation -------------------------------------------------------------------------


def as_markdown() -> str:
    """The table of docs/kernels.md."""
    rows = [
        f"| `{route.name}` | {', '.join(map(str, route.degrees))} | {route.takes} "
        f"| {route.gradients} |"
        for route in ROUTES
    ]
    return "\n".join(["| route | degree | takes | gradient |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(as_markdown())
