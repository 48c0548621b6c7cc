"""torchtitan's checkpoints and exports with filters in them.

A DCP checkpoint has every key of the model, filters too. The adapters that rename keys for
transformers know the keys of a model without filters, and drop others without a word: here the
filters go around them, under the names that ``gfsa.from_pretrained`` reads.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger

from gfsa.engines.titan.attention import FilteredAttention
from gfsa.plugs.adapter import CHILD

# the weight by which the attention of a layer is found in the adapter's table of names
_OUTPUT_PROJECTION = "layers.{}.attention.wo.weight"
_FILTER = re.compile(rf"^layers\.(\d+)\.attention\.{CHILD}\.(\w+)$")

# files of a transformers folder that are weights, which the export has itself
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


class FilterAdapter(BaseStateDictAdapter):
    """A model's adapter to transformers' names, with the filters added.

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
        self.leaves_out_filters = False
        """Whether the transformers folder that is read has no filters."""

    def __getattr__(self, name: str) -> Any:
        # hf_assets_path, get_hf_storage_reader, and what else the checkpoint manager asks for
        return getattr(self.__dict__["_adapter"], name)

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return self._adapter.get_hf_storage_reader(path, from_quantized)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        filters, rest = _split(state_dict, _FILTER)
        converted: dict[str, Any] = self._adapter.to_hf(rest)
        if not self.leaves_out_filters:
            converted |= {self._to_hf_name(key): value for key, value in filters.items()}
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        of_filters = re.compile(
            re.escape(self._attention).replace(r"\{\}", r"(\d+)") + rf"\.{CHILD}\.(\w+)$"
        )
        filters, rest = _split(hf_state_dict, of_filters)
        converted: dict[str, Any] = self._adapter.from_hf(rest)
        for key, value in filters.items():
            found = of_filters.match(key)
            assert found is not None
            layer, name = found.groups()
            converted[f"layers.{layer}.attention.{CHILD}.{name}"] = value
        return converted

    @property
    def fqn_to_index_mapping(self) -> dict[Any, int] | None:  # type: ignore[override]
        """The file of each key where the weights are in several: a filter's is its layer's."""
        files = self._adapter.fqn_to_index_mapping
        if files is None or self.leaves_out_filters:
            return files
        added = {}
        for number, layer in enumerate(self._adapter.model_config.layers):
            if isinstance(layer.attention, FilteredAttention.Config):
                file = files[self._projection.format(number)]
                for name in layer.attention.gfsa.filter().state_dict():
                    key = f"layers.{number}.attention.{CHILD}.{name}"
                    added[self._to_hf_name(key)] = file
        return files | added

    def _to_hf_name(self, key: str) -> str:
        found = _FILTER.match(key)
        assert found is not None
        layer, name = found.groups()
        return f"{self._attention.format(layer)}.{CHILD}.{name}"


class FilterCheckpointManager(CheckpointManager):
    """The checkpoint manager, whose exports to transformers keep the filters.

    An export (``last_save_in_hf``) also gets what is beside the weights in ``hf_assets_path``
    (``config.json``, the tokenizer), so that it is a folder to load. A transformers folder without
    filters can be loaded (``initial_load_in_hf``): the filters then start as configured.
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
            assert self.sd_adapter is not None
            _copy_assets(self.sd_adapter.hf_assets_path, checkpoint_id)
        return response

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        if not from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        adapter = self.sd_adapter
        assert isinstance(adapter, FilterAdapter), (
            "a transformers folder needs a state-dict adapter"
        )
        reader = adapter.get_hf_storage_reader(checkpoint_id, from_quantized)
        keys = reader.read_metadata().state_dict_metadata
        adapter.leaves_out_filters = not any(f".{CHILD}." in key for key in keys)
        if adapter.leaves_out_filters:
            logger.info(f"{checkpoint_id} has no graph filters: they start as configured")
        try:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        finally:
            adapter.leaves_out_filters = False


def _split(state: dict[str, Any], pattern: re.Pattern[str]) -> tuple[dict[str, Any], ...]:
    """The entries whose keys match, and the others."""
    matching = {key: value for key, value in state.items() if pattern.match(key)}
    return matching, {key: value for key, value in state.items() if key not in matching}


def _copy_assets(assets: str | None, folder: str) -> None:
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
            shutil.copyfile(file, Path(folder) / file.name)
