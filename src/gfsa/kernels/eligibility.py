"""Which calls the fused kernels take, and for which they are the fastest."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re

import torch
from torch import Tensor

from gfsa.kernels import tuned
from gfsa.kernels.problem import are_spans
from gfsa.operators.base import Coefficients
from gfsa.operators.call import AttentionCall
from gfsa.operators.exporting import is_exporting
from gfsa.operators.visibility import refusal_of_spans


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
MEASURED_TRITON = (3, 6)
MEASURED_CAPABILITY = (9, 0)
# bfloat16 in matrix products, and loads that run ahead
MINIMAL_MAJOR = 8
# dropout counts entries of one head's map in 32 bits
LONGEST_WITH_DROPOUT = 65536
# CUDA's limit for the second dimension of a launch
MOST_HEADS = 65535

# the short kernels, which hold a whole sequence on chip: most tokens, largest head dim
SHORT_LENGTH = 256
SHORT_HEAD_DIM = 64
# they count a mask's entries in 32 bits
SHORT_MASK_ROW_STRIDE = SHORT_MASK_KEY_STRIDE = 2**20
# the versions of Triton whose Gluon they were measured and tested with
SHORT_TRITON = ((3, 6),)

# the one-pass kernels of degree 1: lengths and head dims for which they were measured
# (results/kernels.md), and are faster than the filter around torch's attention, and at least as
# fast as the short kernels
ONE_PASS_SHORTEST, ONE_PASS_LONGEST = 197, 8192
ONE_PASS_NARROWEST, ONE_PASS_WIDEST = 64, 64

# their gradient's Hopper kernels
HOPPER_ONCE_HEAD_DIMS = (64, 128)

# degree 1 in one causal sweep: least tokens
SWEEP_ONCE_FROM = 512
# more tokens of wider heads than one pass takes otherwise leave the gradient to cuDNN
CUDNN_ONCE_FROM = 4097

# the kernel of one causal sweep: head dims, least and most tokens of a sequence
SWEEP_HEAD_DIMS = (64, 128)
SWEEP_LENGTHS = (1024, 32768)
# least tokens, counted once for each head: with fewer, programs wait for each other's blocks
SWEEP_TOKENS = 96 * 1024

# the kernel for one decoded token: largest head dim, and most rows of a cache, free ones included,
# which it counts in 32 bits
DECODE_HEAD_DIM = 256
DECODE_LENGTH = 2**30
# benchmarks turn it off to compare the kernel with torch's calls
DECODES_BY_KERNEL = True


def refusal(call: AttentionCall, v: Tensor, degree: int) -> str | None:
    """Why the fused kernels cannot serve ``call``, or None if they can."""
    if degree not in (1, 2):
        return f"the fused kernels are for filters of degree 1 and 2, this one has {degree}"
    return (
        _refusal_of_device(call.q)
        or _refusal_of_tokens(call.q, v)
        or _refusal_of_options(call)
        or _refusal_of_wide_heads(call, degree)
    )


def reason_against(call: AttentionCall, degree: int) -> str | None:
    """Why another operator may serve ``call`` faster, or None if none does.

    Calls that have not been measured are left to torch's own kernels, but for a few whose kernels
    were measured on calls like them; docs/kernels.md names these.
    """
    length, head_dim = call.q.shape[-2:]
    if not _is_measured(call.q.device):
        return _reason_as_tuned(call, degree)
    if call.visible is not None:
        if call.dropout_p or length <= SHORT_LENGTH:
            return (
                "windows and documents are measured without dropout, in rows of more than "
                f"{SHORT_LENGTH} tokens"
            )
        return None
    mask = call.attn_mask
    if degree == 1 and (length > SHORT_LENGTH or head_dim > SHORT_HEAD_DIM):
        # what neither serves is torch's attention, and a kernel around it
        by_kernel = one_pass_is_fastest(
            call.q, mask, call.scale, call.dropout_p, call.is_causal
        ) or degree_two_serves(call.q, mask, call.is_causal, call.dropout_p)
        if torch.compiler.is_compiling() and not by_kernel:
            return "the compiler puts what a filter of degree 1 adds into one kernel by itself"
        return None
    by_query = mask is not None and not is_key_mask(mask)
    if by_query and length > SHORT_LENGTH:
        return "with a mask over queries and keys, torch's kernels are faster beyond 256 tokens"
    if head_dim > SHORT_HEAD_DIM and (by_query or call.dropout_p):
        return "dropout and masks over queries are not measured for head dims beyond 64"
    return None


def _reason_as_tuned(call: AttentionCall, degree: int) -> str | None:
    """:func:`reason_against` on a machine that is known by ``gfsa tune`` alone."""
    mask = call.attn_mask
    if call.visible is not None:
        return "gfsa tune measures neither windows nor documents"
    if call.dropout_p or (mask is not None and not is_key_mask(mask)):
        return "gfsa tune measures neither dropout nor masks over queries and keys"
    if degree == 1 and torch.compiler.is_compiling():
        return "the compiler puts what a filter of degree 1 adds into one kernel by itself"
    length, head_dim = call.q.shape[-2:]
    shape = tuned.shape_of(degree, head_dim, length, call.is_causal, mask is not None)
    return tuned.reason_against(call.q.device, *shape)


def refusal_by_short(q: Tensor, mask: Tensor | None, scale: float) -> str | None:
    """Why the short kernels cannot serve a call that the fused kernels take, or None.

    They are written in Gluon, Triton's lower-level language, whose interface changes from version
    to version; the long kernels serve what they refuse.
    """
    if q.shape[2] > SHORT_LENGTH or q.shape[3] > SHORT_HEAD_DIM:
        return f"they take {SHORT_LENGTH} tokens and a head dim of {SHORT_HEAD_DIM} at most"
    if scale <= 0.0:
        return "they take positive scales only"
    if mask is not None and mask.dtype != torch.bool:
        return "they take neither windows nor documents"
    if mask is not None and not _is_constant_over(mask, -3):
        return "they take masks that are the same for every head only"
    if mask is not None and is_key_mask(mask):
        if mask.dim() and mask.stride(-1) > SHORT_MASK_KEY_STRIDE:
            return f"they take masks of keys with strides of {SHORT_MASK_KEY_STRIDE} at most"
    elif mask is not None:
        row, key = mask.stride()[-2:]
        if mask.shape[-1] != q.shape[2] or key != 1 or row > SHORT_MASK_ROW_STRIDE:
            return "they take masks over queries and keys with contiguous rows only"
    return _refusal_of_device_by_gluon(q)


def refusal_by_sweep(
    q: Tensor, mask: Tensor | None, scale: float, is_causal: bool, dropout_p: float
) -> str | None:
    """Why one causal sweep does not serve a call that the fused kernels take, or None.

    The long kernels serve what it refuses: what it cannot do, and what was not measured.
    """
    batch, heads, length, head_dim = q.shape
    if not is_causal or (mask is not None and mask.dtype == torch.bool):
        return "it takes a causal mask, with spans or alone"
    if dropout_p:
        return "it takes no dropout"
    if scale <= 0.0:
        return "it takes positive scales only"
    if head_dim not in SWEEP_HEAD_DIMS:
        return f"it takes head dims of {SWEEP_HEAD_DIMS}, got {head_dim}"
    least, most = SWEEP_LENGTHS
    if not least <= length <= most:
        return f"it takes {least} to {most} tokens, got {length}"
    if batch * heads * length < SWEEP_TOKENS:
        return f"it takes {SWEEP_TOKENS} tokens or more, counted once for each head"
    if heads * head_dim * length >= 2**31:
        return "it counts a sequence's output in 32 bits"
    return _refusal_of_device_by_gluon(q)


def refusal_by_hopper_backward(q: Tensor, mask: Tensor | None, dropout_p: float) -> str | None:
    """Why the Hopper kernels cannot serve the gradient of a call that the fused kernels take.

    They are written in Gluon, as the short kernels are; the long kernels serve what they refuse.
    """
    if dropout_p:
        return "they take no dropout"
    if mask is not None and mask.dtype == torch.bool and not is_key_mask(mask):
        return "they take no masks over queries and keys, but spans and masks of keys"
    if q.shape[2] % 4:
        # rows of logsumexps, which the copy engine takes from multiples of 16 bytes on
        return f"they take lengths that are multiples of 4, got {q.shape[2]}"
    return _refusal_of_device_by_gluon(q)


def _refusal_of_device_by_gluon(q: Tensor) -> str | None:
    if not q.is_cuda:
        return "they are written for GPUs"
    major, minor = capability(q.device)
    if (major, minor) != (9, 0):
        return "they are written for Hopper GPUs"
    if TRITON not in SHORT_TRITON:
        return f"they are written for Triton {SHORT_TRITON}, found {TRITON}"
    return None


def one_pass_is_fastest(
    q: Tensor, mask: Tensor | None, scale: float | None, dropout_p: float, is_causal: bool = False
) -> bool:
    """Whether the one-pass kernels are the fastest of degree 1 for a call, by measurements.

    With spans they are wherever they serve: the others are those of degree 2, whose second power
    counts for nothing.
    """
    if are_spans(mask):
        return refusal_by_one_pass(q, mask, scale, dropout_p, is_causal) is None
    length, head_dim = q.shape[2:]
    if length < ONE_PASS_SHORTEST or head_dim < ONE_PASS_NARROWEST:
        return False
    if length > ONE_PASS_LONGEST:
        return False
    return refusal_by_one_pass(q, mask, scale, dropout_p, is_causal) is None


def refusal_by_one_pass(
    q: Tensor, mask: Tensor | None, scale: float | None, dropout_p: float, is_causal: bool = False
) -> str | None:
    """Why the one-pass kernels cannot serve a call that the fused kernels take, or None."""
    if dropout_p:
        return "they have no dropout"
    if scale is not None and scale <= 0.0:
        return "they take positive scales only"
    if are_spans(mask):
        refusal = refusal_by_sweep_once(q, mask, is_causal)
        return None if refusal is None else f"they take spans in one sweep only: {refusal}"
    if mask is not None:
        return "they take no mask but causality and spans"
    if q.shape[3] > ONE_PASS_WIDEST:
        refusal = refusal_by_sweep_once(q, mask, is_causal)
        if refusal is not None:
            return f"they take a head dim of {ONE_PASS_WIDEST} at most, or one sweep: {refusal}"
    return refusal_by_hopper_once(q, mask)


def degree_two_serves(q: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float) -> bool:
    """Whether the kernels of degree 2, with c2 = 0, serve degree 1 where one pass does not.

    They do where torch's attention would write a mask of N×N: it takes no spans, and of padding and
    causality one at a time.
    """
    if are_spans(mask):
        return True
    if mask is None or not is_causal or dropout_p or not is_key_mask(mask):
        return False
    return q.shape[-1] <= SHORT_HEAD_DIM or not _has_little_shared_memory(q.device)


def leaves_gradient_to_cudnn(q: Tensor, mask: Tensor | None) -> bool:
    """Whether one pass saves ``A·V`` for cuDNN's gradient, the fastest of long rows of wide heads.

    Its five products outweigh what is done around it there; own kernels take seven. It takes no
    spans.
    """
    if mask is not None or q.shape[3] <= ONE_PASS_WIDEST or q.shape[2] < CUDNN_ONCE_FROM:
        return False
    return cudnn_attention_is_on()


def refusal_by_sweep_once(q: Tensor, mask: Tensor | None, is_causal: bool) -> str | None:
    """Why one causal sweep does not serve the forward of a call that one pass serves, or None."""
    if not is_causal:
        return "it takes causal calls only"
    if q.shape[2] < SWEEP_ONCE_FROM and not are_spans(mask):
        return f"it takes {SWEEP_ONCE_FROM} tokens or more, got {q.shape[2]}"
    return refusal_by_hopper_once(q, mask)


def cudnn_attention_is_on() -> bool:
    """Whether torch has cuDNN and may take its attention, whose gradient adds up in any order.

    A constant to the compiler.
    """
    # the switch for attention alone is on in builds without cuDNN, too
    if not (torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled):
        return False
    return (
        torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    )


def refusal_by_hopper_once(q: Tensor, mask: Tensor | None) -> str | None:
    """Why the Hopper kernels cannot serve the gradient of a call that one pass serves.

    They are written in Gluon, as the short kernels are; Triton's serve what they refuse.
    """
    if mask is not None and not are_spans(mask):
        return "they take no mask but causality and spans"
    if q.shape[3] not in HOPPER_ONCE_HEAD_DIMS:
        return f"they take head dims of {HOPPER_ONCE_HEAD_DIMS}, got {q.shape[3]}"
    return _refusal_of_device_by_gluon(q)


def refusal_of_decoding(
    call: AttentionCall, v: Tensor, coeffs: Tensor | Coefficients
) -> str | None:
    """Why the kernel for one decoded token does not serve ``call``, or None if it does."""
    q, k, mask = call.q, call.k, call.attn_mask
    refusal = _refusal_of_device(q)
    if refusal is None and not DECODES_BY_KERNEL:
        refusal = "the kernel for a decoded token is turned off"
    if refusal is None and is_exporting():
        refusal = "an exported program has torch's own operators alone"
    if refusal is None and not _is_measured(q.device):
        refusal = "the kernel for a decoded token is not measured on this GPU"
    if refusal is not None:
        return refusal
    learned, numbers = (
        (coeffs.theta, coeffs.base) if isinstance(coeffs, Coefficients) else (coeffs, coeffs)
    )
    if numbers.shape[-1] not in (2, 3):
        return (
            "the kernel for a decoded token takes filters of degree 1 and 2, "
            f"this one has {numbers.shape[-1] - 1}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, learned)):
        return "the kernel for a decoded token has no gradient"
    if q.numel() == 0:
        return "there are no tokens"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernel for a decoded token takes 16 and 32 bits, not {q.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return f"the kernel takes one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    # it takes addresses, and would read those of another device
    if numbers.device != q.device or (mask is not None and mask.device != q.device):
        return f"the kernel for a decoded token takes a filter and a mask on {q.device}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > DECODE_HEAD_DIM:
        return (
            "the kernel for a decoded token takes keys and values of one head dim, a multiple of 8 "
            f"up to {DECODE_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
        )
    if mask is not None and mask.dtype != torch.bool:
        return "the kernel for a decoded token takes bool masks, not additive ones"
    if call.dropout_p:
        return "the kernel for a decoded token takes no dropout"
    if k.shape[-2] > DECODE_LENGTH:
        return (
            f"the kernel for a decoded token takes caches of {DECODE_LENGTH} rows at most, "
            f"got {k.shape[-2]}"
        )
    return None


def is_key_mask(mask: Tensor) -> bool:
    """Whether a mask is the same for every query and head."""
    return _is_constant_over(mask, -2) and _is_constant_over(mask, -3)


def _is_constant_over(mask: Tensor, dim: int) -> bool:
    return mask.dim() < -dim or mask.shape[dim] == 1 or mask.stride(dim) == 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, a constant to the compiler."""
    return _capability(device)


# all that torch.compiler.assume_constant_result does, which imports the whole compiler to do it
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
cudnn_attention_is_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_measured(device: torch.device) -> bool:
    """Whether the kernels were measured on such a GPU, with the Triton that is installed."""
    # unpacked: the compiler cannot compare a tuple that is a constant to it
    major, minor = capability(device)
    return (major, minor) == MEASURED_CAPABILITY and TRITON == MEASURED_TRITON


def _refusal_of_device(q: Tensor) -> str | None:
    if TURNED_OFF:
        return "GFSA_FUSED=0 in the environment turns the fused kernels off"
    if not q.is_cuda or torch.version.hip is not None:
        return f"the fused kernels need an NVIDIA GPU, the tokens are on {q.device}"
    major, minor = capability(q.device)
    if major < MINIMAL_MAJOR:
        return (
            f"the fused kernels need a GPU of compute capability {MINIMAL_MAJOR}.0 (Ampere) or "
            f"newer, this one has {major}.{minor}"
        )
    if TRITON < MINIMAL_TRITON:
        return f"the fused kernels need Triton {MINIMAL_TRITON} or newer, found {TRITON or 'none'}"
    if q.is_nested or type(q).__name__ == "DTensor":
        return f"the fused kernels take plain tensors, not {type(q).__name__}"
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        # the trace would return memory that nothing writes
        return "torch.jit.trace does not record the fused kernels"
    return None


def _refusal_of_tokens(q: Tensor, v: Tensor) -> str | None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the fused kernels take bfloat16 and float16, not {q.dtype}"
    if q.dim() != 4:
        return f"the fused kernels take tokens (B, H, N, D), got {q.dim()} dimensions"
    if v.shape[-1] != q.shape[-1]:
        return (
            "the fused kernels need values of the queries' head dim "
            f"({q.shape[-1]}), got {v.shape[-1]}"
        )
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= 128:
        return (
            f"the fused kernels take head dims up to 128 that are multiples of 8, got {q.shape[-1]}"
        )
    if q.numel() == 0:
        return "there are no tokens"
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        return (
            f"the fused kernels take {MOST_HEADS} heads of all sequences together, "
            f"got {q.shape[0] * q.shape[1]}"
        )
    return None


def _has_little_shared_memory(device: torch.device) -> bool:
    """99 KiB a program, by the table of compute capabilities in CUDA's programming guide."""
    major, minor = capability(device)
    return major == 12 or (major == 8 and minor in (6, 9))


def _refusal_of_wide_heads(call: AttentionCall, degree: int) -> str | None:
    """The gradient of degree 2 holds tiles of 145 KiB at a head dim of 128.

    Filters of degree 1 take it with windows and documents alone.
    """
    q = call.q
    if (degree == 1 and call.visible is None) or q.shape[-1] <= SHORT_HEAD_DIM:
        return None
    if _has_little_shared_memory(q.device):
        major, minor = capability(q.device)
        return (
            "the fused kernels of degree 2, and of windows and documents, take head dims up to "
            f"{SHORT_HEAD_DIM} on GPUs with 99 KiB of shared memory a program, as this one of "
            f"compute capability {major}.{minor}, got {q.shape[-1]}"
        )
    return None


def _refusal_of_options(call: AttentionCall) -> str | None:
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        return "the fused kernels take bool masks, not additive ones"
    if call.visible is not None:
        refusal = refusal_of_spans(call.visible)
        if refusal is not None:
            return f"the fused kernels take causal windows and documents alone, here {refusal}"
    if call.dropout_p >= 1.0:
        return f"the fused kernels need dropout_p below 1, got {call.dropout_p}"
    if call.dropout_p and call.q.shape[-2] > LONGEST_WITH_DROPOUT:
        return f"the fused kernels take {LONGEST_WITH_DROPOUT} tokens at most with dropout"
    return None
