"""Overrides for torchtitan: filters, their own rate, and checkpoints that keep them.

.. code-block:: bash

    torchrun … -m torchtitan.train --module llama3 --config llama3_8b --override.imports \\
        'gfsa.titan.filters={"K": 3}' 'gfsa.titan.optimizer={"lr": 0.01}' gfsa.titan.checkpoint

or, in a configuration function of one's own, all three by :func:`plug`.

A DCP checkpoint has every key of the model, filters too. The adapters that rename keys for
transformers have a table of names, to which those of the filters are added, as
``gfsa.from_pretrained`` reads them. What each filter is has a file of its own there, because torch
merges files of floating-point numbers only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from safetensors.torch import save_file
from spmd_types.runtime import get_partition_spec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import derive, override
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger, warn_once
from torchtitan.trainer import Trainer

from gfsa.filters import GraphFilter, spec
from gfsa.operators import FunctionOperator
from gfsa.plugs.adapter import CHILD, names_in_forward
from gfsa.plugs.saving.files import filter_tensors
from gfsa.plugs.sites import select_layers

_PATTERN = rf"\.{CHILD}\."


@override(target=GQAttention.Config, exact=True, description="graph-filter self-attention")
def filters(
    attention: GQAttention.Config, filter: str = "GFSA", **arguments: Any
) -> FilteredAttention.Config:
    """Attention with a filter on its map.

    Args:
        attention: the layer's configuration.
        filter: the name of a filter of gfsa: ``GFSA``, ``Polynomial``, ``Twicing`` …
        arguments: for the filter, such as ``K``, ``learn`` and ``power`` of :class:`gfsa.GFSA`.
    """
    of_filter = FilterConfig(n_heads=attention.n_heads, kind=filter, arguments=arguments)
    return derive(attention, FilteredAttention.Config, gfsa=of_filter)


@override(target=OptimizersContainer.Config, exact=True, description="a rate for graph filters")
def optimizer(
    optimizers: OptimizersContainer.Config, lr: float, weight_decay: float = 0.0
) -> OptimizersContainer.Config:
    """The filters in a group of their own; otherwise it is as the last group of ``optimizers``.

    ``lr_multiplier`` of a filter would raise the gradient's norm instead, and clipping would then
    slow down every weight.

    Args:
        optimizers: the configuration of the optimisers.
        lr: the filters' learning rate.
        weight_decay: the filters' weight decay.
    """
    if not optimizers.param_groups:
        raise ValueError("the optimiser has no param_groups to take the filters' optimiser from")
    rest = optimizers.param_groups[-1]
    if rest.optimizer_name not in ("Adam", "AdamW"):
        raise ValueError(
            f"the last of the optimiser's param_groups is of {rest.optimizer_name}, the filters' "
            "numbers need Adam or AdamW: give it, or add a ParamGroupConfig with "
            f"pattern={_PATTERN!r} yourself"
        )
    own = {**rest.optimizer_kwargs, "lr": lr, "weight_decay": weight_decay}
    group = ParamGroupConfig(
        pattern=_PATTERN, optimizer_name=rest.optimizer_name, optimizer_kwargs=own
    )
    # the first pattern that matches takes a parameter
    return derive(
        optimizers, OptimizersContainer.Config, param_groups=[group, *optimizers.param_groups]
    )


@override(target=CheckpointManager.Config, exact=True, description="graph filters in exports")
def checkpoint(manager: CheckpointManager.Config) -> FilterCheckpointManager.Config:
    """The checkpoint manager, whose exports to transformers keep the filters."""
    return derive(manager, FilterCheckpointManager.Config)


def plug(
    config: Trainer.Config,
    layers: str | Iterable[int] = "all",
    filter: str = "GFSA",
    lr: float | None = None,
    weight_decay: float = 0.0,
    **arguments: Any,
) -> list[str]:
    """Put filters into the model that a trainer's configuration describes, in place.

    .. code-block:: python

        def llama3_8b_filtered() -> Trainer.Config:
            config = llama3_8b()
            gfsa.titan.plug(config, layers="upper", K=3, lr=1e-2)
            return config

    Args:
        config: the configuration, which changes.
        layers: as in :func:`gfsa.plug`: ``"all"``, ``"even"``, ``"odd"``, ``"lower"``, ``"upper"``,
            or layer numbers, counted from 1.
        filter, arguments: as in :func:`filters`.
        lr, weight_decay: as in :func:`optimizer`; without ``lr`` the filters are trained as the
            other weights.

    Returns:
        the names of the layers that were plugged.
    """
    if config.model_spec is None:
        raise ValueError("the trainer's configuration has no model_spec")
    found: dict[str, Any] = {
        name: (attention, parent, attribute)
        for name, attention, parent, attribute in config.model_spec.model.traverse(
            GQAttention.Config
        )
        if type(attention) is GQAttention.Config
    }
    if not found:
        raise ValueError(
            f"{config.model_spec.name} has no GQAttention without a filter; Llama 3 and Qwen3 have"
        )
    if type(config.checkpoint) is not CheckpointManager.Config:
        raise ValueError(
            f"expected the checkpoint manager of DCP, got {type(config.checkpoint).__qualname__}: "
            "its exports to transformers would drop the filters"
        )
    chosen = select_layers(found, layers)
    plugged = [name for name in found if name in chosen]
    for name in plugged:
        attention, parent, attribute = found[name]
        setattr(parent, attribute, filters(attention, filter=filter, **arguments))
    if lr is not None:
        config.optimizer = optimizer(config.optimizer, lr=lr, weight_decay=weight_decay)
    config.checkpoint = checkpoint(config.checkpoint)
    return plugged


class TitanFilter(Module):
    """What torchtitan asks of a module, for a :class:`gfsa.GraphFilter` (a base of its class).

    Heads do not interact inside attention: under tensor parallelism each process holds the rows of
    θ that its own heads use, and the filter sends nothing.
    """

    num_heads: int
    base: Tensor
    _own_heads = slice(None)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is None:
            return
        # θ is a plain tensor of the own rows there; elsewhere a DTensor of all
        theta_is_cut = parallel_dims.spmd_backend == "spmd_types"
        filter: Any = self
        self._own_heads = filter.keep_heads(
            mesh.get_local_rank(), mesh.size(), theta_is_cut=theta_is_cut
        )

    def _distribute_states(self, parallel_dims: ParallelDims) -> None:
        # base and basis are constants, which every process computes itself
        buffers = dict(self._buffers)
        self._buffers.clear()
        try:
            super()._distribute_states(parallel_dims)
        finally:
            self._buffers.update(buffers)

    def _learned(self, theta: Any) -> Any:
        if not isinstance(theta, DTensor):
            return theta
        # every process has its own part of the batch (or of the sequence), so its gradient of θ is
        # one term of a sum wherever θ itself is replicated
        gradient: list[Placement] = [
            placement if placement.is_shard() else Partial() for placement in theta.placements
        ]
        local = theta.to_local(grad_placements=gradient)
        if len(local) == len(self.base):
            return local
        # outside of a forward: fully_shard has θ in parts
        return theta.full_tensor()[self._own_heads]


@dataclass(kw_only=True, slots=True)
class FilterConfig(Module.Config):
    """Which filter an attention layer gets."""

    n_heads: int
    kind: str = "GFSA"
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # a wrong argument is refused here rather than when the model is built
        self.filter()

    def filter(self) -> GraphFilter:
        """The filter, as the library has it."""
        return spec.kind_named(self.kind)(self.n_heads, **self.arguments)

    def build(self, **kwargs: Any) -> GraphFilter:
        """The filter as a module of torchtitan."""
        if kwargs:
            raise TypeError(f"a filter is built from its configuration alone, got {sorted(kwargs)}")
        filter = self.filter()
        kind: Any = type(filter)
        filter.__class__ = _with_protocol(kind)
        by_heads = dense_param_placement(tp=spmd.S(0))
        filter.__dict__["_sharding_config"] = ShardingConfig(state_shardings={"theta": by_heads})
        return filter


@cache
def _with_protocol(kind: Any) -> type[GraphFilter]:
    # the name and module are the filter's: checkpoints name the kind of filter by them
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (TitanFilter, kind), names)


# the names that GQAttention's forward looked up when FilteredAttention was written
_WRITTEN_FOR = (
    "contiguous enable_gqa flatten inner_attention k_norm q_norm qkv_linear rope scaling wo"
)


class FilteredAttention(GQAttention):
    r"""Grouped-query attention that returns :math:`\sum_k c_k A^k v`, one pass per power.

    Each pass is a call of the layer's own inner attention (flex or varlen), so packed documents,
    context parallelism and tensor parallelism act on every pass as they do on the one of ordinary
    attention. Filtering inside of the inner attention would be wrong under context parallelism:
    there the keys are of the whole sequence, and A·v of the process's own part.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        gfsa: FilterConfig

    #: whether the checkpoint manager keeps the filters in exports to transformers
    is_exported = False

    def __init__(self, config: Config) -> None:
        if (names := names_in_forward(GQAttention)) != _WRITTEN_FOR:
            changed = sorted(set(names.split()) ^ set(_WRITTEN_FOR.split()))
            raise ValueError(
                "gfsa.titan was written for torchtitan 0.3; the GQAttention of the installed "
                f"version differs in {', '.join(changed)}. Install torchtitan 0.3, or a newer gfsa"
            )
        super().__init__(config)
        self.gfsa = config.gfsa.build()
        self.register_state_dict_pre_hook(_warn_of_exports)

    def forward(
        self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.qkv_linear(x_BLD)
        if self.q_norm is not None:
            assert self.k_norm is not None
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, positions)
        groups = q.shape[2] // k.shape[2]
        every_key: Tensor | None = None

        def attend(x: Tensor) -> Tensor:
            """``A·x`` for local tokens ``(B, heads, L, D)``, with the heads of keys or queries."""
            nonlocal every_key
            # A·v differs between heads that share a key, so the first pass alone is grouped
            is_grouped = x.shape[1] == local(k).shape[2]
            if not is_grouped and every_key is None:
                every_key = distributed_as(q, local(k).repeat_interleave(groups, dim=2))
            y = self.inner_attention(
                q,
                k if is_grouped else every_key,
                distributed_as(q, x.transpose(1, 2).contiguous()),
                attention_masks=attention_masks,
                scale=self.scaling,
                enable_gqa=is_grouped and groups > 1,
            )
            return local(y).transpose(1, 2)

        # the filter computes on local tensors, without types; its result has those of the queries
        with spmd.no_typecheck():
            tokens = self.gfsa(FunctionOperator(attend), local(v).transpose(1, 2))
            y = distributed_as(q, tokens.transpose(1, 2).contiguous())
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            spmd.assert_type(y, spmd.get_local_type(q), get_partition_spec(q))
        return self.wo(y.flatten(2))


def _warn_of_exports(attention: Any, *_: Any) -> None:
    """A hook of ``state_dict``, which the checkpoint manager calls."""
    if not attention.is_exported:
        warn_once(
            logger,
            "the model has graph filters and the checkpoint manager is torchtitan's own: "
            "checkpoints of DCP keep the filters, an export to transformers "
            "(checkpoint.last_save_in_hf) drops them. Add gfsa.titan.checkpoint to "
            "--override.imports",
        )


def local(x: Tensor) -> Tensor:
    """What this process has of ``x``."""
    return x.to_local() if isinstance(x, DTensor) else x


def distributed_as(like: Tensor, x: Tensor) -> Tensor:
    """The local tensor ``x`` as a part of a DTensor if ``like`` is one."""
    if not isinstance(like, DTensor):
        return x
    return DTensor.from_local(x, like.device_mesh, like.placements, run_check=False)


# the weight by which the attention of a layer is found in the adapter's table of names
_OUTPUT_PROJECTION = "layers.{}.attention.wo.weight"

# files of a transformers folder that are weights, which the export has itself
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_INDEX = "model.safetensors.index.json"
# torchtitan's adapters take the first number of a name in the index for the number of the file
_DESCRIPTIONS = "gfsa-descriptions-00001.safetensors"


def add_filters(adapter: Any) -> dict[str, Tensor]:
    """Add the filters that a model is built with to an adapter of torchtitan, which renames keys.

    ``layers.0.attention.gfsa.theta`` of torchtitan is ``model.layers.0.self_attn.gfsa.theta`` in a
    folder of transformers, in the file of the layer's attention if there are several.

    Returns:
        What each filter is, under transformers' names; of every stage of a pipeline.
    """
    names = getattr(adapter, "from_hf_map", {})
    projection = next((name for name, own in names.items() if own == _OUTPUT_PROJECTION), None)
    if projection is None:
        raise ValueError(
            f"{type(adapter).__name__} has no name for {_OUTPUT_PROJECTION}: the filters of "
            "this model have no names in a transformers folder. Llama 3 and Qwen3 have"
        )
    prefix = f"{projection.removesuffix('.weight').rpartition('.')[0]}.{CHILD}."
    files = adapter.fqn_to_index_mapping
    # hf_assets_path may be a folder with other filters, such as an export
    for name in [name for name in files or () if f".{CHILD}." in name]:
        del files[name]
    descriptions = {}
    for number, layer in enumerate(adapter.model_config.layers):
        if not isinstance(layer.attention, FilteredAttention.Config):
            continue
        filter = layer.attention.gfsa.filter()
        descriptions[prefix.format(number) + spec.EXTRA] = filter.get_extra_state()
        for key in spec.numbers_of(filter):
            names[prefix + key] = f"layers.{{}}.attention.{CHILD}.{key}"
            if files is not None:
                files[prefix.format(number) + key] = files[projection.format(number)]
    return descriptions


class FilterCheckpointManager(CheckpointManager):
    """The checkpoint manager, whose exports to transformers keep the filters.

    An export (``last_save_in_hf``) also gets ``config.json``, the tokenizer and what else is in
    ``hf_assets_path``, so that it is a folder to load. Where a transformers folder without filters
    is loaded (``initial_load_in_hf``), the filters start as configured.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[nn.Module],
        sd_adapter: BaseStateDictAdapter | None,
        **kwargs: Any,
    ) -> None:
        self.descriptions = {} if sd_adapter is None else add_filters(sd_adapter)
        for part in model_parts:
            for module in part.modules():
                if isinstance(module, FilteredAttention):
                    module.is_exported = True
        super().__init__(config, model_parts=model_parts, sd_adapter=sd_adapter, **kwargs)

    def dcp_save(self, state_dict: Any, checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        response = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        if kwargs.get("to_hf") and dist.get_rank() == 0:
            _add_descriptions(Path(checkpoint_id), self.descriptions)
            _copy_assets(self.sd_adapter.hf_assets_path, Path(checkpoint_id))
        return response

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if from_hf:
            found = _descriptions_in(Path(checkpoint_id))
            if found:
                _check_descriptions(found, self.descriptions, checkpoint_id)
            else:
                logger.info(f"{checkpoint_id} has no graph filters: they start as configured")
                mark = f".{CHILD}."
                state_dict = {key: x for key, x in state_dict.items() if mark not in key}
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)


def _add_descriptions(folder: Path, descriptions: dict[str, Tensor]) -> None:
    """Write what the filters are beside the weights, and into the index of the files."""
    save_file(descriptions, folder / _DESCRIPTIONS, metadata={"format": "pt"})
    path = folder / _INDEX
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(descriptions, _DESCRIPTIONS)
    index["metadata"]["total_size"] += sum(value.nbytes for value in descriptions.values())
    path.write_text(json.dumps(index, indent=2), encoding="utf-8")


def _descriptions_in(folder: Path) -> dict[str, Tensor]:
    """What the filters of a transformers folder are; empty if it has none."""
    found = filter_tensors(sorted(folder.glob("*.safetensors")), str(folder))
    return {key: value for key, value in found.items() if key.endswith(f".{CHILD}.{spec.EXTRA}")}


def _check_descriptions(found: dict[str, Tensor], own: dict[str, Tensor], source: str) -> None:
    if found.keys() != own.keys():
        raise ValueError(
            f"{source} has filters in {len(found)} layers ({', '.join(sorted(found))[:200]}), the "
            f"model in {len(own)}: plug the model as it was plugged"
        )
    for key, state in found.items():
        saved, expected = spec.read_description(state), spec.read_description(own[key])
        if not spec.is_same_filter(saved, expected):
            raise ValueError(
                f"{key} of {source} is a filter {spec.shown(saved)}, the model's is "
                f"{spec.shown(expected)}; plug the model as it was plugged"
            )


def _copy_assets(assets: str | None, folder: Path) -> None:
    """Copy what a transformers folder has beside its weights."""
    source = Path(assets) if assets else None
    if source is None or not (source / "config.json").is_file():
        logger.warning(
            f"hf_assets_path={assets} has no config.json: transformers cannot load {folder} before "
            "a config.json that describes this model is put into it"
        )
        return
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
