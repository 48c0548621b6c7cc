"""The config of a plugged checkpoint: with the filters' descriptions and the class to serve it.

vLLM chooses a model class by ``config.architectures``: for a plugged checkpoint, one that applies
filters. The entry ``gfsa`` with their descriptions travels to vLLM's worker processes, and is part
of the key under which vLLM keeps compiled graphs: another degree is another graph.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.transformers_utils import config as vllm_config

from gfsa.filters.spec import EXTRA, KINDS, read_description
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving.files import damaged, filter_tensors
from gfsa.plugs.saving.pretrained import files_of

logger = init_logger(f"vllm.{__name__}")

TRANSFORMERS = "GfsaTransformersForCausalLM"
TRANSFORMERS_MOE = "GfsaTransformersMoEForCausalLM"
GPT2 = "GfsaGPT2LMHeadModel"
MODELS = {
    TRANSFORMERS: "TransformersForCausalLM",
    TRANSFORMERS_MOE: "TransformersMoEForCausalLM",
    GPT2: "GPT2LMHeadModel",
}
"""Architecture → the class of ``models.py`` that serves it."""

FILTERS = "gfsa"
"""The entry of a config: ``{"architectures": [...], "filters": {layer: description}}``."""

_FORMAT = "hf"


def install_parser() -> None:
    """Let the parser of transformers' configs look for filters as well."""
    current = type(vllm_config.get_config_parser(_FORMAT))
    if issubclass(current, _LooksForFilters):
        return
    # of the parser in place, which may be that of another plugin
    parser = type("ConfigParserWithFilters", (_LooksForFilters, current), {})
    log = logging.getLogger(vllm_config.__name__)
    # vLLM would warn in each process that a parser is replaced
    log.disabled, before = True, log.disabled
    try:
        vllm_config.register_config_parser(_FORMAT)(parser)
    finally:
        log.disabled = before


class _LooksForFilters:
    """Mixed into a config parser: marks the config of a plugged checkpoint."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Any]:
        config_dict, config = super().parse(  # type: ignore[misc]
            model, trust_remote_code, revision, code_revision, **kwargs
        )
        filters = descriptions_in(model, revision=revision, token=kwargs.get("token"))
        if filters:
            mark(config, filters, source=str(model))
        return config_dict, config


def mark(config: Any, filters: dict[str, Any], source: str) -> None:
    """Name the architecture that serves these filters; raises if vLLM cannot serve them."""
    for layer, description in filters.items():
        kind = description.get("kind")
        if kind not in KINDS:
            raise ValueError(
                f"{source}: the filter of {layer} is a {kind!r:.80}; in vLLM gfsa serves "
                f"polynomials of the attention map ({', '.join(KINDS)}). Plug filter.fold() if "
                "yours is one, or run the model with gfsa.from_pretrained or gfsa.load"
            )
    architectures = list(config.architectures or ())
    serving = _architecture(config, architectures, source)
    setattr(config, FILTERS, {"architectures": architectures, "filters": filters})
    config.architectures = [serving]
    logger.info("gfsa: %s has filters in %d layers, served by %s", source, len(filters), serving)


def _architecture(config: Any, architectures: list[str], source: str) -> str:
    if not architectures:
        raise ValueError(
            f"{source}: config.json has no architectures, so vLLM cannot tell which model class "
            f"this {config.model_type} is. Save it from the model with a head "
            '(model.save_pretrained writes them), or add "architectures": ["…ForCausalLM"]'
        )
    name = architectures[0]
    if name == "GPT2LMHeadModel":
        return GPT2
    text = config.get_text_config()
    if not name.endswith("ForCausalLM") or text is not config:
        raise ValueError(
            f"{source} is a plugged {name}. gfsa serves filters in vLLM for causal language models "
            "of text (…ForCausalLM, GPT2LMHeadModel): filters need the powers of past tokens, "
            "which never change under a causal mask. Run this model with gfsa.from_pretrained"
        )
    # vLLM's config and this module import each other, and the config has to be first
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    experts = ModelArchConfigConvertorBase(config, text).get_num_experts()
    return TRANSFORMERS_MOE if experts else TRANSFORMERS


def descriptions_in(
    model: str | Path, revision: str | None = None, token: Any = None
) -> dict[str, dict[str, Any]]:
    """What each filter is, by the name of its layer; empty if the checkpoint has no filters."""
    hub = {"revision": revision, "token": token}
    if not any(f".{CHILD}." in name for name in _tensor_names(model, hub)):
        return {}
    tensors = filter_tensors(files_of(model, hub, index_first=True), str(model))
    found = {
        key.removesuffix(f".{CHILD}.{EXTRA}"): read_description(value)
        for key, value in tensors.items()
        if key.endswith(f".{CHILD}.{EXTRA}")
    }
    undescribed = {key.rpartition(f".{CHILD}.")[0] for key in tensors} - found.keys()
    if undescribed:
        raise ValueError(
            f"{model} has a filter for {min(undescribed)!r:.80} without its description "
            f"({CHILD}.{EXTRA}); save the plugged model again with save_pretrained"
        )
    return found


def _tensor_names(model: str | Path, hub: dict[str, Any]) -> Iterable[str]:
    """The names in a checkpoint of safetensors; none where there is no such checkpoint."""
    from huggingface_hub import parse_safetensors_file_metadata
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    index = _located(model, SAFE_WEIGHTS_INDEX_NAME, **hub)
    if index is not None:
        try:
            weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            return [str(name) for name in weight_map]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged(index, error) from error
    weights = _located(model, SAFE_WEIGHTS_NAME, **hub, local_files_only=True)
    if weights is not None:
        with safe_open(weights, framework="pt") as checkpoint:
            return list(checkpoint.keys())
    if Path(model).is_dir():
        return ()
    try:
        # from the first bytes of a file on the hub, which is not fetched
        return list(parse_safetensors_file_metadata(str(model), SAFE_WEIGHTS_NAME, **hub).tensors)
    # as in _located, and whatever the hub's client raises where there is no connection
    except Exception:
        return ()


def _located(model: str | Path, name: str, **hub: Any) -> str | None:
    """A file of a folder, or of the hub, fetched if it is not in the cache; None without it."""
    from transformers.utils.hub import cached_file

    try:
        file: str | None = cached_file(str(model), name, **hub)
    # no such file or repository, no connection, or a name of another kind than the hub's: whatever
    # it is, vLLM will say so when it loads the weights, and refuses filters that were not found
    except (OSError, ValueError):
        return None
    return file
