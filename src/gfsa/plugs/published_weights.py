"""The tensors of a checkpoint of the published code: numbers of filters, and other weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from gfsa.plugs.saving.identity import some_of

PARAMETERS = ("lamb", "w_K", "beta")
"""What the published code calls the learned number of a head."""

# what training scripts put around the weights
_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
# buffers of old versions of the libraries, which the models compute for themselves today
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|relative_position_index|attn_mask|attn\.bias|"
    r"attn\.masked_bias|attention\.bias|attention\.masked_bias)$"
)


class PublishedCheckpoint(NamedTuple):
    """The tensors of one checkpoint.

    Args:
        parameter: which of :data:`PARAMETERS` its filters have.
        filters: layer → its numbers, one a head.
        weights: all other tensors by name.
    """

    parameter: str
    filters: dict[str, Tensor]
    weights: dict[str, Tensor]


def read_checkpoint(state_dict: Any) -> PublishedCheckpoint:
    """Tell the filters' numbers from the other weights of a checkpoint of the published code."""
    tensors = _unwrapped(state_dict)
    for parameter in PARAMETERS:
        numbers = {
            key: value
            for key, value in tensors.items()
            if key.endswith(f".{parameter}")
            # one number a head; some versions have axes of length 1 beside that of the heads
            and value.dim()
            and value.numel() == max(value.shape)
            # a normalisation may call its bias beta; it has a gamma beside it
            and f"{key.rpartition('.')[0]}.gamma" not in tensors
        }
        if numbers:
            rest = {key: value for key, value in tensors.items() if key not in numbers}
            _refuse_other_filters(parameter, rest)
            layers = {key.rpartition(".")[0]: value.flatten() for key, value in numbers.items()}
            return PublishedCheckpoint(parameter, layers, rest)
    raise ValueError(
        "the checkpoint has no filters: none of its tensors is called lamb, w_K or beta, as in the "
        f"published code; it has {some_of(tensors)}. Load its weights with model.load_state_dict, "
        "then gfsa.plug(model)"
    )


def _unwrapped(state_dict: Any) -> dict[str, Tensor]:
    """The weights by name, without what a training script or a wrapper puts around them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "state_dict must be a dict of tensors, as torch.load(file, weights_only=True) gives "
            f"it; got {type(state_dict).__name__}"
        )
    inside = [key for key in _WRAPPERS if isinstance(state_dict.get(key), Mapping)]
    if inside:
        return _unwrapped(state_dict[inside[0]])
    tensors = {str(key): value for key, value in state_dict.items() if isinstance(value, Tensor)}
    if tensors and all(key.startswith("module.") for key in tensors):
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    return tensors


def _refuse_other_filters(parameter: str, rest: Mapping[str, Tensor]) -> None:
    """Raise ValueError for filters that are not like the others: they would be left out."""
    # beta is the name of a bias, too
    names = tuple({".lamb", ".w_K", f".{parameter}"} - {".beta"})
    others = {key: tuple(value.shape) for key, value in rest.items() if key.endswith(names)}
    if others:
        shown = some_of(f"{key} of shape {shape}" for key, shape in others.items())
        raise ValueError(
            f"expected one vector {parameter!r}, a number per head, for each layer of the "
            f"checkpoint, as in the published code; it also has {shown}. Take out of it what is no "
            "filter of this model"
        )


def weights_for(model: nn.Module, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other weights under the names of the model, checked to be all of them."""
    own = model.state_dict()
    without_memory = [key for key, value in own.items() if value.is_meta]
    if without_memory:
        raise ValueError(
            f"{some_of(without_memory)} of {type(model).__name__} are on the device meta and "
            "cannot hold weights: build the model on a device, or call "
            "model.to_empty(device=...) first"
        )
    given = _renamed(model, rest)
    given = {k: v for k, v in given.items() if k in own or not _BUFFERS.search(k)}
    tied = _tied(model)
    missing = [key for key in own if key not in given and not _is_known(key, tied, given)]
    extra = [key for key in given if key not in own]
    if missing or extra:
        raise ValueError(
            f"the weights of the checkpoint are not those of {type(model).__name__}: missing "
            f"{some_of(missing)}; not expected {some_of(extra)}. Build the model that was trained, "
            "or load the weights yourself and pass weights=False"
        )
    for key, value in given.items():
        if value.shape != own[key].shape:
            raise ValueError(
                f"{key} of the checkpoint has shape {tuple(value.shape)}, that of "
                f"{type(model).__name__} {tuple(own[key].shape)}. Build the model that was trained"
            )
    return given


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Names of tensors that are the same one, by each of their names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: names for names in groups.values() for name in names}


def _is_known(key: str, tied: Mapping[str, list[str]], given: Mapping[str, Tensor]) -> bool:
    """Whether a tensor that the checkpoint does not name is given under another name, or fixed."""
    return any(name in given for name in tied.get(key, ())) or bool(_BUFFERS.search(key))


def _renamed(model: nn.Module, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of today; timm knows how its own have changed."""
    module = sys.modules[type(model).__module__]
    update = getattr(module, "checkpoint_filter_fn", None)
    if module.__name__.startswith("timm.") and callable(update):
        return dict(update(dict(rest), model))
    return dict(rest)
