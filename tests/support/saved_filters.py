"""Small models with weights by formula, and what earlier versions saved from them.

Weights and inputs do not come from a random generator, so every version of torch builds the same.
``data/saved-at-d3ade9e.zip`` was written by the library at commit d3ade9e and is never made again:
folders of `gfsa.save` and of `save_pretrained`, a whole ``state_dict.pt``, and the outputs in
``expected.json``.
"""

from __future__ import annotations

import functools
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import gfsa

DATA = Path(__file__).parents[1] / "data"


@functools.cache
def unpacked(name: str) -> Path:
    """A folder of this process with the files of an archive in ``tests/data``."""
    kept = tempfile.TemporaryDirectory()
    _UNPACKED.append(kept)
    zipfile.ZipFile(DATA / f"{name}.zip").extractall(kept.name)
    return Path(kept.name)


_UNPACKED: list[tempfile.TemporaryDirectory[str]] = []
FOLDER = unpacked("saved-at-d3ade9e")

# the filter folders, by what their filters are
PLUGGED = (
    *("gfsa", "exact", "degree-1", "lr-multiplier", "dropout-after"),
    *("polynomial", "pagerank", "pruned"),
)


def waves(shape: tuple[int, ...], phase: float) -> Tensor:
    """Numbers between -1 and 1 without a pattern that a shift of the axes would keep."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + phase).view(shape)


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Give every parameter numbers that depend on its place in the model alone."""
    for place, parameter in enumerate(model.parameters()):
        offset = 1.0 if parameter.dim() == 1 else 0.0
        parameter.copy_(offset + 0.4 * waves(tuple(parameter.shape), phase=place))
    return model.eval()


@torch.no_grad()
def fill_filters(model: nn.Module) -> None:
    """Move every filter away from ordinary attention, each head by other numbers."""
    for place, filter in enumerate(gfsa.filters_of(model).values()):
        filter.theta.add_(0.3 * waves(tuple(filter.theta.shape), phase=0.5 + place))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=True)
    return fill(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 13, "max_position_embeddings": 9, "hidden_size": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return fill(BertModel(BertConfig(**sizes, **heads)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 13, "n_positions": 9, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return fill(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))


PRETRAINED: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2}


@torch.no_grad()
def output_of(model: nn.Module) -> Tensor:
    """What the model makes of one fixed input, in evaluation."""
    model.eval()
    if isinstance(model, nn.TransformerEncoder):
        return model(waves((2, 5, 8), phase=0.3).float())
    ids = torch.tensor([[1, 7, 3, 12, 5], [2, 2, 9, 4, 0]])
    return model(input_ids=ids, use_cache=False)[0]
