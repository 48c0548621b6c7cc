"""Runs every kind of fused kernel once, forward and backward, on small tensors.

compute-sanitizer --tool memcheck python benchmarks/sanitize.py

``--tool racecheck`` checks shared memory in the same way. The tool comes with CUDA and in the
package nvidia-cuda-sanitizer-api.
"""

from __future__ import annotations

import torch

from gfsa.functional import graph_filter_attention, which_backend
from gfsa.operators import AttentionOperator, Visibility
from gfsa.operators.fused import eligibility
from gfsa.operators.fused.decode import decode
from gfsa.operators.fused.problem import Options
from gfsa.operators.fused.sweep import launch as sweep

# tokens, head dim, degree, causal, whether some keys are padding, dropout
CASES = (
    (100, 64, 2, False, True, 0.0),
    (128, 64, 2, True, False, 0.1),
    (197, 40, 2, False, False, 0.0),
    (64, 64, 1, False, True, 0.0),
    (300, 64, 2, True, False, 0.0),
    (290, 32, 2, False, True, 0.1),
    (2048, 128, 2, True, False, 0.0),
    (300, 64, 1, True, False, 0.0),
    (300, 40, 1, False, True, 0.0),
    (1100, 64, 1, True, False, 0.0),
    (1100, 64, 1, False, False, 0.0),
    (1100, 128, 1, True, False, 0.0),
)


def main() -> None:
    # one pass also where it was not timed
    eligibility.ONE_PASS_NARROWEST, eligibility.ONE_PASS_MASKS_ARE_MEASURED = 33, True
    for tokens, dim, degree, is_causal, padded, dropout_p in CASES:
        q, k, v = (
            torch.randn(2, 2, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        coeffs = torch.randn(2, degree + 1, device="cuda", requires_grad=True)
        mask = None
        if padded:
            mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device="cuda")
            mask[1, ..., tokens // 2 :] = False
        arguments = (q, k, v, coeffs, mask, dropout_p, is_causal)
        y = graph_filter_attention(*arguments)
        y.backward(torch.randn_like(y))
        torch.cuda.synchronize()
        ran = which_backend(*arguments).backend
        print(f"{tokens} tokens of {dim}, degree {degree}, {is_causal=}: {ran}")
    for dim in (64, 128):
        packed(dim)
        decoded(dim)
        swept(dim)


def decoded(dim: int) -> None:
    """One token after 299, whose keys several programs share."""
    q, k, v, u = torch.randn(4, 2, 2, 300, dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    coeffs = torch.randn(2, 3, device="cuda")
    for _ in range(2):
        decode(q[:, :, -1:], k, v, u, coeffs, None, None, None, dim**-0.5)
    torch.cuda.synchronize()
    print(f"one token of {dim} after 299")


def swept(dim: int) -> None:
    """The causal forward in one sweep, where it was not timed as well."""
    q = torch.randn(2, 4, 300, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 300, dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    coeffs = torch.randn(4, 3, device="cuda")
    sweep.forward(q, k, v, coeffs, None, None, Options(dim**-0.5, True))
    torch.cuda.synchronize()
    print(f"300 tokens of {dim} in one causal sweep")


def packed(dim: int) -> None:
    """Documents of 100, 1 and 189 tokens in a window."""
    q, k, v = (
        torch.randn(1, 2, 290, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    visible = Visibility.packed(torch.tensor([0, 100, 101], device="cuda"), 290, window=90)
    coeffs = torch.randn(2, 3, device="cuda", requires_grad=True)
    y = AttentionOperator(q, k, visible=visible, backend="fused").polynomial(coeffs, v)
    y.backward(torch.randn_like(y))
    torch.cuda.synchronize()
    print(f"290 tokens of {dim}, packed: fused")


if __name__ == "__main__":
    main()
