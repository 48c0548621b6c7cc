"""The filter as a torch operator: seen whole by autograd, ``torch.compile`` and CUDA graphs."""

# no postponed annotations here: the operator's schema is read from them
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gfsa.operators.fused import passes, short, twofold
from gfsa.operators.fused.kernel import copyable_by_tile, empty_like
from gfsa.operators.fused.passes import Options


def filter_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """``c0·V + c1·A·V + c2·A²·V`` by the fused kernels.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H / group, N, D)``.
        coeffs: ``(H, 3)``, float32.
        mask: bool, broadcastable to ``(B, H, N, N)``, True takes part.
        seed: int64, one number, needed with dropout.
    """
    arguments = (q, k, v, coeffs, mask, seed, dropout_p, is_causal, scale)
    # the registered operator costs several times the kernels' own launches on short sequences;
    # it is for those who have to see it: the compiler, and modes that record what runs
    if torch.compiler.is_compiling() or type(q) is not Tensor or is_in_torch_dispatch_mode():
        return forward(*arguments)[0]
    return _Filter.apply(*arguments)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, U, LSE)``."""
    return _run_forward(
        _path(q, mask, scale), q, k, v, coeffs, mask, seed, dropout_p, is_causal, scale
    )


def _backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    coeffs: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the coefficients."""
    return _run_backward(
        _path(q, mask, scale),
        g,
        q,
        k,
        v,
        u,
        out,
        lse,
        coeffs,
        mask,
        seed,
        dropout_p,
        is_causal,
        scale,
    )


def _path(q: Tensor, mask: Tensor | None, scale: float) -> ModuleType:
    return passes if short.why_not(q, mask, scale) else short


def _run_forward(
    path: ModuleType, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, *rest: Any
) -> Any:
    mask, seed, dropout_p, is_causal, scale = rest
    with torch.cuda.device_of(q):
        q, k, v = copyable_by_tile(q), copyable_by_tile(k), copyable_by_tile(v)
        options = Options(scale, is_causal, mask, dropout_p, seed)
        return path.forward(q, k, v, coeffs.contiguous(), options)


def _run_backward(path: ModuleType, g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    u, kept, lse, coeffs, mask, seed, dropout_p, is_causal, scale = rest
    with torch.cuda.device_of(q):
        g, q, k, v = (copyable_by_tile(x) for x in (g, q, k, v))
        options = Options(scale, is_causal, mask, dropout_p, seed)
        return path.backward(g, q, k, v, u, kept, lse, coeffs.contiguous(), options)


class _Filter(torch.autograd.Function):
    """The same past torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        q, k, v, coeffs, mask, seed, *ctx.options = arguments
        ctx.path = _path(q, mask, ctx.options[-1])
        # what the backward pass has to be given beside U: the output, or W = A·U instead
        if any(ctx.needs_input_grad) and twofold.serves(q, k, v, mask, *ctx.options):
            ctx.path = twofold
            out, u, lse, kept = _run_forward(twofold, *arguments)
        else:
            out, u, lse = _run_forward(ctx.path, *arguments)
            kept = out
        ctx.save_for_backward(q, k, v, u, kept, lse, coeffs, mask, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _run_backward(ctx.path, g, *ctx.saved_tensors, *ctx.options)
        return (*gradients, None, None, None, None, None)


forward = torch.library.custom_op("gfsa::filter_attention", _forward, mutates_args=())
backward = torch.library.custom_op("gfsa::filter_attention_backward", _backward, mutates_args=())


@forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    coeffs = rest[3]
    return empty_like(q), empty_like(k), empty_like(v), coeffs.new_empty(coeffs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, coeffs, mask, seed, *ctx.options = inputs
    out, u, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(u, lse)
    ctx.save_for_backward(q, k, v, u, out, lse, coeffs, mask, seed)


def _differentiate(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 9
    gradients = backward(g, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_keep)
