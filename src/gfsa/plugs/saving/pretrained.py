"""Load a transformers folder that was saved from a plugged model, and read its config."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gfsa.filters.spec import EXTRA, MOST_DEGREE, read_description
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving.checkpoint import FORMAT, restore
from gfsa.plugs.saving.files import MOST_BYTES, other_loader
from gfsa.plugs.saving.identity import canonical_name
from gfsa.plugs.sites import sites

Loaded = TypeVar("Loaded", covariant=True)


class ModelClass(Protocol[Loaded]):
    """A class that loads models: ``BertModel`` its own, ``AutoModelFor…`` those it declares."""

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Loaded: ...


CONFIG_ENTRY = "filters_need_gfsa_from_pretrained"
"""The entry of ``config.json`` by which an uploaded model says that it has filters.

transformers keeps entries that it does not know as attributes of the config, without a warning.
What it warns about without gfsa are the weights of the filters, in its load report.
"""

# arguments that say where on the hub the files of a checkpoint are
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
)


def from_pretrained(
    model_class: ModelClass[Loaded],
    path: str | Path,
    *,
    max_degree: int = MOST_DEGREE,
    **kwargs: Any,
) -> Loaded:
    """Load a model that was plugged when ``model.save_pretrained(path)`` wrote it.

    .. code-block:: python

        gfsa.plug(model, K=3)
        ...                                             # train
        model.save_pretrained("my-model")
        model = gfsa.from_pretrained(AutoModelForSequenceClassification, "my-model")

    transformers alone loads such a folder without the filters, and lists them as unexpected.

    Args:
        model_class: ``AutoModelFor…`` or a model class of transformers.
        path: the folder, or a name on the hub.
        max_degree: filters of a higher degree are refused: every degree is one attention pass.
        kwargs: for ``model_class.from_pretrained``.

    Returns:
        A model of this class; of an ``AutoModelFor…``, of the class that the config names.

    Raises:
        TypeError: if ``model_class`` is no class of transformers.
        FileNotFoundError: if there is no such folder, or it has no safetensors.
        ValueError: if the folder has no filters, its files are damaged, or an argument asks for
            other weights than its safetensors.
    """
    if not callable(getattr(model_class, "from_pretrained", None)):
        raise TypeError(
            f"model_class must be a class of transformers (AutoModelFor…), got {model_class!r:.80}"
        )
    name = getattr(model_class, "__name__", "model_class")
    if is_of_diffusers(model_class):
        raise TypeError(
            f"{name} is a class of diffusers, whose files have other names than "
            "those of transformers: load the model with its own from_pretrained, then the filters "
            "that gfsa.save wrote with gfsa.load"
        )
    if kwargs.get("output_loading_info"):
        raise ValueError(
            "output_loading_info is not supported, because it would list the filters as "
            "unexpected; leave it out"
        )
    refusal = _refusal_of_other_weights(kwargs)
    if refusal is not None:
        raise ValueError(f"filters are read from the safetensors of the weights: {refusal}")
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    # the config may be the caller's own, or in a folder inside
    refusal = None if {"config", "subfolder"} & kwargs.keys() else refusal_of_path(path)
    if refusal is not None:
        raise FileNotFoundError(refusal)
    from safetensors import SafetensorError

    try:
        with without_filters_in_load_report():
            model = model_class.from_pretrained(path, **kwargs)
    except SafetensorError as error:
        raise ValueError(
            f"the weights of {path} are damaged: {error!s:.200}; save or download them again"
        ) from error
    if not restore_filters(model, path, hub, kwargs.get("variant"), max_degree):
        raise ValueError(
            f"{path} was not saved from a plugged model: it has no filters. Load it with "
            f"{name}.from_pretrained, then gfsa.plug or gfsa.load"
        )
    return model


def _refusal_of_other_weights(kwargs: Mapping[str, Any]) -> str | None:
    """Why the weights would be of other files than the filters, or None if they would not."""
    if kwargs.get("gguf_file"):
        return f"a GGUF file has none, got gguf_file={kwargs['gguf_file']!r:.80}"
    if kwargs.get("use_safetensors") is False:
        return "got use_safetensors=False; leave it out"
    if any(f".{CHILD}." in key for key in kwargs.get("state_dict") or ()):
        return (
            "those in state_dict would be ignored; leave it out, and call "
            "model.load_state_dict(state_dict) afterwards"
        )
    return None


def is_of_diffusers(model_class: Any) -> bool:
    """Whether a class is one of diffusers, which has ``from_pretrained``, too."""
    parents = getattr(model_class, "__mro__", ())
    return any(parent.__module__.partition(".")[0] == "diffusers" for parent in parents)


def restore_filters(
    model: Any,
    path: str | Path,
    hub: dict[str, Any],
    variant: str | None = None,
    max_degree: int = MOST_DEGREE,
) -> bool:
    """Plug the filters of a checkpoint into a model that was loaded from it without them.

    Args:
        model: a model of transformers.
        path: the folder, or a name on the hub.
        hub: arguments that say where on the hub it is (``revision``, ``token`` …).
        variant: the variant of the weights, as in ``model.fp16.safetensors``.
        max_degree: the highest degree that is accepted.

    Returns:
        Whether the checkpoint has filters.
    """
    layers = _layers_on_disk(model)
    filters: dict[str, Any] = {}
    tensors = {}
    for key, value in filter_tensors(path, hub, variant).items():
        layer, _, name = key.rpartition(f".{CHILD}.")
        layer = layers.get(canonical_name(model, layer), layer)
        if name == EXTRA:
            filters[layer] = read_description(value)
        else:
            tensors[f"{layer}.{name}"] = value
    if not filters:
        return False
    description = {"format": FORMAT, "filters": filters}
    restore(model, description, tensors, str(path), other_versions=True, max_degree=max_degree)
    # it is true of the files, and would be saved again after gfsa.unplug
    vars(model.config).pop(CONFIG_ENTRY, None)
    return True


def has_filters(path: str | Path) -> bool:
    """Whether a transformers folder was saved from a plugged model."""
    return bool(filter_tensors(path, {}))


def _layers_on_disk(model: Any) -> dict[str, str]:
    """Attention layers by the name that transformers' files have for them.

    transformers renames layers when it saves (a ViT's ``layers.0`` is ``encoder.layer.0`` on
    disk), so its own conversion is applied to the key that a filter in each layer would have.
    """
    # first, because it raises for a transformers that is too old for the import
    names = list(sites(model, unknown="trace"))
    from transformers.core_model_loading import revert_weight_conversion

    found = {}
    for name in names:
        key = f"{name}.{CHILD}.{EXTRA}"
        (on_disk,) = revert_weight_conversion(model, {key: torch.zeros(1)})
        layer = canonical_name(model, on_disk.rpartition(f".{CHILD}.")[0])
        found[layer] = canonical_name(model, name)
    return found


def filter_tensors(
    path: str | Path,
    hub: dict[str, Any],
    variant: str | None = None,
    index_first: bool = False,
) -> dict[str, Tensor]:
    """The filters' tensors of a checkpoint, by their full names.

    A folder may have one file and, from an earlier save, an index of several.

    Args:
        index_first: whether to take those of the index then, as vLLM does; transformers takes the
            one file.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    room = MOST_BYTES
    for file in _files(path, hub, variant, index_first):
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged: {error!s:.200}; save or download it again"
            ) from error
        with opened as checkpoint:
            for key in checkpoint.keys():  # noqa: SIM118  (not a dict)
                if f".{CHILD}." in key:
                    # at most 8 bytes a number
                    room -= 8 * math.prod(checkpoint.get_slice(key).get_shape())
                    if room < 0:
                        raise ValueError(
                            f"the filters of {path} have more than {MOST_BYTES} bytes, which is "
                            "refused: filters are a few numbers per head"
                        )
                    found[key] = checkpoint.get_tensor(key)
    return found


def _files(
    path: str | Path,
    hub: dict[str, Any],
    variant: str | None = None,
    index_first: bool = False,
) -> list[str]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    def locate(name: str) -> str | None:
        file: str | None = cached_file(
            str(path), name, _raise_exceptions_for_missing_entries=False, **hub
        )
        return file

    whole, index_name = (_named(n, variant) for n in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    file = None if index_first else locate(whole)
    if file is not None:
        return [file]
    index = locate(index_name)
    shards = {whole} if index is None else _shards(Path(index))
    outside = [shard for shard in shards if Path(str(shard)).name != shard]
    if outside:
        raise ValueError(
            f"the index of {path} names a file outside of it: {outside[0]!r:.80}, which is "
            "refused; save the model again with save_pretrained"
        )
    files = [locate(shard) for shard in sorted(shards)]
    missing = [shard for shard, file in zip(sorted(shards), files, strict=True) if file is None]
    if missing:
        advice = other_loader(path, "gfsa.from_pretrained") or (
            "filters are read from safetensors only; save the model again with save_pretrained"
        )
        raise FileNotFoundError(f"{path} has no {', '.join(missing)}: {advice}")
    return [file for file in files if file is not None]


def _named(file: str, variant: str | None) -> str:
    """``model.fp16.safetensors`` for the variant ``fp16``, as transformers names its files."""
    name, _, ending = file.rpartition(".")
    return file if variant is None else f"{name}.{variant}.{ending}"


def _shards(index: Path) -> set[Any]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} is damaged: {error!r:.200}; save or download it again"
        ) from error


class _LoadReportFilter(logging.Filter):
    """Removes the filters' keys from transformers' load report: gfsa loads them afterwards."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return True
        lines = [line for line in message.splitlines() if f".{CHILD}." not in line]
        if not any("|" in line and line.split("|")[1].strip().isupper() for line in lines):
            return False
        record.msg, record.args = "\n".join(lines), ()
        return True


@contextmanager
def without_filters_in_load_report() -> Iterator[None]:
    """Load a model without a report of the filters' keys as unexpected ones."""
    quiet = _LoadReportFilter()
    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(quiet)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(quiet)


def read_config(path: str, **kwargs: Any) -> Any:
    """``AutoConfig.from_pretrained``, but it raises ValueError if ``path`` is not such a model.

    Args:
        path: a folder, or a name on the Hub.
        kwargs: for ``AutoConfig.from_pretrained``.
    """
    import transformers

    refusal = refusal_of_path(path)
    if refusal is not None:
        raise ValueError(refusal)
    try:
        return transformers.AutoConfig.from_pretrained(path, **kwargs)
    # whatever transformers raises for a file that has other JSON than a config
    except Exception as error:
        where = "" if Path(path).is_dir() else " here or from the Hub"
        raise ValueError(
            f"the config of {path} cannot be read{where}: {type(error).__name__}: {one_line(error)}"
        ) from error


def refusal_of_path(path: str | Path) -> str | None:
    """Why there is no model of transformers at a path; None if there is, or it may be a name."""
    expected = "expected the folder of a whole model, which model.save_pretrained writes"
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        # whoever asks loads whole models
        found = other_loader(folder, "gfsa.from_pretrained") or f"{path} has no config.json"
        return f"{found}; {expected}"
    if folder.is_file():
        return f"{path} is a file; {expected}"
    if str(path).startswith("~"):
        return f"{path} does not exist: only a shell expands ~, Path(...).expanduser() does here"
    # on Windows an absolute path begins with a drive
    if folder.is_absolute() or str(path).startswith("."):
        return f"{path} does not exist; {expected}"
    return None


def one_line(error: Exception) -> str:
    """The message of an error without its line breaks, and not too long."""
    return f"{' '.join(str(error).split()):.400}"
