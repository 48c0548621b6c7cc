"""Run by torchrun: each way to share a model out, against one process, as errors in a JSON file.

torchrun --nproc-per-node 2 tests/scale/workers/distributed.py RESULTS.json
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as cp_ring

import gfsa
from gfsa.filters import PartialPolynomial
from gfsa.plugs.tensor_parallel import ShardHeads
from support.subjects import HEADS, SUBJECTS, TERMS, Op, filters_of, first
from support.zoo import VOCABULARY, ZOO, randomise

KEY_HEADS = 2
"""Heads of Llama's keys: a head cannot be split."""
Results = dict[str, dict[str, float]]


def inputs_of(name: str, rank: int) -> dict[str, Tensor]:
    """What ``rank`` is given, the same whoever asks."""
    torch.manual_seed(100 + rank)
    batch = SUBJECTS[name.removesuffix(" +")].inputs(2, 6)
    return {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}


def loss_of(model: nn.Module, name: str, rank: int) -> Tensor:
    return first(model(**inputs_of(name, rank))).square().mean()


def plugged(name: str) -> tuple[Any, str]:
    """A model in float64 and its subject; "GPT-2 +" has the exclusive and the depth term."""
    subject = name.removesuffix(" +")
    return SUBJECTS[subject].plugged(terms=subject != name).double(), subject


def reference(name: str) -> tuple[Any, dict[str, Tensor]]:
    """One process: the model, and its gradients for what all ranks are given."""
    model, name = plugged(name)
    size = dist.get_world_size()
    sum(loss_of(model, name, rank) / size for rank in range(size)).backward()
    return model, gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert any("gfsa" in name for name in expected)
    errors = [
        ((found[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-3)).item()
        for name, tensor in expected.items()
    ]
    return max(errors)


def ddp(name: str, mesh: DeviceMesh) -> float:
    model, expected = reference(name)
    model.zero_grad()
    # BERT's and ViT's poolers have no part in these losses
    shared = DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(shared, name, dist.get_rank()).backward()
    found = gradients(model)
    return largest({key: found[key] for key in expected}, expected)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model; a bare filter is one itself."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return [block for blocks in lists[:1] for block in blocks]


def shard(
    model: nn.Module, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy | None = None
) -> Any:
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp(name: str, mesh: DeviceMesh) -> float:
    model, expected = reference(name)
    model.zero_grad()
    shard(model, mesh)
    assert all(hasattr(filter.theta, "full_tensor") for filter in filters_of(model))
    loss_of(model, name, dist.get_rank()).backward()
    error = largest({n: g for n, g in gradients(model).items() if n in expected}, expected)
    # outside of a forward too a filter is whole
    assert all(filter.coefficients().shape[0] == HEADS for filter in filters_of(model))
    return error


def fsdp_bfloat16(name: str, mesh: DeviceMesh) -> float:
    """Weights rounded for each forward, as a model in bfloat16 has them; gradients in float32."""
    model = SUBJECTS[name].plugged()
    alone = copy.deepcopy(model).bfloat16()
    batch = {
        k: x.bfloat16() if x.is_floating_point() else x
        for k, x in inputs_of(name, dist.get_rank()).items()
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh, policy)
    found, expected = first(model(**batch)), first(alone(**batch))
    found.float().square().mean().backward()
    assert found.dtype == torch.bfloat16
    assert all(filter.theta.dtype == torch.float32 for filter in filters_of(model))
    assert all(filter.theta.grad.dtype == torch.float32 for filter in filters_of(model))
    return ((found - expected).float().abs().max() / expected.float().abs().max()).item()


def deferred(name: str, mesh: DeviceMesh) -> float:
    """Built without values, sharded, then given memory: filters begin where filters begin."""
    alone = SUBJECTS[name].plugged()
    expected = {}
    for number, filter in enumerate(filters_of(alone)):
        filter.reset_parameters()
        expected[f"gfsa.{number}"] = filter.theta.detach().clone()
    model = copy.deepcopy(alone).to("meta")
    shard(model, mesh)
    model.to_empty(device="cpu")
    emptied = {f"gfsa.{n}": whole(f.theta.detach()) for n, f in enumerate(filters_of(model))}
    for filter in filters_of(model):
        with torch.no_grad():
            filter.theta.fill_(7.0)
        filter.reset_parameters()
    again = {f"gfsa.{n}": whole(f.theta.detach()) for n, f in enumerate(filters_of(model))}
    return max(largest(emptied, expected), largest(again, expected))


def checkpoints(name: str, mesh: DeviceMesh) -> float:
    """Sharded and full, through torch.distributed.checkpoint, and the filters alone."""
    model = SUBJECTS[name].plugged().double()
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    shard(model, mesh)
    other = SUBJECTS[name].plugged().double()
    randomise(other, scale=0.9)
    shard(other, mesh)
    folder = shared_folder()
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder / "sharded")
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder / "sharded")
    set_model_state_dict(other, state)
    restored = largest({n: whole(p.detach()) for n, p in other.named_parameters()}, expected)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    alone = SUBJECTS[name].plugged().double()
    randomise(alone, scale=0.9)
    alone.load_state_dict(full)
    error = largest({n: p.detach() for n, p in alone.named_parameters()}, expected)
    if not isinstance(model, Op):
        refusals(model, folder)
        gfsa.save(model, folder / "filters")
        dist.barrier()
        bare = SUBJECTS[name].plugged().double()
        gfsa.unplug(bare)
        gfsa.load(bare, folder / "filters")
        found = {n: p.detach() for n, p in bare.named_parameters()}
        error = max(error, largest(found, expected))
    return max(error, restored)


def refusals(model: nn.Module, folder: Path) -> None:
    """What is done to whole filters says so."""
    alone = SUBJECTS["BERT"].plugged()
    gfsa.save(alone, folder / f"alone-{dist.get_rank()}")
    message = "before fully_shard, parallelize_module or deepspeed"
    with pytest.raises(ValueError, match=message):
        gfsa.prune(model)
    with pytest.raises(ValueError, match=message):
        gfsa.load(shard(alone, None), folder / f"alone-{dist.get_rank()}")


def shared_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def plan(attention: str, columns: str, rows: str) -> dict[str, Any]:
    """Layers that are split by outputs and by inputs, and the filter of ``attention``."""
    return {
        f"{attention}.gfsa": ShardHeads(),
        **{name: ColwiseParallel() for name in columns.split()},
        **{name: RowwiseParallel() for name in rows.split()},
    }


PLANS = {
    "BERT": (
        "bert.encoder.layer",
        plan(
            "attention.self",
            "attention.self.query attention.self.key attention.self.value intermediate.dense",
            "attention.output.dense output.dense",
        ),
    ),
    "ViT": (
        "layers",
        plan(
            "attention",
            "attention.q_proj attention.k_proj attention.v_proj mlp.fc1",
            "attention.o_proj mlp.fc2",
        ),
    ),
    "Llama": (
        "model.layers",
        plan(
            "self_attn",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
            "self_attn.o_proj mlp.down_proj",
        ),
    ),
}


def tensor_parallel(name: str, mesh: DeviceMesh) -> float:
    """Every rank has all tokens and some heads."""
    torch.manual_seed(0)
    if name.startswith("Llama"):
        model = ZOO["llama"].model("sdpa").double()
        gfsa.plug(model, **(TERMS if name.endswith("+") else {}))
        randomise(model)
        ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "use_cache": False}
    else:
        model, batch = SUBJECTS[name].plugged().double(), inputs_of(name, 0)
    alone = copy.deepcopy(model)
    expected = first(alone(**batch))
    expected.square().mean().backward()
    wanted = gradients(alone)
    if name == "op":
        tensor_parallel_refusals(mesh)
        parallelize_module(model, mesh, {"gfsa": ShardHeads()})
        here = [x.chunk(mesh.size(), 1)[mesh.get_local_rank()] for x in batch.values()]
        found = model(*here)
        (found.square().sum() / expected.numel()).backward()
        expected = expected.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    else:
        layers, plan = PLANS[name.removesuffix(" +")]
        for layer in model.get_submodule(layers):
            parallelize_module(layer, mesh, plan)
        found = first(model(**batch))
        found.square().mean().backward()
    error = (found - expected).abs().max() / expected.abs().max()
    return max(error.item(), largest(gradients(model), wanted))


def tensor_parallel_refusals(mesh: DeviceMesh) -> None:
    for module, message in (
        (nn.Linear(4, 4), "ShardHeads is for a gfsa.GraphFilter"),
        (gfsa.Twicing(mesh.size() + 1), "cannot be sharded evenly"),
        (PartialPolynomial(HEADS, degree=2, high=[0]), "shard the unpruned model"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            parallelize_module(module, mesh, ShardHeads())


_OPTIONS = ("dropout_p", "is_causal")


def use_ring_on_cpu(load_balance: bool) -> None:
    """From now on, ``context_parallel`` works on CPU tensors; sums are kept in their dtype.

    Torch's ring attention is written for any kernel that returns a logsumexp, but handed to the
    CUDA kernels only; this passes it to the CPU's, with torch's own loops over the ring.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    cp_ring.custom_ops[attend.default] = _ring_forward
    cp_ring.custom_ops[differentiate.default] = _ring_backward
    cp_ring._cp_options.enable_load_balance = load_balance
    cp_ring._cp_options.convert_to_f32 = False


def _ring_forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    q, k, v = (tensor._local_tensor for tensor in args[:3])
    options = {**dict(zip(_OPTIONS, args[3:], strict=False)), **kwargs}
    results = cp_ring._templated_ring_attention(mesh.get_group(), 2, op, q, k, v, **options)
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


def _ring_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = {name: tensor._local_tensor for name, tensor in zip(names, args, strict=False)}
    options = {**dict(zip(_OPTIONS, args[len(names) :], strict=False)), **kwargs}
    results = cp_ring._templated_ring_attention_backward(
        mesh.get_group(), 2, op, grad_out_name="grad_out", **tensors, **options
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)


def ring(name: str, mesh: DeviceMesh, causal: bool, load_balance: bool) -> float:
    """Every rank has all heads and some tokens."""
    use_ring_on_cpu(load_balance)
    torch.manual_seed(0)
    model, name = plugged(name)
    length = 8 * mesh.size()
    if name == "op":
        model.causal = causal
        batch = {k: x.double() for k, x in SUBJECTS[name].inputs(2, length).items()}
    else:
        places = torch.arange(length).repeat(2, 1)
        batch = {"input_ids": torch.randint(3, VOCABULARY, (2, length)), "position_ids": places}
    options = {}
    if name == "GPT-2":
        options = {"use_cache": False}
        for module in model.transformer.h:
            # the order of tokens is the ring's business: no mask is made from positions
            module.attn.register_forward_pre_hook(_causal_without_mask, with_kwargs=True)
    alone = copy.deepcopy(model)
    expected = first(alone(**batch, **options))
    weights = torch.randn_like(expected)
    axis = 2 if name == "op" else 1
    (expected * weights).sum().backward()
    wanted = gradients(alone)
    buffers = [*batch.values(), weights]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[axis] * len(buffers)):
        found = first(model(**batch, **options))
        assert found.shape[axis] == length // mesh.size()
        (found * weights).sum().backward()
        (found,) = context_parallel_unshard(mesh, [found.detach()], [axis])
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    error = (found - expected).abs().max() / expected.abs().max()
    return max(error.item(), largest(gradients(model), wanted))


def _causal_without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "attention_mask": None, "is_causal": True}


def rings(name: str, mesh: DeviceMesh) -> float:
    if name == "BERT":
        return ring(name, mesh, causal=False, load_balance=False)
    errors = [ring(name, mesh, True, False), ring(name, mesh, True, True)]
    if name == "op":
        errors.append(ring(name, mesh, False, False))
    return max(errors)


EVERYONE = tuple(SUBJECTS)
SCENARIOS: dict[str, tuple[Callable[[str, DeviceMesh], float], Sequence[str]]] = {
    "ddp": (ddp, (*EVERYONE, "GPT-2 +")),
    "fsdp": (fsdp, (*EVERYONE, "GPT-2 +")),
    # PyG's GIN multiplies by a float32 buffer, with which bfloat16 weights do not go
    "fsdp_bfloat16": (fsdp_bfloat16, EVERYONE[:-1]),
    "deferred": (deferred, ("op", "BERT", "GPT-2")),
    "checkpoints": (checkpoints, EVERYONE),
    "tensor_parallel": (tensor_parallel, ("op", "BERT", "ViT", "Llama", "Llama +")),
    "context_parallel": (rings, ("op", "BERT", "GPT-2", "GPT-2 +")),
}


def main() -> None:
    torch.set_num_threads(1)
    # plugging looks at every object: this takes those of the imports, nearly all, out of its way
    gc.freeze()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results: Results = {}
    for scenario, (run, names) in SCENARIOS.items():
        for name in names:
            if name.startswith("Llama") and mesh.size() > KEY_HEADS:
                continue
            error = torch.tensor(run(name, mesh))
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
            results.setdefault(scenario, {})[name] = error.item()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
