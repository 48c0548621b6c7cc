"""The suite ``deploy``: inference of an encoder in eager mode, compiled, and by ONNX Runtime."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfsa.plugs import filters_of, plug
from gfsa.plugs.prune import prune
from gfsa_benchmarks.case import Case, Setting, Shape, Variant

LAYERS = 4
VOCABULARY = 30522


def deploy(shape: Shape, setting: Setting) -> Case:
    """A BERT-shaped encoder without filters, with them, and with half of their heads pruned."""
    if shape.causal or shape.padded:
        raise ValueError(
            f"the deploy suite takes neither causal nor padded shapes, got the shape {shape}"
        )
    models = {"plain": _encoder(shape, setting)}
    for name in ("gfsa", "gfsa, half pruned"):
        models[name] = copy.deepcopy(models["plain"])
        _filter(models[name])
    _prune_half(models["gfsa, half pruned"])
    ids = torch.randint(VOCABULARY, (shape.batch, shape.tokens), device=setting.device)
    ways: dict[str, Callable[[nn.Module, Tensor], Callable[[], object]]] = {
        "eager": _eager,
        "inductor": _compiled,
    }
    if setting.device.type == "cpu" and setting.dtype == torch.float32:
        ways["onnxruntime"] = _onnx
    variants = [
        Variant(name, way, prepare(model, ids), step=None)
        for way, prepare in ways.items()
        for name, model in models.items()
    ]
    return Case(str(shape), variants)


class _LastState(nn.Module):
    """Returns the encoder's last state alone, as an exported program would."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        state: Tensor = self.model(input_ids=input_ids)[0]
        return state


def _encoder(shape: Shape, setting: Setting) -> nn.Module:
    from transformers import BertConfig, BertModel

    width = shape.heads * shape.dim
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=shape.heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, shape.tokens),
    )
    model = BertModel(config, add_pooling_layer=False)
    return _LastState(model).eval().to(setting.device, setting.dtype)


def _filter(model: nn.Module) -> None:
    plug(model, K=3)
    for graph_filter in filters_of(model).values():
        # none is zero, so that no operator can skip a term
        nn.init.constant_(graph_filter.get_parameter("theta"), 0.1)


def _prune_half(model: nn.Module) -> None:
    for graph_filter in filters_of(model).values():
        with torch.no_grad():
            graph_filter.get_parameter("theta")[graph_filter.num_heads // 2 :, 2] = 0.0
    prune(model, tolerance=1e-6)


def _eager(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    return torch.no_grad()(lambda: model(ids))


def _compiled(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    return _eager(torch.compile(model, fullgraph=True), ids)  # type: ignore[arg-type]


def _onnx(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(
            "the deploy suite needs ONNX Runtime: pip install 'gfsa[export]'"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        with torch.no_grad():
            program: Any = torch.onnx.export(model, (ids,), dynamo=True, verbose=False)
        program.save(str(file))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: ids.numpy()}
    return lambda: session.run(None, feed)
