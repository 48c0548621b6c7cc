"""torchtitan's checkpoints and exports with filters in them.

A DCP checkpoint has every key of the model, filters too. The adapters that rename keys for
transformers know the keys of a model without filters, and drop others without a word: here the
filters go around them, under the names that ``gfsa.from_pretrained`` reads.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger

from gfsa.engines.titan.attention import FilteredAttention
from gfsa.filters import GraphFilter
from gfsa.filters.spec import EXTRA, is_same_filter, read_description
from gfsa.plugs.adapter import CHILD

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
        for key, value in filters.items():
            layer, name = _groups(_FILTER, key)
            # torch merges files of floating-point numbers only: descriptions have a file of theirs
            if name != EXTRA and not self.leaves_out_filters:
                converted[self.name_of(int(layer), name)] = value
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        filters, rest = _split(hf_state_dict, self._of_filters)
        converted: dict[str, Any] = self._adapter.from_hf(rest)
        for key, value in filters.items():
            layer, name = _groups(self._of_filters, key)
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
        """The filters that the model is built with, by layer; of every stage of a pipeline."""
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
            adapter = self._adapter()
            _add_descriptions(Path(checkpoint_id), adapter.descriptions())
            _copy_assets(adapter.hf_assets_path, Path(checkpoint_id))
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
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (not a dict)
                if key.endswith(f".{CHILD}.{EXTRA}"):
                    found[key] = tensors.get_tensor(key)
    return found


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
                f"{key} of {source} is a filter {saved.get('kind')} {saved.get('arguments')}, the "
                f"model's is {expected['kind']} {expected['arguments']}; plug the model as it was "
                "plugged"
            )


def _split(state: dict[str, Any], pattern: re.Pattern[str]) -> tuple[dict[str, Any], ...]:
    """The entries whose keys match, and the others."""
    matching = {key: value for key, value in state.items() if pattern.match(key)}
    return matching, {key: value for key, value in state.items() if key not in matching}


def _groups(pattern: re.Pattern[str], key: str) -> tuple[str | Any, ...]:
    found = pattern.match(key)
    assert found is not None
    return found.groups()


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
