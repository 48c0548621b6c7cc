"""Masks that are described instead of written out, for plugged models with ``sdpa``.

A model of transformers asks its implementation's mask function for a mask of all queries and keys.
The function here returns what the mask says: padding, causality, a window, the boundaries of packed
documents. That is O(N) numbers instead of N², also while a graph is traced. Other masks (chunks,
images that see themselves, a user's own function), and those of new tokens after others in a cache,
are transformers' own.

During the forward of a model with plugged layers inside, its config is a view that returns the name
of this mask function. Attention layers inside that have no filter get masks as tensors.

For a static cache ``generate`` makes the masks itself, before the model's forward, by the model's
``create_masks_for_generate`` if it has one. A model with plugged layers gets one that describes the
mask of the prompt.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from gfsa.operators import Visibility
from gfsa.operators.call import is_exporting
from gfsa.plugs.tracing.candidates import looks_like_attention, names_in_code

NAME = "gfsa|sdpa"
"""The name under which the mask function is registered, that of the filtered attention."""


class DescribedMask:
    """What a bool mask ``(B, 1, N, M)`` says, True where a query sees a key.

    A plugged attention layer reads :attr:`visible`, which says what the N queries see of the first
    N keys; a static cache has rows after its tokens, which no query sees. Other code may treat it
    as the tensor: the mask is then written out, once for all layers.
    """

    ndim = 4
    dtype = torch.bool

    def __init__(self, visible: Visibility, shape: Sequence[int], device: Any) -> None:
        self.visible = visible
        self.shape = torch.Size(shape)
        self.device = torch.device(device)

    def tensor(self) -> Tensor:
        """The mask, written out."""
        batch, _, length, keys = self.shape
        mask = self.visible.whole(length, self.device).expand(batch, 1, length, length)
        return mask if keys == length else torch.nn.functional.pad(mask, (0, keys - length))

    def fits(self, query: Tensor, key: Tensor) -> bool:
        """Whether a layer's queries and keys, ``(B, H, N or M, D)``, are those of the mask."""
        return query.shape[-2] == self.shape[-2] and key.shape[-2] == self.shape[-1]

    def dim(self) -> int:
        return self.ndim

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, which has no layout; transformers 5.22 asks for it in ``generate``."""
        return self.tensor().contiguous(*args, **kwargs) if args or kwargs else self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """On another device it is still a description; in another dtype it is a tensor."""
        given = [*args, *(x for name, x in kwargs.items() if name != "non_blocking")]
        if len(given) != 1 or not isinstance(given[0], (str, int, torch.device)):
            return self.tensor().to(*args, **kwargs)
        device, old = torch.device(given[0]), self.visible
        if device == self.device:
            return self
        keys, documents = (None if x is None else x.to(device) for x in (old.keys, old.documents))
        visible = Visibility(keys, None, old.causal, old.window, documents, old.in_order)
        return DescribedMask(visible, self.shape, device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("visible", "shape", "device"):
            # asked for while it is copied or unpickled, before it has them
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(written_out, (args, kwargs or {}))
        return function(*args, **kwargs)


def written_out(mask: Any) -> Any:
    """A described mask as a tensor; anything else as it is."""
    return mask.tensor() if isinstance(mask, DescribedMask) else mask


def _of_tensor(name: str) -> Callable[..., Tensor]:
    def operator(self: DescribedMask, *operands: Any) -> Tensor:
        return getattr(self.tensor(), name)(*map(written_out, operands))

    return operator


# python looks operators up in the class alone, and would compare two objects by one bool
for _name in ("getitem", "and", "rand", "or", "ror", "invert", "eq", "ne"):
    setattr(DescribedMask, f"__{_name}__", _of_tensor(f"__{_name}__"))


def describe_mask(batch_size: int, q_length: int, kv_length: int, **asked: Any) -> Any:
    """The mask function of plugged models: None, a tensor, or a :class:`DescribedMask`.

    The arguments are those of transformers' ``sdpa_mask``.
    """
    if isinstance(asked.get("attention_mask"), DescribedMask):
        # an outer model has made it
        return asked["attention_mask"]
    function = asked.setdefault("mask_function", _CAUSAL)
    skip = asked.get("allow_is_bidirectional_skip")
    causal = skip is None
    asked["allow_is_bidirectional_skip"] = bool(skip)
    if causal:
        skip = asked.get("allow_is_causal_skip", True)
    visible = None
    if _is_of_first_tokens(q_length, kv_length, asked, causal):
        visible = _describe(batch_size, q_length, asked, causal)
    if visible is not None and not visible.needs_rows():
        if visible.keys is not None:
            # one row for all queries: expanded, it has the shape that transformers makes
            return visible.keys[:, :, None].expand(batch_size, 1, q_length, q_length)
        if skip and not (causal and torch.compiler.is_compiling()):
            # the attention layers are causal, or not, by themselves
            return None
        if not skip and function.__name__ != _TOGETHER:
            # the model asked for the mask itself; packed documents ask for it, too
            visible = None
    if visible is not None:
        shape = (batch_size, 1, q_length, kv_length)
        return DescribedMask(visible, shape, asked.get("device", "cpu"))
    return sdpa_mask(batch_size, q_length, kv_length, **asked)


def _is_of_first_tokens(
    q_length: int, kv_length: int, asked: Mapping[str, Any], causal: bool
) -> bool:
    """Whether queries are the first tokens, and see no other keys than theirs."""
    if asked.get("use_vmap") or torch.jit.is_tracing() or asked.get("kv_offset", 0) != 0:
        return False
    if q_length != kv_length and not (causal and 1 < q_length < kv_length):
        # more keys than queries are a prompt in a static cache; a decoded token is never the first
        return False
    q_offset, padding = asked.get("q_offset", 0), asked.get("attention_mask")
    # a static cache has it on the device; for a decoded token it is not read, which would wait
    unknown = isinstance(q_offset, Tensor) and masking_utils.is_tracing(q_offset)
    if unknown or bool(q_offset != 0):
        return False
    if padding is None or padding.shape[-1] == kv_length:
        return True
    # transformers hides what the mask does not reach, and a prompt's mask ends with the prompt
    return bool(q_length < kv_length and q_length <= padding.shape[-1])


def _describe(
    batch_size: int, length: int, asked: Mapping[str, Any], causal: bool
) -> Visibility | None:
    """What a mask function says, or None if it says something else than the parts known here."""
    mask_function, config = asked["mask_function"], asked.get("config")
    padding, window = asked.get("attention_mask"), asked.get("local_size")
    if not _is_known(mask_function, window, config, causal):
        return None
    padding = None if padding is None else padding[:, :length]
    if padding is not None and not masking_utils.is_tracing(padding) and bool(padding.all()):
        padding = None
    keys = None if padding is None else padding[:, None, :]
    if window is not None:
        # transformers' window to both sides includes its last token
        window = window if causal else window + 1
        # a compiled graph is compiled once more beyond the window; an exported program has to serve
        # all lengths
        compiling = torch.compiler.is_compiling()
        for_all_lengths = is_exporting() if compiling else masking_utils.is_tracing(padding)
        if not for_all_lengths and window >= length:
            window = None
    documents = None
    # several documents may share a row where masks are combined
    may_be_packed = causal and padding is None and mask_function.__name__ == _TOGETHER
    if may_be_packed and masking_utils.is_tracing():
        # transformers cannot look at positions there; those that a model makes are of one document
        may_be_packed = getattr(config, "positions_given", True)
    elif may_be_packed:
        may_be_packed = any(part.__code__ is _PACKED.__code__ for part in _parts(mask_function))
    if may_be_packed:
        documents = _documents(mask_function, batch_size, length, asked.get("device", "cpu"))
    return Visibility(keys, None, causal, window, documents, in_order=documents is not None)


_CAUSAL = masking_utils.causal_mask_function
_TO_BOTH_SIDES = masking_utils.bidirectional_mask_function
_TOGETHER = and_masks().__name__
_WINDOW = masking_utils.sliding_window_overlay(2)
_WINDOW_TO_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(2)
# five tokens, the last three of a second document
_PACKED = masking_utils.packed_sequence_mask_function({(0, token): token > 1 for token in range(5)})


_MEANT: dict[Any, Callable[[int, int], bool]] = {
    _CAUSAL: lambda query, key: key <= query,
    _TO_BOTH_SIDES: lambda query, key: True,
    _WINDOW: lambda query, key: key > query - 2,
    _WINDOW_TO_BOTH_SIDES: lambda query, key: abs(query - key) <= 2,
    _PACKED: lambda query, key: (query > 1) == (key > 1),
}
# the code of those parts of masks that do in this version what a description says
_KNOWN = {
    part.__code__
    for part, says in _MEANT.items()
    if all(part(0, 0, *pair) == says(*pair) for pair in itertools.product(range(5), repeat=2))
}


def _is_known(function: Any, local_size: int | None, config: Any, causal: bool) -> bool:
    """Whether a mask function consists of causality, a window and documents alone."""
    if torch.compiler.is_compiling():
        # the compiler cannot look into a closure. Chunks are the only other conjunction that
        # transformers makes without use_vmap
        if function.__name__ != _TOGETHER:
            return bool(function.__name__ == (_CAUSAL if causal else _TO_BOTH_SIDES).__name__)
        return local_size is None or getattr(config, "attention_chunk_size", None) is None
    windows = (_WINDOW.__code__, _WINDOW_TO_BOTH_SIDES.__code__)
    for part in _parts(function):
        if getattr(part, "__code__", None) not in _KNOWN:
            return False
        if part.__code__ in windows and part.__closure__[0].cell_contents != local_size:
            return False
    return (_CAUSAL if causal else _TO_BOTH_SIDES) in _parts(function)


def _parts(function: Any) -> Iterator[Any]:
    """The functions of a conjunction, and of the conjunctions in it."""
    if getattr(function, "__code__", None) is not and_masks().__code__:
        yield function
        return
    for cell in function.__closure__ or ():
        for part in cell.cell_contents:
            yield from _parts(part)


def _documents(
    mask_function: Callable[..., Any], batch_size: int, length: int, device: torch.device | str
) -> Tensor:
    """``(B, 1, N)``, numbers of documents: a token that does not see the one before begins one."""
    batch = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, length, device=device)[None]
    head = torch.zeros((), dtype=torch.long, device=device)
    begins = ~mask_function(batch, head, token, token - 1)
    documents = torch.nn.functional.pad(begins.cumsum(-1), (1, 0))
    return documents.expand(batch_size, length)[:, None]


ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, describe_mask)


_HANDLES = "_gfsa_mask_handles"
PLUGGED = "_gfsa_handle"
_FOR_GENERATE = "create_masks_for_generate"
_CREATORS = {
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
    "create_causal_mask",
    "create_masks_for_generate",
    "create_sliding_window_causal_mask",
}


class ConfigView:
    """Passes everything to the real config; a subclass overrides ``_attn_implementation``."""

    real: Any

    def __init__(self, config: Any, **attributes: Any) -> None:
        for name, value in {**attributes, "real": config}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "real" or name.startswith("__"):
            # asked for while it is copied or unpickled, before it has one
            raise AttributeError(name)
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.real, name)


class MaskConfigView(ConfigView):
    """A model's config while it makes its masks."""

    positions_given = True
    """Whether the caller gave position ids, which may be those of packed documents."""

    @property
    def _attn_implementation(self) -> str | None:
        name: str | None = self.real._attn_implementation
        # a user may have registered another mask function for sdpa
        if name == "sdpa" and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask:
            return NAME
        return name


def _take_view(place: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the forward of a model that makes masks: its config becomes the view."""
    config = module.config
    if isinstance(config, MaskConfigView):
        # the model is called inside of its own forward, or another thread is in it
        config = config.real
    positions = args[place] if len(args) > place else kwargs.get("position_ids")
    module.config = MaskConfigView(config, positions_given=positions is not None)


def _leave_view(module: Any, *_: Any) -> None:
    """After the forward, also one that raised: the config is the real one again."""
    # read once: another thread that leaves the same model may put the real one back in between
    config = module.config
    if isinstance(config, MaskConfigView):
        module.config = config.real


def _write_out(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the forward of an attention layer without a filter: masks become what it takes."""

    def taken(mask: Any) -> Any:
        if isinstance(mask, DescribedMask) and getattr(module, "is_causal", False):
            # causal by itself; a compiled transformers model would write the triangle
            no_rows = mask.visible.causal and not mask.visible.needs_rows()
            return None if no_rows else mask.tensor()
        return written_out(mask)

    return tuple(map(taken, args)), {name: taken(value) for name, value in kwargs.items()}


def set_mask_hooks(model: nn.Module) -> None:
    """Give every model in ``model`` the hooks that its plugged layers need, and remove others."""
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    plugged = [m for m in inner if any(PLUGGED in part.__dict__ for part in m.modules())]
    makers = [module for module in plugged if _makes_masks(type(module))]
    for module in inner:
        # torch calls no hook after a forward that Ctrl-C ended
        _leave_view(module)
        if module.__dict__.get(_FOR_GENERATE) is _describe_for_generate:
            del module.__dict__[_FOR_GENERATE]
        if _makes_masks_before(module, makers):
            module.__dict__[_FOR_GENERATE] = _describe_for_generate
    for maker in makers:
        names = tuple(inspect.signature(type(maker).forward).parameters)[1:]
        place = names.index("position_ids") if "position_ids" in names else len(names)
        take_view = functools.partial(_take_view, place)
        enter = maker.register_forward_pre_hook(take_view, with_kwargs=True)
        leave = maker.register_forward_hook(_leave_view, always_call=True)
        maker.__dict__[_HANDLES] = (*maker.__dict__.get(_HANDLES, ()), enter, leave)
        for module in maker.modules():
            if PLUGGED in module.__dict__ or _HANDLES in module.__dict__:
                continue
            if looks_like_attention(module):
                handle = module.register_forward_pre_hook(_write_out, with_kwargs=True)
                module.__dict__[_HANDLES] = (handle,)


def _makes_masks(kind: type[nn.Module]) -> bool:
    """Whether the methods of a class make masks, and do not ask for the implementation's name."""
    own = kind.__mro__[: kind.__mro__.index(PreTrainedModel)]
    # what is decided when a model is built, the real config decides
    methods = (f for base in own for n, f in vars(base).items() if n != "__init__" and callable(f))
    names = {name for method in methods for name in names_in_code(method, depth=0)}
    return bool(names & _CREATORS) and "_attn_implementation" not in names


def _describe_for_generate(config: Any, **arguments: Any) -> Any:
    """In place of transformers' function, for one model."""
    return masking_utils.create_masks_for_generate(config=_OneConfig(config), **arguments)


class _OneConfig(MaskConfigView):
    """The view of a config without parts: the model's and the text's are the same."""

    def get_text_config(self, *args: Any, **kwargs: Any) -> _OneConfig:
        return self


def _makes_masks_before(module: PreTrainedModel, makers: Sequence[PreTrainedModel]) -> bool:
    """Whether a model's ``generate`` makes the masks of one of ``makers``, in the usual way."""
    if not hasattr(module, "prepare_inputs_for_generation") or hasattr(module, _FOR_GENERATE):
        return False
    config = module.config
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return False
    inside = set(module.modules())
    return any(maker in inside and maker.config is config for maker in makers)
