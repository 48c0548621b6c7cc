"""torch.export and ONNX: programs that run without gfsa, at any batch size and length."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import gfsa
from support.subjects import SUBJECTS, first
from support.zoo import randomise

WORKER = Path(__file__).parent / "workers" / "exported.py"
WHOLE = ["op", "BERT", "GPT-2", "ViT"]
SIZES = [(2, 6), (5, 9)]
BATCH, LENGTH = Dim("batch", min=2, max=64), Dim("length", min=3, max=60)


class TextAnswer(nn.Module):
    """A model that returns one tensor, so that nothing but torch is needed to read the program."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return first(self.model(input_ids=input_ids, attention_mask=attention_mask))


class ImageAnswer(TextAnswer):
    def forward(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]
        return first(self.model(pixel_values=pixel_values))


def answering(name: str, prune: bool = False) -> Any:
    model = SUBJECTS[name].plugged()
    if hasattr(model, "config"):
        # a prefill: the whole prompt at once, no cache to hand on
        model.config.use_cache = False
    if prune:
        for filter in gfsa.filters_of(model).values():
            with torch.no_grad():
                filter.theta[1:, 2] = 0.0
        gfsa.prune(model, tolerance=1e-6)
    if name == "op":
        return model
    return (ImageAnswer if name == "ViT" else TextAnswer)(model).eval()


@torch.no_grad()
def exported(name: str, model: nn.Module) -> ExportedProgram:
    inputs = SUBJECTS[name].inputs(*SIZES[0])
    axes = {0: BATCH} if name == "ViT" else {0: BATCH, 2 if name == "op" else 1: LENGTH}
    shapes = dict.fromkeys(inputs, axes)
    return torch.export.export(model, (), inputs, dynamic_shapes=shapes)


@pytest.mark.slow
@torch.no_grad()
def test_programs_run_without_gfsa(tmp_path: Path) -> None:
    for name in [*WHOLE, "BERT pruned"]:
        subject, _, prune = name.partition(" ")
        model = answering(subject, bool(prune))
        program = exported(subject, model)
        batches = [SUBJECTS[subject].inputs(*size) for size in SIZES]
        pairs = [(inputs, model(**inputs)) for inputs in batches]
        for inputs, expected in pairs:
            assert torch.equal(program.module()(**inputs), expected)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        torch.save(pairs, tmp_path / f"{name}.pt")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")[:-1]) == sorted([*WHOLE, "BERT pruned"])


def onnx_session(name: str, file: Path) -> tuple[Any, Any]:
    runtime = pytest.importorskip("onnxruntime", reason="pip install 'gfsa[export]'")
    pytest.importorskip("onnxscript", reason="pip install 'gfsa[export]'")
    model = answering(name)
    torch.onnx.export(exported(name, model), dynamo=True, verbose=False).save(str(file))
    return model, runtime.InferenceSession(file, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "name", ["op", *(pytest.param(n, marks=pytest.mark.slow) for n in WHOLE[1:])]
)
@torch.no_grad()
def test_onnx_runtime(name: str, tmp_path: Path) -> None:
    model, session = onnx_session(name, tmp_path / "model.onnx")
    for size in SIZES:
        inputs = SUBJECTS[name].inputs(*size)
        (found,) = session.run(None, {key: x.numpy() for key, x in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(found), model(**inputs), rtol=1e-5, atol=1e-5)


def test_the_filters_are_in_the_program() -> None:
    """Other numbers, another program: nothing was folded away as if it were not there."""
    model, other = answering("BERT"), answering("BERT")
    randomise(other, scale=0.9)
    inputs = SUBJECTS["BERT"].inputs(*SIZES[0])
    program = exported("BERT", model)
    numbers = {name for name, _ in model.named_parameters() if ".gfsa." in name}
    assert numbers
    assert numbers <= program.state_dict.keys()
    assert not torch.allclose(program.module()(**inputs), other(**inputs))


def test_torch_jit_script_says_what_to_use_instead() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    gfsa.plug(layer, wK=0.2)
    with pytest.raises(TypeError, match=r"cannot compile GFSA.*torch\.jit\.trace, or gfsa\.unplug"):
        torch.jit.script(layer)
    x, longer = torch.randn(2, 5, 8), torch.randn(3, 7, 8)
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,))
        torch.testing.assert_close(traced(longer), layer(longer))
    gfsa.unplug(layer)
    torch.jit.script(layer)
