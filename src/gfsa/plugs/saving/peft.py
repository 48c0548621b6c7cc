"""Load an adapter of peft that was saved with filters, into a base model with or without them.

With ``modules_to_save=["gfsa"]`` peft trains and saves the filters inside its adapter. On a base
model without filters ``PeftModel.from_pretrained`` leaves them out without a word; here they are
rebuilt first, from the description that each filter keeps beside its numbers.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gfsa.filters.spec import EXTRA, MOST_DEGREE, read_description
from gfsa.plugs.adapter import CHILD
from gfsa.plugs.saving.checkpoint import FORMAT, check_restorable, load, restore
from gfsa.plugs.saving.files import FILE, MOST_BYTES, Download, download_filters, other_loader
from gfsa.plugs.saving.identity import canonical_name
from gfsa.plugs.sites import check_model, filters_of, plugged_sites
from gfsa.plugs.transaction import all_or_nothing

if TYPE_CHECKING:
    from peft import PeftModel

PEFT_ENTRY = "filters_need_gfsa_load_peft"
"""An entry of ``adapter_config.json`` that peft does not know, and warns about by its name."""

_WEIGHTS = "adapter_model.safetensors"
# arguments that say where on the Hub the files of an adapter are
_HUB_ARGUMENTS = tuple(field.name for field in dataclasses.fields(Download))


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
    their learned numbers are zero, which is ordinary attention unless a filter has fixed numbers
    as well (``w0=0.3`` with ``learn=("wK",)``, ``Twicing`` …). A base that has filters must have
    the same ones. If the adapter itself has none, those that :func:`gfsa.save` wrote beside it are
    loaded.

    Args:
        model: the base model.
        path: the adapter's folder, or its name on the Hub.
        max_degree: filters of a higher degree are refused: every degree is one attention pass.
        kwargs: for ``peft.PeftModel.from_pretrained``.

    Returns:
        The ``PeftModel``.

    Raises:
        TypeError: if ``model`` is not an ``nn.Module``.
        ImportError: if peft is not installed.
        ValueError: if ``model`` is a ``PeftModel`` already, the adapter has no filters, or they do
            not fit the model.

    Whatever is raised, the modules of the model are then as they were.
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
    description, tensors = _filters_in(model, _weights_file(path, kwargs), source)
    if not description["filters"]:
        return _load_beside(model, path, max_degree, kwargs)
    with all_or_nothing(model), _without_warning():
        if plugged_sites(model):
            check_restorable(model, description, tensors, source, max_degree)
        else:
            restore(model, description, tensors, source, max_degree=max_degree)
            _reset(model)
        loaded = peft.PeftModel.from_pretrained(model, source, **kwargs)
        check_loaded(loaded, tensors, source)
    return loaded


def _load_beside(
    model: nn.Module, path: str | Path, max_degree: int, kwargs: dict[str, Any]
) -> PeftModel:
    """Load an adapter without filters, and the filters that gfsa.save wrote beside it."""
    import peft

    without = f"{path} has no filters: its adapter was saved without modules_to_save=['gfsa'], and"
    advice = "Load it with peft.PeftModel.from_pretrained"
    if Path(path).is_dir():
        folder = Path(path) / (kwargs.get("subfolder") or "")
        if not (folder / FILE).is_file():
            raise ValueError(f"{without} gfsa.save wrote none beside it. {advice}")
    else:
        wanted = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        try:
            folder = download_filters(str(path), Download(**wanted))
        except FileNotFoundError as error:
            raise ValueError(f"{without} none can be read beside it: {error}. {advice}") from error
    with all_or_nothing(model), _without_warning():
        loaded = peft.PeftModel.from_pretrained(model, str(path), **kwargs)
        load(loaded, folder, max_degree=max_degree)
    return loaded


@contextmanager
def _without_warning() -> Iterator[None]:
    """The entry in the config is for whoever loads the adapter without gfsa: no warning here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf".*\['{PEFT_ENTRY}'\]")
        yield


def _reset(model: nn.Module) -> None:
    """Set θ = 0: the filter is then ordinary attention, except for its fixed numbers."""
    with torch.no_grad():
        for filter in filters_of(model).values():
            if filter.theta is not None:
                filter.theta.zero_()


def _weights_file(path: str | Path, kwargs: dict[str, Any]) -> Path:
    """The adapter's safetensors, downloaded if ``path`` is a name on the Hub."""
    if Path(path).is_dir():
        file = Path(path) / (kwargs.get("subfolder") or "") / _WEIGHTS
        if not file.is_file():
            advice = other_loader(file.parent, "gfsa.load_peft") or (
                "filters are read from safetensors only; save the adapter with "
                "model.save_pretrained"
            )
            raise FileNotFoundError(f"{file} does not exist: {advice}")
        return file
    # peft depends on it
    import huggingface_hub

    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    try:
        return Path(huggingface_hub.hf_hub_download(str(path), _WEIGHTS, **hub))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path} is neither a folder here with an adapter of peft, nor can {_WEIGHTS} be read "
            f"from the Hub: {type(error).__name__}: {' '.join(str(error).split()):.300}"
        ) from error


def _filters_in(
    model: nn.Module, file: Path, source: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the numbers of the filters in an adapter's file."""
    from safetensors import SafetensorError, safe_open

    filters: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    room = MOST_BYTES
    try:
        with safe_open(file, framework="pt") as adapter:
            for key in adapter.keys():  # noqa: SIM118  (not a dict)
                layer, found, name = key.rpartition(f".{CHILD}.")
                if not found:
                    continue
                # at most 8 bytes a number
                room -= 8 * math.prod(adapter.get_slice(key).get_shape())
                if room < 0:
                    raise ValueError(
                        f"the filters of {source} have more than {MOST_BYTES} bytes, which is "
                        "refused: filters are a few numbers per head"
                    )
                layer = canonical_name(model, layer)
                value = adapter.get_tensor(key)
                if name == EXTRA:
                    filters[layer] = read_description(value)
                else:
                    tensors[f"{layer}.{name}"] = value
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error!s:.200}; save or download it again") from error
    return {"format": FORMAT, "filters": filters}, tensors


def check_loaded(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
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
