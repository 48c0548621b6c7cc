"""Tiny models of every family that the comparison methods know, each with samples of its own.

A family runs two samples of different lengths in one padded batch, and each of them by itself: a
method that minds its masks gives the same numbers both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gfsa_experiments.models.attention import SelfAttention, SoftmaxAttention
from support.encoder import EfficientAttention, Encoder
from support.graphs import ATOMS, BONDS, molecule, randomise

LENGTHS = (7, 4)
DIM, HEADS, DEPTH = 12, 3, 3


@dataclass(frozen=True)
class Family:
    """How a model is built, and run on samples: one tensor of outputs for each."""

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module, list[int]], list[Tensor]]
    depth: int = DEPTH
    refuses: tuple[str, ...] = ()
    """Methods that have no place in it."""
    dtype: torch.dtype = torch.float64
    """Relative attention of SpeechBrain runs in float32 only."""

    @property
    def rounding(self) -> float:
        """How far two ways of computing the same may be apart."""
        return 1e-10 if self.dtype == torch.float64 else 3e-5

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        # where weights are small every map is flat, and every method does next to nothing
        return randomise(self.build().to(self.dtype).eval(), scale=0.3)


def _ids(sample: int, length: int) -> Tensor:
    rng = torch.Generator().manual_seed(sample)
    return torch.randint(3, 30, (length,), generator=rng)


def _tokens(sample: int, length: int) -> Tensor:
    rng = torch.Generator().manual_seed(sample)
    return torch.randn(length, DIM, generator=rng, dtype=torch.float64)


def _padded(make: Callable[[int, int], Tensor], samples: list[int], fill: int) -> Any:
    """``(B, N, …)`` padded with ``fill``, and ``(B, N)``, True where a token is real."""
    rows = [make(sample, LENGTHS[sample]) for sample in samples]
    most = max(map(len, rows))
    full = rows[0].new_full((len(rows), most, *rows[0].shape[1:]), fill)
    for row, values in zip(full, rows, strict=True):
        row[: len(values)] = values
    taken = torch.arange(most) < torch.tensor([len(row) for row in rows])[:, None]
    return full, taken


def _cut(outputs: Tensor, taken: Tensor) -> list[Tensor]:
    return [row[real] for row, real in zip(outputs, taken, strict=True)]


def _text(kind: str, implementation: str = "sdpa", **options: Any) -> Family:
    def build() -> nn.Module:
        import transformers as hf

        sizes = {
            "vocab_size": 30,
            "hidden_size": DIM,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": HEADS,
            "intermediate_size": 20,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_implementation": implementation,
        }
        config = getattr(hf, f"{kind}Config")(**{**sizes, **options})
        return getattr(hf, f"{kind}Model")(config)

    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        ids, taken = _padded(_ids, samples, 0)
        mask = None if bool(taken.all()) else taken.long()
        return _cut(model(input_ids=ids, attention_mask=mask).last_hidden_state, taken)

    if kind == "Albert":
        # one layer, run again and again
        return Family(build, run, 1, refuses=("neutreno",))
    return Family(build, run)


def _image(build: Callable[[], nn.Module], **about: Any) -> Family:
    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        pixels = torch.stack(
            [torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(s)) for s in samples]
        )
        outputs = model(pixels.double())
        return list(getattr(outputs, "last_hidden_state", outputs))

    return Family(build, run, **about)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, img_size=16, num_classes=5, **options)

    return build


def _hf_vit() -> nn.Module:
    import transformers as hf

    return hf.ViTModel(
        hf.ViTConfig(
            hidden_size=DIM,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            intermediate_size=20,
            image_size=16,
            patch_size=4,
        ),
        add_pooling_layer=False,
    )


def _torch_encoder(norm_first: bool, batch_first: bool) -> Family:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, 20, dropout=0.0, norm_first=norm_first, batch_first=batch_first
        )
        return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=batch_first)

    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        x, taken = _padded(_tokens, samples, 100)
        x = x if batch_first else x.transpose(0, 1)
        padding = None if bool(taken.all()) else ~taken
        y = model(x, src_key_padding_mask=padding)
        return _cut(y if batch_first else y.transpose(0, 1), taken)

    return Family(build, run)


def _encoder(kind: type[SelfAttention]) -> Family:
    def build() -> nn.Module:
        return Encoder(30, kind, dim=DIM, depth=DEPTH, num_heads=HEADS)

    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        ids, taken = _padded(_ids, samples, 0)
        return list(model(ids, None if bool(taken.all()) else ~taken))

    return Family(build, run)


def _graphormer() -> Family:
    def build() -> nn.Module:
        from gfsa_experiments.models import Graphormer

        return Graphormer(
            (ATOMS,), (BONDS,), 5, dim=DIM, depth=DEPTH, num_heads=HEADS, ffn_dim=20, max_hops=2
        )

    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        from gfsa_experiments.models import GraphormerCollator

        collate = GraphormerCollator(max_hops=2)
        return list(model(collate([molecule(LENGTHS[s], seed=s) for s in samples])))

    return Family(build, run)


class _GPS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GINConv, GPSConv

        self.layers = nn.ModuleList(
            GPSConv(DIM, GINConv(nn.Linear(DIM, DIM)), HEADS, norm="layer_norm")
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        for layer in self.layers:
            # a norm over all nodes of a batch would mix the graphs: here it is out of the way
            layer.norm1 = layer.norm2 = layer.norm3 = None
            x = layer(x, edges, batch) / 4
        return x


def _gps() -> Family:
    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        graphs = [_tokens(s, LENGTHS[s]) for s in samples]
        batch = torch.repeat_interleave(torch.tensor([len(g) for g in graphs]))
        ends = torch.arange(len(batch) - 1)
        edges = torch.stack([ends, ends + 1])[:, batch[:-1] == batch[1:]]
        return list(model(torch.cat(graphs), edges, batch).split([len(g) for g in graphs]))

    return Family(_GPS, run, refuses=("contranorm", "contranorm-vit"))


def _speech(kind: str, attention: str, **about: Any) -> Family:
    def build() -> nn.Module:
        if kind == "conformer":
            from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder

            return ConformerEncoder(
                DEPTH, DIM, 20, HEADS, kernel_size=1, attention_type=attention, dropout=0.0
            )
        from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder

        return TransformerEncoder(
            DEPTH, HEADS, 20, d_model=DIM, attention_type=attention, dropout=0.0
        )

    def run(model: nn.Module, samples: list[int]) -> list[Tensor]:
        from speechbrain.nnet.attention import RelPosEncXL

        x, taken = _padded(_tokens, samples, 1)
        x = x.to(next(model.parameters()).dtype)
        positions = RelPosEncXL(DIM)(x) if attention == "RelPosMHAXL" else None
        padding = None if bool(taken.all()) else ~taken
        return _cut(model(x, src_key_padding_mask=padding, pos_embs=positions)[0], taken)

    return Family(build, run, **about)


_SMALL = {"patch_size": 4, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS}
_WINDOWS = {"patch_size": 2, "window_size": 4, "embed_dim": DIM, "depths": (2, 1)}

FAMILIES: dict[str, Callable[[], Family]] = {
    "BERT": lambda: _text("Bert"),
    "RoBERTa": lambda: _text("Roberta", max_position_embeddings=20),
    "CamemBERT": lambda: _text("Camembert", max_position_embeddings=20),
    "ELECTRA": lambda: _text("Electra", embedding_size=8),
    "XLM-RoBERTa": lambda: _text("XLMRoberta", max_position_embeddings=20),
    "ALBERT": lambda: _text("Albert", embedding_size=8),
    "GPT-2": lambda: _text("GPT2"),
    "ViT of transformers": lambda: _image(_hf_vit),
    "DeiT": lambda: _image(_timm("deit_tiny_patch16_224", **_SMALL)),
    "CaiT": lambda: _image(_timm("cait_xxs24_224", **_SMALL), refuses=("layerscale",)),
    "Swin": lambda: _image(
        _timm("swin_tiny_patch4_window7_224", **_WINDOWS, num_heads=(3, 3)),
        refuses=("neutreno", "attnscale"),
    ),
    # its attention is traced, its blocks are not known
    "torch, norms last": lambda: _torch_encoder(norm_first=False, batch_first=True),
    "torch, norms first": lambda: _torch_encoder(norm_first=True, batch_first=False),
    "our blocks": lambda: _encoder(SoftmaxAttention),
    "our blocks, own map": lambda: _encoder(EfficientAttention),
    "Graphormer": _graphormer,
    "GPSConv": _gps,
    "SpeechBrain": lambda: _speech("transformer", "regularMHA"),
    "SpeechBrain, relative": lambda: _speech("transformer", "RelPosMHAXL", dtype=torch.float32),
    "Conformer": lambda: _speech("conformer", "regularMHA", refuses=("contranorm",)),
}

METHODS: dict[str, SimpleNamespace] = {
    "attnscale": SimpleNamespace(name="attnscale", options={}),
    "contranorm": SimpleNamespace(name="contranorm", options={"scale": 0.5}),
    "contranorm-vit": SimpleNamespace(name="contranorm", options={"scale": 0.5, "form": "vit"}),
    "featscale": SimpleNamespace(name="featscale", options={}),
    "layerscale": SimpleNamespace(name="layerscale", options={"init": 0.5}),
    "neutreno": SimpleNamespace(name="neutreno", options={}),
}
