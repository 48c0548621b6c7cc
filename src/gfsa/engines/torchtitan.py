"""torchtitan: filters in its attention, and checkpoints that keep them.

:mod:`gfsa.titan` has the names that a user writes. A DCP checkpoint has every key of the model,
filters too. The adapters that rename keys for transformers drop keys that they do not know, so here
the filters go around them, under the names that ``gfsa.from_pretrained`` reads.
"""

from __future__ import annotations

import json
import re
import shutil
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
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger

from gfsa.filters import GraphFilter
from gfsa.filters.spec import EXTRA, is_same_filter, kind_named, read_description, shown
from gfsa.operators import FunctionOperator
from gfsa.plugs.adapter import CHILD, names_in_forward
from gfsa.plugs.saving.files import filter_tensors


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
        return kind_named(self.kind)(self.n_heads, **self.arguments)

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
        refuse_another_forward()
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


def refuse_another_forward() -> None:
    """Raise if torchtitan's attention is not the one that :class:`FilteredAttention` repeats."""
    names = names_in_forward(GQAttention)
    if names != _WRITTEN_FOR:
        changed = sorted(set(names.split()) ^ set(_WRITTEN_FOR.split()))
        raise ValueError(
            f"gfsa.titan was written for torchtitan 0.3; the GQAttention of the installed version "
            f"differs in {', '.join(changed)}. Install torchtitan 0.3, or a newer gfsa"
        )


@cache
def _warn_of_exports_once() -> None:
    logger.warning(
        "the model has graph filters and the checkpoint manager is torchtitan's own: checkpoints "
        "of DCP keep the filters, an export to transformers (checkpoint.last_save_in_hf) drops "
        "them. Add gfsa.titan.checkpoint to --override.imports"
    )


def _warn_of_exports(attention: Any, *_: Any) -> None:
    """A hook of ``state_dict``, which the checkpoint manager calls."""
    if not attention.is_exported:
        _warn_of_exports_once()


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
_FILTER = re.compile(rf"^layers\.(\d+)\.attention\.{CHILD}\.(\w+)$")

# files of a transformers folder that are weights, which the export has itself
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_INDEX = "model.safetensors.index.json"
# torchtitan's adapters take the first number of a name in the index for the number of the file
_DESCRIPTIONS = "gfsa-descriptions-00001.safetensors"


class FilterAdapter(BaseStateDictAdapter):
    """A model's adapter to transformers' names, with the filters' numbers added.

    ``layers.0.attention.gfsa.theta`` of torchtitan is
    ``model.layers.0.self_attn.gfsa.theta`` in a folder of transformers.
    """

    def __init__(self, adapter: Any) -> None:
        names = getattr(adapter, "from_hf_map", {})
        projection = [name for name, own in names.items() if own == _OUTPUT_PROJECTION]
        if not projection:
            raise ValueError(
                f"{type(adapter).__name__} has no name for {_OUTPUT_PROJECTION}: the filters of "
                "this model have no names in a transformers folder. Llama 3 and Qwen3 have"
            )
        self._adapter = adapter
        self._projection = projection[0]
        self._attention = projection[0].removesuffix(".weight").rpartition(".")[0]
        layers = re.escape(self._attention).replace(r"\{\}", r"(\d+)")
        self._of_filters = re.compile(rf"^{layers}\.{CHILD}\.(\w+)$")
        self.leaves_out_filters = False
        """Whether the transformers folder that is read has no filters."""

    def __getattr__(self, name: str) -> Any:
        # hf_assets_path, and what else the checkpoint manager asks for
        return getattr(self.__dict__["_adapter"], name)

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return self._adapter.get_hf_storage_reader(path, from_quantized)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        filters, rest = _split(state_dict, _FILTER)
        converted: dict[str, Any] = self._adapter.to_hf(rest)
        for (layer, name), value in filters.items():
            # torch merges files of floating-point numbers only: descriptions have a file of theirs
            if name != EXTRA and not self.leaves_out_filters:
                converted[self.name_of(layer, name)] = value
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        filters, rest = _split(hf_state_dict, self._of_filters)
        converted: dict[str, Any] = self._adapter.from_hf(rest)
        for (layer, name), value in filters.items():
            converted[f"layers.{layer}.attention.{CHILD}.{name}"] = value
        return converted

    @property
    def fqn_to_index_mapping(self) -> dict[Any, int] | None:
        """The file of each key where the weights are in several: a filter's is its layer's.

        ``hf_assets_path`` may be a folder with filters, such as an export: what its index says of
        them is left out, because the model has filters of its own or none.
        """
        named: dict[Any, int] | None = self._adapter.fqn_to_index_mapping
        if named is None:
            return None
        _, files = _split(named, self._of_filters)
        added = {
            self.name_of(layer, "theta"): files[self._projection.format(layer)]
            for layer, filter in self.filters().items()
            if filter.theta is not None
        }
        return files | added

    def filters(self) -> dict[int, GraphFilter]:
        """Those that the model is built with, by layer; of every stage of a pipeline."""
        return {
            number: layer.attention.gfsa.filter()
            for number, layer in enumerate(self._adapter.model_config.layers)
            if isinstance(layer.attention, FilteredAttention.Config)
        }

    def descriptions(self) -> dict[str, Tensor]:
        """What each filter is, under transformers' names."""
        return {
            self.name_of(layer, EXTRA): filter.get_extra_state()
            for layer, filter in self.filters().items()
        }

    def name_of(self, layer: int, name: str) -> str:
        """What transformers calls a tensor of the filter of a layer."""
        return f"{self._attention.format(layer)}.{CHILD}.{name}"


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
        if sd_adapter is not None:
            sd_adapter = FilterAdapter(sd_adapter)
        for part in model_parts:
            for module in part.modules():
                if isinstance(module, FilteredAttention):
                    module.is_exported = True
        super().__init__(config, model_parts=model_parts, sd_adapter=sd_adapter, **kwargs)

    def dcp_save(self, state_dict: Any, checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        response = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        if kwargs.get("to_hf") and dist.get_rank() == 0:
            adapter = self._adapter()
            _add_descriptions(Path(checkpoint_id), adapter.descriptions())
            _copy_assets(adapter.hf_assets_path, Path(checkpoint_id))
        return response

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if not from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        adapter = self._adapter()
        found = _descriptions_in(Path(checkpoint_id))
        adapter.leaves_out_filters = not found
        if found:
            _check_descriptions(found, adapter.descriptions(), checkpoint_id)
        else:
            logger.info(f"{checkpoint_id} has no graph filters: they start as configured")
        try:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        finally:
            adapter.leaves_out_filters = False

    def _adapter(self) -> FilterAdapter:
        if not isinstance(self.sd_adapter, FilterAdapter):
            raise ValueError("the model has no adapter to the names of transformers")
        return self.sd_adapter


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
    return {key: value for key, value in found.items() if key.endswith(f".{CHILD}.{EXTRA}")}


def _check_descriptions(found: dict[str, Tensor], own: dict[str, Tensor], source: str) -> None:
    if found.keys() != own.keys():
        raise ValueError(
            f"{source} has filters in {len(found)} layers ({', '.join(sorted(found))[:200]}), the "
            f"model in {len(own)}: plug the model as it was plugged"
        )
    for key, state in found.items():
        saved, expected = read_description(state), read_description(own[key])
        if not is_same_filter(saved, expected):
            raise ValueError(
                f"{key} of {source} is a filter {shown(saved)}, the model's is {shown(expected)}; "
                "plug the model as it was plugged"
            )


def _split(
    state: dict[str, Any], pattern: re.Pattern[str]
) -> tuple[dict[tuple[int, str], Any], dict[str, Any]]:
    """The entries of filters, by layer and name, and the others."""
    filters, others = {}, {}
    for key, value in state.items():
        if found := pattern.match(key):
            filters[int(found[1]), found[2]] = value
        else:
            others[key] = value
    return filters, others


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
