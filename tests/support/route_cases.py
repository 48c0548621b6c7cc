"""Every route of the kernels on a shape of its own: what is said to run is what runs, and is right.

Used in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from gfsa.kernels.launching import Launch
from gfsa.kernels.routes import Decision
from gfsa.operators import AttentionOperator, DenseOperator, Visibility
from support.fused_cases import error

# the kernels that are launched by a route, and by a gradient, besides those of coefficients
FORWARD = {
    "short": {"filter_short"},
    "sweep": {"filter_sweep"},
    "two_pass": {"attend", "combine"},
    "one_sweep": {"filter_sweep"},
    "around_torch": {"combine_around"},
}
GRADIENT = {
    "none": set(),
    "short": {"grad_short"},
    "two_pass": {"grad_first_pass", "grad_keys", "grad_queries"},
    "around_torch": {"grad_around"},
}
HOPPER_GRADIENT = {
    1: {"grad_queries_one", "grad_keys_one"},
    2: {"grad_first_pass", "grad_keys", "grad_queries"},
}
ELSEWHERE = {"plan_blocks", "add_parts", "fold", "unfold"}


class Case(NamedTuple):
    route: str
    gradient: str
    degree: int
    shape: tuple[int, int, int, int]
    causal: bool = False
    mask: str = ""
    exclusive: bool = False
    key_heads: int = 0


CASES = [
    Case("two_pass", "two_pass", 2, (2, 2, 301, 64), causal=True),
    Case("two_pass", "two_pass", 2, (1, 2, 70, 72), mask="keys"),
    Case("two_pass", "two_pass", 1, (2, 2, 269, 32), causal=True, mask="keys"),
    Case("two_pass", "two_pass", 1, (1, 2, 269, 32), mask="documents"),
    Case("around_torch", "around_torch", 1, (2, 2, 300, 40)),
    Case("around_torch", "around_torch", 1, (2, 4, 300, 40), exclusive=True, key_heads=2),
    Case("around_torch", "around_torch", 1, (1, 2, 100, 32), True, "keys", exclusive=True),
    Case("around_torch", "around_torch", 1, (1, 2, 60, 256), True, key_heads=1, exclusive=True),
]
# on a Hopper GPU alone: Gluon has no interpreter
HOPPER_CASES = [
    Case("short", "short", 2, (2, 2, 100, 64)),
    Case("short", "short", 1, (2, 2, 100, 64), causal=True, mask="keys"),
    Case("sweep", "hopper", 2, (8, 12, 1024, 64), causal=True),
    Case("sweep", "two_pass", 2, (2, 48, 1026, 128), causal=True),
    Case("sweep", "hopper", 2, (2, 48, 1024, 64), mask="documents"),
    Case("two_pass", "hopper", 2, (2, 2, 300, 64)),
    Case("one_sweep", "none", 1, (1, 2, 200, 64), causal=True),
    Case("one_sweep", "none", 1, (2, 4, 100, 64), exclusive=True, key_heads=2),
    Case("one_sweep", "hopper", 1, (2, 2, 300, 64)),
    Case("one_sweep", "hopper", 1, (2, 2, 600, 96), True, exclusive=True),
    Case("one_sweep", "hopper", 1, (2, 2, 600, 128), causal=True),
    Case("one_sweep", "hopper", 1, (1, 2, 300, 64), mask="documents"),
    Case("one_sweep", "hopper", 1, (2, 4, 300, 64), exclusive=True, key_heads=2),
    Case("one_sweep", "hopper", 1, (2, 2, 128, 64), exclusive=True),
    Case("one_sweep", "hopper", 1, (2, 4, 600, 128), True, exclusive=True, key_heads=2),
    Case("one_sweep", "hopper", 1, (4, 5, 1024, 64), True, exclusive=True),
    Case("one_sweep", "hopper", 1, (1, 2, 300, 64), mask="documents", exclusive=True),
]


@contextmanager
def launched() -> Iterator[list[str]]:
    """The names of the kernels that are launched."""
    names: list[str] = []
    call = Launch.__call__

    def recording(launch: Launch, *arguments: Any, **options: Any) -> None:
        names.append(launch.kernel.function.fn.__name__)
        call(launch, *arguments, **options)

    with mock.patch.object(Launch, "__call__", recording):
        yield names


def check(case: Case, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, heads, length, _ = case.shape
    grad = case.gradient != "none"
    q, k, v, g = (torch.randn(case.shape, device=device, dtype=dtype) for _ in range(4))
    k, v = (x[:, : case.key_heads or heads].contiguous() for x in (k, v))
    coeffs = torch.randn(heads, case.degree + 1, device=device)
    mask, visible = None, None
    if case.mask == "keys":
        mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=device)
        mask[0, ..., length - 7 :] = False
    elif case.mask == "documents":
        starts = torch.tensor([0, length // 3], device=device)
        visible = Visibility.packed(starts, length)
    share = [torch.randn(heads, device=device)] if case.exclusive else []
    inputs = [x.requires_grad_(grad) for x in (q, k, v, coeffs, *share)]
    with torch.set_grad_enabled(grad):
        operator = AttentionOperator(
            *(q, k, mask),
            is_causal=case.causal,
            enable_gqa=bool(case.key_heads),
            backend="fused",
            visible=visible,
        )
        said: Decision = operator.which(coeffs, v, case.exclusive)
        with launched() as forward:
            y = operator.polynomial(coeffs, v, *share)
        with launched() as backward:
            got = [y, *(torch.autograd.grad(y, inputs, g) if grad else ())]
    assert (said.route, said.gradient) == (case.route, case.gradient)
    ran = set(forward) - ELSEWHERE
    # the first of two passes may be cuDNN's
    assert ran == FORWARD[said.route] or (said.route == "two_pass" and ran == {"combine"}), ran
    ran = {"grad_queries" if name == "finish_queries" else name for name in backward} - ELSEWHERE
    expected = GRADIENT.get(said.gradient, HOPPER_GRADIENT[case.degree])
    assert ran == expected, ran
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dense_mask = mask if visible is None else visible.whole(length, q.device)
    dense = DenseOperator.from_qk(*exact[:2], dense_mask, case.causal)
    y = dense.polynomial(exact[3], exact[2], *exact[4:])
    wanted = [y, *(torch.autograd.grad(y, exact, g.double()) if grad else ())]
    for name, x, z in zip(("out", "dq", "dk", "dv", "dc", "da"), got, wanted, strict=False):
        assert error(x, z) <= 8 * torch.finfo(dtype).eps, (name, error(x, z))
