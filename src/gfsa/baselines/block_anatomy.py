"""The blocks of known models: where their branches end and what their norms are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn


@dataclass(frozen=True)
class Place:
    """Where tokens can be changed: what goes into a module of the block, or comes out of it."""

    module: str
    side: Literal["input", "output"] = "output"

    def __str__(self) -> str:
        return f"{self.side} of {self.module}"


@dataclass(frozen=True)
class Anatomy:
    """The parts of one kind of block, named by their paths inside it."""

    attention: str
    branches: dict[str, Place]
    """What is added to the residual stream, by name; ``"attention"`` is among them."""
    norms: tuple[str, ...] = ()
    """What normalises tokens, each with all of a sample's tokens at once."""
    after_attention: str | None = None
    """The norm that comes next after attention is added to the stream."""
    why_no_norm: str = ""
    """Why there is no such norm, if there is none."""
    masks_at: str = ""
    """The module whose arguments tell the masks; the block itself by default."""
    own_scales: tuple[str, ...] = field(default=())
    """Attributes that a LayerScale of the block's own has."""


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
    # attention itself gives windows; where they have been put together again is what goes into
    # the layer that drops paths
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
_GPS = Anatomy(
    "attn",
    {"attention": Place("attn"), "mlp": Place("mlp")},
    why_no_norm="its norms take the nodes of all graphs in one list, where no graph ends",
    masks_at="attn",
)


def _by_order(attention: str, mlp: str, norm_first: str) -> Callable[[Any], Anatomy]:
    """Blocks that can be built with norms before their branches or after them."""

    def anatomy(block: Any) -> Anatomy:
        after = "norm2" if getattr(block, norm_first) else "norm1"
        branches = {"attention": Place(attention), "mlp": Place(mlp)}
        return Anatomy(attention, branches, ("norm1", "norm2"), after)

    return anatomy


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
    ("gfsa.models.attention", "Block"): _pre_norm("attention", "mlp", "attention_norm", "mlp_norm"),
    ("torch_geometric.nn.conv.gps_conv", "GPSConv"): _GPS,
    ("gfsa_experiments.tasks.graph.gps", "DenseGPSConv"): _GPS,
    (
        "speechbrain.lobes.models.transformer.Transformer",
        "TransformerEncoderLayer",
    ): _by_order("self_att", "pos_ffn", "normalize_before"),
    ("speechbrain.lobes.models.transformer.Conformer", "ConformerEncoderLayer"): _CONFORMER,
}

FAMILIES = (
    "transformers' BERT, RoBERTa, ALBERT, GPT-2 and ViT, timm's ViT/DeiT, CaiT and Swin, "
    "nn.TransformerEncoderLayer, gfsa.models, GPSConv and SpeechBrain's encoders"
)


def anatomy_of(block: nn.Module) -> Anatomy | None:
    """The parts of ``block``, or None if it is no block that is known here.

    A class derived from a known one counts as long as its forward is the known one.
    """
    for cls in type(block).__mro__:
        known = _KNOWN.get((cls.__module__, cls.__qualname__))
        if known is not None and inherits_forward(type(block), cls):
            return known if isinstance(known, Anatomy) else known(block)
    return None


def inherits_forward(derived: Any, cls: Any) -> bool:
    return bool(derived.forward is cls.forward)


def width_of(block: nn.Module, anatomy: Anatomy) -> int:
    """How many channels the block's tokens have."""
    channels = getattr(block, "channels", None)
    if isinstance(channels, int):
        return channels
    norm = block.get_submodule(anatomy.norms[0])
    weight = next(norm.parameters(), None)
    if weight is None:
        raise ValueError(
            f"cannot tell the width of a {type(block).__name__}: its norm {anatomy.norms[0]} has "
            "no weights"
        )
    return weight.shape[-1]


def sequence_first(block: nn.Module) -> bool:
    """Whether the block's tokens are ``(N, B, D)``, as torch's layers have them by default."""
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
