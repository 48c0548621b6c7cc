"""A tiny tensor-parallel GPT of Megatron-core: ``torchrun -m engines.megatron_worker FOLDER``.

On the CPU. Every process writes what it saw to ``FOLDER/WORLD-RANK.pt``.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Megatron asks for the current CUDA device, and forks CUDA's random state
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from gfsa.engines.megatron import with_filters  # noqa: E402

random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()

LAYERS, HEADS, LENGTH, VOCABULARY = 2, 4, 16, 64


def configuration(groups: int = 2, **changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": HEADS,
        "num_query_groups": groups,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": dist.get_world_size(),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": False,
    }
    return TransformerConfig(**settings | changes)


def gpt(spec: Any, groups: int = 2, length: int = LENGTH, **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(
        config=configuration(groups, **changes),
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=length,
        parallel_output=False,
    )


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))
    future = torch.ones(length, length).triu(1).bool()[None, None]
    return ids, torch.arange(length).expand(2, -1), future


def filters(model: GPTModel) -> list[Any]:
    return [layer.self_attention.core_attention.gfsa for layer in model.decoder.layers]


def add_noise(model: GPTModel) -> None:
    """The same numbers for a head in whatever process it is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, filter in enumerate(filters(model)):
        noise = torch.randn(HEADS, 3, generator=torch.Generator().manual_seed(number)) * 0.3
        with torch.no_grad():
            filter.theta.copy_(noise.chunk(size)[rank])


def start() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    random.model_parallel_cuda_manual_seed = lambda *_: None


def main(folder: Path) -> None:
    start()
    world, rank = dist.get_world_size(), dist.get_rank()
    saw: dict[str, Any] = {}
    for groups in (2, HEADS):
        plain = gpt(get_gpt_layer_local_spec(), groups)
        model = gpt(with_filters(get_gpt_layer_local_spec(), K=3), groups)
        missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
        assert not unexpected
        fresh = torch.equal(model(*inputs()), plain(*inputs()))
        add_noise(model)
        logits = model(*inputs())
        logits.logsumexp(-1).mean().backward()
        sharded = model.sharded_state_dict()
        saw[f"{groups} groups"] = {
            "fresh": fresh,
            "logits": logits.detach(),
            "plain": plain(*inputs()).detach(),
            "gradients": [filter.theta.grad for filter in filters(model)],
            "coefficients": [filter.coefficients().detach() for filter in filters(model)],
            "missing": [key for key in missing if "gfsa" in key],
            "sharded": {
                key: (tuple(value.global_shape), tuple(value.global_offset))
                for key, value in sharded.items()
                if key.endswith("gfsa.theta")
            },
            "described": [key for key in sharded if key.endswith("gfsa._extra_state")],
        }
    torch.save(saw, folder / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
