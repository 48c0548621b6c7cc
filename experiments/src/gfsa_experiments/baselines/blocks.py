"""The anatomy of known Transformer blocks: where their branches end, and their norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from gfsa_experiments.models.attention import Block


@dataclass(frozen=True)
class Place:
    """Where tokens can be changed: the input or the output of a module of the block."""

    module: str
    side: Literal["input", "output"] = "output"

    def __str__(self) -> str:
        return f"{self.side} of {self.module}"


@dataclass(frozen=True)
class Anatomy:
    """The parts of one kind of block, by their paths inside it."""

    attention: str
    branches: dict[str, Place]
    """What is added to the residual stream, by name; ``"attention"`` is one of them."""
    norms: tuple[str, ...] = ()
    """The norms whose input holds all tokens of a sample."""
    after_attention: str | None = None
    """The norm that follows the addition of attention to the residual stream."""
    why_no_norm: str = ""
    """The reason, if there is no such norm."""
    masks_at: str = ""
    """The module whose arguments contain the masks; the block itself by default."""
    own_scales: tuple[str, ...] = field(default=())
    """Paths of the parameters of a LayerScale that the block may have of its own."""


def _pre_norm(
    attention: str, mlp: str, first: str, second: str, own_scales: tuple[str, ...] = ()
) -> Anatomy:
    return Anatomy(
        attention,
        {"attention": Place(attention), "mlp": Place(mlp)},
        (first, second),
        second,
        own_scales=own_scales,
    )


_BERT = Anatomy(
    "attention.self",
    {"attention": Place("attention.output.dense"), "mlp": Place("output.dense")},
    ("attention.output.LayerNorm", "output.LayerNorm"),
    "attention.output.LayerNorm",
)
_ALBERT = Anatomy(
    "attention",
    {"attention": Place("attention.dense"), "mlp": Place("ffn_output")},
    ("attention.LayerNorm", "full_layer_layer_norm"),
    "attention.LayerNorm",
)
_SWIN = Anatomy(
    "attn",
    # attention returns windows; they are merged again in the input of drop_path1
    {"attention": Place("drop_path1", "input"), "mlp": Place("mlp")},
    ("norm1", "norm2"),
    "norm2",
)
_CONFORMER = Anatomy(
    "mha_layer",
    {
        "ffn1": Place("ffn_module1"),
        "attention": Place("mha_layer"),
        "convolution": Place("convolution_module"),
        "ffn2": Place("ffn_module2"),
    },
    ("norm1", "norm2"),
    why_no_norm="a convolution comes between its attention and its next norm",
)
GPS_BLOCK = Anatomy(
    "attn",
    {"attention": Place("attn"), "mlp": Place("mlp")},
    why_no_norm="its norms get the nodes of all graphs in one list, without their boundaries",
    masks_at="attn",
)
"""``GPSConv`` of PyTorch Geometric, and classes that are built like it."""


def _by_order(attention: str, mlp: str, norm_first: str) -> Callable[[Any], Anatomy]:
    """Blocks that have an option for norms before or after their branches."""

    def anatomy(block: Any) -> Anatomy:
        after = "norm2" if getattr(block, norm_first) else "norm1"
        branches = {"attention": Place(attention), "mlp": Place(mlp)}
        return Anatomy(attention, branches, ("norm1", "norm2"), after)

    return anatomy


# by module and class name: the libraries themselves are not imported
_KNOWN: dict[tuple[str, str], Anatomy | Callable[[Any], Anatomy]] = {
    **{
        (f"transformers.models.{family}.modeling_{family}", f"{name}Layer"): _BERT
        for family, name in (
            ("bert", "Bert"),
            ("roberta", "Roberta"),
            ("camembert", "Camembert"),
            ("electra", "Electra"),
            ("xlm_roberta", "XLMRoberta"),
        )
    },
    ("transformers.models.albert.modeling_albert", "AlbertLayer"): _ALBERT,
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"): _pre_norm(
        "attn", "mlp", "ln_1", "ln_2"
    ),
    ("transformers.models.vit.modeling_vit", "ViTLayer"): _pre_norm(
        "attention", "mlp", "layernorm_before", "layernorm_after"
    ),
    ("timm.models.vision_transformer", "Block"): _pre_norm(
        "attn", "mlp", "norm1", "norm2", ("ls1.gamma", "ls2.gamma")
    ),
    ("timm.models.cait", "LayerScaleBlock"): _pre_norm(
        "attn", "mlp", "norm1", "norm2", ("gamma_1", "gamma_2")
    ),
    ("timm.models.swin_transformer", "SwinTransformerBlock"): _SWIN,
    ("torch.nn.modules.transformer", "TransformerEncoderLayer"): _by_order(
        "self_attn", "linear2", "norm_first"
    ),
    ("torch_geometric.nn.conv.gps_conv", "GPSConv"): GPS_BLOCK,
    (
        "speechbrain.lobes.models.transformer.Transformer",
        "TransformerEncoderLayer",
    ): _by_order("self_att", "pos_ffn", "normalize_before"),
    ("speechbrain.lobes.models.transformer.Conformer", "ConformerEncoderLayer"): _CONFORMER,
}

_registered: dict[type[nn.Module], Anatomy] = {
    Block: _pre_norm("attention", "mlp", "attention_norm", "mlp_norm")
}

FAMILIES = (
    "transformers' BERT, RoBERTa, ALBERT, GPT-2 and ViT, timm's ViT/DeiT, CaiT and Swin, "
    "nn.TransformerEncoderLayer, gfsa.models, GPSConv and SpeechBrain's encoders"
)


def register_block(cls: type[nn.Module], anatomy: Anatomy) -> None:
    """Teach :func:`gfsa.baselines.apply` a block class; registering ``cls`` again replaces it.

    Args:
        cls: the class of the block.
        anatomy: where the parts of such a block are.

    Raises:
        TypeError: if ``cls`` is no ``nn.Module`` class, or ``anatomy`` no :class:`Anatomy`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected an nn.Module class, got {cls!r}")
    if not isinstance(anatomy, Anatomy):
        raise TypeError(f"expected a gfsa.baselines.Anatomy, got {anatomy!r}")
    _registered[cls] = anatomy


def anatomy_of(block: nn.Module) -> Anatomy | None:
    """The anatomy of ``block``, or None if it is no known block.

    A class derived from a known one counts as long as it does not override its forward.
    """
    for cls in type(block).__mro__:
        known = _registered.get(cls) or _KNOWN.get((cls.__module__, cls.__qualname__))
        if known is not None and inherits_forward(type(block), cls):
            return known if isinstance(known, Anatomy) else known(block)
    return None


def inherits_forward(derived: Any, cls: Any) -> bool:
    return bool(derived.forward is cls.forward)


def width_of(block: nn.Module, anatomy: Anatomy) -> int:
    """The number of channels of the block's tokens."""
    channels = getattr(block, "channels", None)
    if isinstance(channels, int):
        return channels
    norm = block.get_submodule(anatomy.norms[0])
    weight = next(norm.parameters(), None)
    if weight is None:
        raise ValueError(
            f"cannot determine the width of a {type(block).__name__}: its norm {anatomy.norms[0]} "
            "has no weights"
        )
    return weight.shape[-1]


def sequence_first(block: nn.Module) -> bool:
    """Whether the block's tokens are ``(N, B, D)``, the default of torch's layers."""
    if isinstance(block, nn.TransformerEncoderLayer):
        return not block.self_attn.batch_first
    return False


def owns_layer_scale(block: nn.Module, anatomy: Anatomy) -> bool:
    """Whether the block was built with a LayerScale."""
    return any(_has(block, path) for path in anatomy.own_scales)


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module is not None
