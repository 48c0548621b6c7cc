"""The filter as a torch operator: seen whole by autograd, ``torch.compile`` and CUDA graphs."""

# no postponed annotations here: the operator's schema is read from them
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from gfsa.operators.base import PLAIN
from gfsa.operators.fused import coefficients
from gfsa.operators.fused.coefficients import Affine
from gfsa.operators.fused.launcher import copyable_by_tile, empty_like, on_device_of
from gfsa.operators.fused.long import cudnn_backward as twofold
from gfsa.operators.fused.long import launch as passes
from gfsa.operators.fused.long.launch import Options
from gfsa.operators.fused.short import launch as short
from gfsa.operators.fused.short.prepared import ready_for


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
    options = (mask, seed, dropout_p, is_causal, scale)
    # the registered operator costs several times the kernels' own launches on short sequences;
    # it is for those who have to see it: the compiler, and modes that record what runs
    if must_be_seen(q):
        return forward(q, k, v, coeffs, *options)[0]
    if torch.is_grad_enabled():
        return _Filter.apply(q, k, v, coeffs, mask, seed, (None, dropout_p, is_causal, scale))
    return _forward(q, k, v, coeffs, *options)[0]


def affine_filter_attention(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, affine: Affine, *options: Any
) -> Tensor:
    """The same with coefficients ``base + θ·basis``, and the gradient of θ, in eager mode."""
    if torch.is_grad_enabled():
        mask, seed, *others = options
        return _Filter.apply(q, k, v, theta, mask, seed, (affine, *others))
    return _forward(q, k, v, coefficients.forward(theta, affine), *options)[0]


def must_be_seen(q: Tensor) -> bool:
    """Whether somebody looks at what runs, so that it has to be a registered operator."""
    return torch.compiler.is_compiling() or type(q) not in PLAIN or is_in_torch_dispatch_mode()


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
    ready = ready_for(q, k, v, mask, dropout_p, is_causal, scale)
    if ready is not None:
        return ready.forward(q, k, v, coeffs.contiguous(), mask, seed)
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
    *gradients, parts = _run_backward(
        _path_back(q, k, v, mask, dropout_p, is_causal, scale),
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
    dq, dk, dv = gradients
    return dq, dk, dv, coefficients.total(parts)


def _path(q: Tensor, mask: Tensor | None, scale: float) -> ModuleType:
    return passes if short.why_not(q, mask, scale) else short


def _path_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> ModuleType:
    """Which way the gradient goes; the output and what is kept are the same on all of them."""
    if twofold.serves(q, k, v, mask, dropout_p, is_causal, scale):
        return twofold
    return _path(q, mask, scale)


def _run_forward(
    path: ModuleType, q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, *rest: Any
) -> Any:
    mask, seed, dropout_p, is_causal, scale = rest
    options = Options(scale, is_causal, mask, dropout_p, seed)
    q, k, v = copyable_by_tile(q), copyable_by_tile(k), copyable_by_tile(v)
    with on_device_of(q):
        return path.forward(q, k, v, coeffs.contiguous(), options)


def _run_backward(path: ModuleType, g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    u, out, lse, coeffs, mask, seed, dropout_p, is_causal, scale = rest
    options = Options(scale, is_causal, mask, dropout_p, seed)
    # hooks on saved tensors may give them back in another layout
    g, q, k, v, u, out = [copyable_by_tile(x) for x in (g, q, k, v, u, out)]
    with on_device_of(q):
        return path.backward(g, q, k, v, u, out, lse, coeffs.contiguous(), options)


class _Filter(torch.autograd.Function):
    """The same past torch's dispatcher, of coefficients or of what they are made from."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        others: tuple[Affine | None, float, bool, float],
    ) -> Tensor:
        # what is no tensor comes as one argument: torch looks at each of them by itself
        affine, options = others[0], others[1:]
        ctx.options, ctx.affine, ctx.ready = options, affine, None
        coeffs = numbers if affine is None else coefficients.forward(numbers, affine)
        ready = ready_for(q, k, v, mask, *options)
        if ready is not None:
            ctx.ready, ctx.path, coeffs = ready, short, coeffs.contiguous()
            out, u, lse = ready.forward(q, k, v, coeffs, mask, seed)
            ctx.save_for_backward(q, k, v, u, out, lse, coeffs, mask, seed)
            return out
        ctx.path = _path_back(q, k, v, mask, *options)
        out, u, lse = _run_forward(ctx.path, q, k, v, coeffs, mask, seed, *options)
        ctx.save_for_backward(q, k, v, u, out, lse, coeffs, mask, seed)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # somebody wants to differentiate once more, and is told that there is no way
            return _Filter._backward_once(ctx, g)
        return _Filter._backward(ctx, g)

    @staticmethod
    def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        affine, saved, gradients = ctx.affine, ctx.saved_tensors, None
        if ctx.ready is not None:
            gradients = ctx.ready.backward(g, *saved)
        if gradients is None:
            gradients = _run_backward(ctx.path, g, *saved, *ctx.options)
        dq, dk, dv, parts = gradients
        dnumbers = (
            coefficients.total(parts) if affine is None else coefficients.backward(parts, affine)
        )
        return dq, dk, dv, dnumbers, None, None, None

    _backward_once = staticmethod(once_differentiable(_backward))


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
