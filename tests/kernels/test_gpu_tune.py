"""``gfsa tune`` on a GPU, as it runs on one that was not measured: Ampere and Blackwell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gfsa.kernels import routes, tuned, two_pass
from gfsa.kernels.tune_gpu import GPU
from gfsa.kernels.tuned import Row, Shape
from gfsa.operators import AttentionCall
from support.nothing_launched import fresh_launches

# a length for each kind of kernels; other tiles at 4,096
SHAPES = [
    Shape(2, 64, 128, False, True),
    Shape(2, 64, 4096, True, False),
    Shape(2, 128, 4096, False, False),
    Shape(1, 64, 1024, True, False),
]


@pytest.fixture(params=[(8, 0), (10, 0)], ids=["Ampere", "Blackwell"])
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The file of measurements, for a GPU that says it is another one.

    (8, 0) reads tiles by addresses, (10, 0) by the copy engine; the code is compiled for the GPU
    that is there.
    """
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("GFSA_TUNED", str(path))
    monkeypatch.setattr(routes, "_capability", lambda device: request.param)
    # what other tests have launched by the copy engine is found by shape
    for kernel in two_pass._KERNELS.values():
        monkeypatch.setattr(kernel, "compiled", {})
    tuned._rows.cache_clear()
    with fresh_launches():
        yield path
    tuned._rows.cache_clear()


def chosen(shape: Shape) -> str:
    """Whose kernels ``auto`` takes for such a call; one around torch's attention is ours."""
    size = (1, 2, shape.tokens, shape.head_dim)
    q = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    mask = None
    if shape.masked:
        mask = torch.ones(1, 1, 1, shape.tokens, dtype=torch.bool, device="cuda")
    call = AttentionCall(q, q, mask, is_causal=shape.causal)
    route = routes.decide(routes.situation_of(call, q, shape.degree)).route
    return "sdpa" if route == "sdpa" else "fused"


def test_what_is_measured_is_right_and_is_what_auto_takes(file: Path) -> None:
    assert {chosen(shape) for shape in SHAPES} == {"sdpa"}
    gpu = GPU(torch.device("cuda", torch.cuda.current_device()))
    assert set(gpu.prepare(SHAPES)) == set(SHAPES)
    rows: list[Row] = []
    for shape in SHAPES:
        row = gpu.measure(shape)
        assert not isinstance(row, str), (shape, row)
        assert row.is_right, row
        assert row.fused_ms > 0
        assert row.torch_ms > 0
        rows.append(row)
    machine = tuned.this_machine(gpu.device)
    tuned.write(file, machine, rows)
    assert tuned.read(file) == {machine: dict(zip(SHAPES, rows, strict=True))}
    for row in rows:
        assert chosen(row.shape) == ("fused" if row.is_faster else "sdpa"), row
