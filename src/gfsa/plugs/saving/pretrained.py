"""Load what transformers and peft saved from a plugged model: a whole model, or an adapter.

Their files have the filters among the weights, each with its description beside its numbers.
transformers alone drops them and says so; peft alone leaves them out without a word.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gfsa.filters.spec import EXTRA, MOST_DEGREE
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving import files
from gfsa.plugs.saving.checkpoint import load, restore, saved_among
from gfsa.plugs.saving.files import FILE, HUB_ARGUMENTS, filter_tensors, other_loader
from gfsa.plugs.saving.identity import canonical_name
from gfsa.plugs.sites import check_model, filters_of, plugged_sites, sites
from gfsa.plugs.transaction import all_or_nothing

if TYPE_CHECKING:
    from peft import PeftModel

Loaded = TypeVar("Loaded", covariant=True)


class ModelClass(Protocol[Loaded]):
    """A class that loads models: ``BertModel`` its own, ``AutoModelFor…`` those it declares."""

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Loaded: ...


CONFIG_ENTRY = "filters_need_gfsa_from_pretrained"
"""The entry of ``config.json`` by which an uploaded model says that it has filters.

transformers keeps it as an attribute of the config, without a warning.
"""

PEFT_ENTRY = "filters_need_gfsa_load_peft"
"""An entry of ``adapter_config.json`` that peft does not know, and warns about by its name."""


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
    if not hasattr(model_class, "from_pretrained") or is_of_diffusers(model_class):
        raise TypeError(
            f"model_class must be a class of transformers (AutoModelFor…), got {model_class!r:.80};"
            " for models of other libraries, gfsa.load loads what gfsa.save wrote"
        )
    name = getattr(model_class, "__name__", "model_class")
    # with these options the weights are of other files than the filters
    refused = [option for option in ("gguf_file", "output_loading_info") if kwargs.get(option)]
    refused += ["use_safetensors"] if kwargs.get("use_safetensors") is False else []
    if any(f".{CHILD}." in key for key in kwargs.get("state_dict") or ()):
        refused.append("state_dict")
    if refused:
        raise ValueError(
            "filters are read from the safetensors of the weights, and stand in no load report; "
            f"leave out {', '.join(refused)} (call model.load_state_dict for a state_dict)"
        )
    # the config may be the caller's own, or in a folder inside
    refusal = None if {"config", "subfolder"} & kwargs.keys() else refusal_of_path(path)
    if refusal is not None:
        raise FileNotFoundError(refusal)
    from safetensors import SafetensorError

    try:
        with without_filters_in_load_report():
            model: Any = model_class.from_pretrained(path, **kwargs)
    except SafetensorError as error:
        raise ValueError(
            f"the weights of {path} are damaged: {error!s:.200}; save or download them again"
        ) from error
    checkpoint = files_of(path, _hub_arguments(kwargs), kwargs.get("variant"))
    found = filter_tensors(checkpoint, str(path))
    if not found:
        raise ValueError(
            f"{path} was not saved from a plugged model: it has no filters. Load it with "
            f"{name}.from_pretrained, then gfsa.plug or gfsa.load"
        )
    layers = _layers_on_disk(model)

    def name_of(layer: str) -> str:
        return layers.get(canonical_name(model, layer), layer)

    on_disk = {name_of(layer): layer for layer, _, _ in (k.rpartition(f".{CHILD}.") for k in found)}

    saved = saved_among(found, name_of, str(path))._replace(
        matrices_of=lambda layer: files.matrices_of(checkpoint, on_disk[layer])
    )
    restore(model, saved, max_degree=max_degree)
    # it is true of the files, and would be saved again after gfsa.unplug
    vars(model.config).pop(CONFIG_ENTRY, None)
    return model


def _hub_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}


def is_of_diffusers(model_class: Any) -> bool:
    """Whether a class is one of diffusers, which has ``from_pretrained``, too."""
    parents = getattr(model_class, "__mro__", ())
    return any(parent.__module__.partition(".")[0] == "diffusers" for parent in parents)


def has_filters(path: str | Path) -> bool:
    """Whether a transformers folder, or a name on the hub, was saved from a plugged model."""
    try:
        return bool(filter_tensors(files_of(path, {}), str(path)))
    except FileNotFoundError:
        # a config without weights, or weights that are not in safetensors, where filters are
        return False


def _layers_on_disk(model: Any) -> dict[str, str]:
    """Attention layers by the name that transformers' files have for them.

    Its own conversion is applied to the key that a filter in each layer would have.
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


def files_of(
    path: str | Path,
    hub: dict[str, Any],
    variant: str | None = None,
    index_first: bool = False,
) -> list[str]:
    """The safetensors of a checkpoint of transformers.

    A folder may have one file, which transformers takes, and from an earlier save an index of
    several, which vLLM takes: ``index_first``.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    def locate(name: str) -> Any:
        return cached_file(str(path), name, _raise_exceptions_for_missing_entries=False, **hub)

    whole, index_name = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:
        # as in model.fp16.safetensors
        whole, index_name = (f".{variant}.".join(n.rsplit(".", 1)) for n in (whole, index_name))
    index = locate(index_name) if index_first or locate(whole) is None else None
    shards: set[Any] = {whole}
    if index is not None:
        try:
            shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise files.damaged(index, error) from error
    outside = [shard for shard in shards if Path(str(shard)).name != shard]
    if outside:
        raise ValueError(
            f"the index of {path} names a file outside of it: {outside[0]!r:.80}, which is "
            "refused; save the model again with save_pretrained"
        )
    found = {shard: locate(shard) for shard in sorted(shards)}
    if missing := [shard for shard, file in found.items() if file is None]:
        advice = other_loader(path, "gfsa.from_pretrained") or (
            "filters are read from safetensors only; save the model again with save_pretrained"
        )
        raise FileNotFoundError(f"{path} has no {', '.join(missing)}: {advice}")
    return [*found.values()]


def load_peft(
    model: nn.Module, path: str | Path, *, max_degree: int = MOST_DEGREE, **kwargs: Any
) -> PeftModel:
    """Load an adapter of peft together with the filters that were saved in it or beside it.

    .. code-block:: python

        model = peft.get_peft_model(plugged, LoraConfig(..., modules_to_save=["gfsa"]))
        ...                                             # train
        model.save_pretrained("adapter")
        model = gfsa.load_peft(base, "adapter")         # the base, plugged or not

    A base model without filters is plugged with those of the adapter; with the adapter disabled
    their learned numbers are zero, which is ordinary attention unless others are fixed. A base that
    has filters must have the same ones. If the adapter itself has none, those that
    :func:`gfsa.save` wrote beside it are loaded.

    Args:
        model: the base model.
        path: the adapter's folder, or its name on the Hub.
        max_degree: filters of a higher degree are refused: every degree is one attention pass.
        kwargs: for ``peft.PeftModel.from_pretrained``.

    Returns:
        The ``PeftModel``.

    Raises:
        ValueError: if ``model`` is a ``PeftModel`` already, the adapter has no filters, or they do
            not fit the model. The modules of the model are then as they were.
    """
    check_model(model)
    try:
        import peft
    except ImportError as error:
        raise ImportError("gfsa.load_peft needs peft: pip install peft") from error

    if isinstance(model, peft.PeftModel):
        raise ValueError(
            f"load_peft takes a base model, got a {type(model).__name__}: it has an adapter "
            "already. Add another one with model.load_adapter(path, adapter_name=...)"
        )
    source = str(path)
    found = filter_tensors([_file_of(path, "adapter_model.safetensors", kwargs)], source)
    saved = saved_among(found, functools.partial(canonical_name, model), source)
    try:
        folder = None if found else _file_of(path, FILE, kwargs).parent
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} has no filters: its adapter was saved without modules_to_save=['gfsa'], and "
            f"gfsa.save wrote none beside it ({error}). Load it with "
            "peft.PeftModel.from_pretrained"
        ) from error
    with all_or_nothing(model), warnings.catch_warnings():
        # the entry in the config is for whoever loads the adapter without gfsa
        warnings.filterwarnings("ignore", message=rf".*\['{PEFT_ENTRY}'\]")
        if found:
            is_plugged = bool(plugged_sites(model))
            restore(model, saved, max_degree=max_degree, check_only=is_plugged)
            # ordinary attention while the adapter is disabled, but for fixed numbers
            for filter in () if is_plugged else filters_of(model).values():
                if filter.theta is not None:
                    nn.init.zeros_(filter.theta)
        loaded = peft.PeftModel.from_pretrained(model, source, **kwargs)
        if folder is None:
            check_loaded(loaded, saved.tensors, source)
        else:
            load(loaded, folder, max_degree=max_degree)
    return loaded


def _file_of(path: str | Path, name: str, kwargs: dict[str, Any]) -> Path:
    """A file of an adapter's folder, downloaded if ``path`` is a name on the Hub."""
    if not Path(path).is_dir():
        return files.download(str(path), _hub_arguments(kwargs), name)
    file = Path(path) / (kwargs.get("subfolder") or "") / name
    if not file.is_file():
        advice = other_loader(file.parent, "gfsa.load_peft") or (
            "filters are read from safetensors only; save the adapter with model.save_pretrained"
        )
        raise FileNotFoundError(f"{file} does not exist: {advice}")
    return file


def check_loaded(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise if peft did not give the active filters the numbers of the adapter."""
    for name, filter in filters_of(model).items():
        expected = tensors.get(f"{canonical_name(model, name)}.theta")
        if filter.theta is None or expected is None:
            continue
        found = filter.theta.detach().to("cpu", expected.dtype)
        if not torch.equal(found, expected.to(filter.theta.dtype).to(expected.dtype)):
            raise ValueError(
                f"peft did not load the filter of {name} from {source}: the active filter has "
                "other numbers than the file"
            )


@contextmanager
def without_filters_in_load_report() -> Iterator[None]:
    """Load a model without a report of the filters' keys as unexpected ones."""

    def shorten(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return True
        lines = [line for line in message.splitlines() if f".{CHILD}." not in line]
        record.msg, record.args = "\n".join(lines), ()
        # a report of nothing else is not shown
        return any("|" in line and line.split("|")[1].strip().isupper() for line in lines)

    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(shorten)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(shorten)


def read_config(path: str, **kwargs: Any) -> Any:
    """``AutoConfig.from_pretrained``, but it raises ValueError if ``path`` is not such a model."""
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
    if str(path).startswith("~"):
        return f"{path} does not exist: only a shell expands ~, Path(...).expanduser() does here"
    # on Windows an absolute path begins with a drive
    if folder.is_file() or folder.is_absolute() or str(path).startswith("."):
        return f"{path} {'is a file' if folder.is_file() else 'does not exist'}; {expected}"
    return None


def one_line(error: Exception) -> str:
    """The message of an error without its line breaks, and not too long."""
    return f"{' '.join(str(error).split()):.400}"
