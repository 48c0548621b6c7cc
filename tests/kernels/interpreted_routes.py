"""Routes whose kernels Triton's interpreter runs: what is said to run runs, and is right.

Not collected by itself: ``test_interpreted.py`` runs this file in a process of its own.
"""

import support.triton_interpreter  # isort:skip  (before anything imports triton)

import pytest
import torch

from gfsa.kernels import op, routes
from gfsa.kernels.routes import Hardware
from support.route_cases import CASES, FORWARD, HOPPER_CASES, Case, check

assert support.triton_interpreter


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_said_is_what_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = (9, 0) if case.gradient == "none" else (8, 0)
    hardware = Hardware(gpu, routes.MEASURED_TRITON, None)
    monkeypatch.setattr(routes, "hardware_of", lambda q: hardware)
    check(case, "cpu", torch.float16)


def test_every_route_has_a_case_and_kernels() -> None:
    names = {route.name for route in routes.ROUTES}
    assert {case.route for case in (*CASES, *HOPPER_CASES)} == names == set(FORWARD)
    own = {*op.FORWARD, "around_torch"}
    assert own == names
