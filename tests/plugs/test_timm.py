"""Models of timm and torchvision."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import timm
import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import VisionTransformer

import gfsa
from gfsa.adapters import timm as adapters
from gfsa.plugs.registry import find_adapter
from gfsa.plugs.tracing.adapter import KNOWN_TRACER
from support.plugging import check_backbone, disturb, matrix_polynomial

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = {"img_size": 32, "num_classes": 5}
VIT = {**SMALL, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SWIN = {**SMALL, "patch_size": 2, "embed_dim": 12, "depths": (2, 1), "num_heads": (2, 3)}


def run(model: nn.Module) -> Tensor:
    return model(IMAGE.to(next(model.parameters()).dtype))


def models() -> dict[str, tuple[str, dict]]:
    return {
        "ViT, DeiT": ("vit_tiny_patch16_224", VIT),
        "ViT, unfused": ("vit_tiny_patch16_224", VIT),
        "ViT with norms of q and k": ("vit_tiny_patch16_224", {**VIT, "qk_norm": True}),
        "Swin": ("swin_tiny_patch4_window7_224", {**SWIN, "window_size": 4}),
        "Swin, fused": ("swin_tiny_patch4_window7_224", {**SWIN, "window_size": 4}),
        "Swin-V2": ("swinv2_tiny_window8_256", {**SWIN, "window_size": 4}),
    }


def build(name: str) -> nn.Module:
    architecture, options = models()[name]
    model = timm.create_model(architecture, **options)
    for module in model.modules():
        if isinstance(module, Attention | WindowAttention):
            module.fused_attn = ("unfused" not in name) and type(module) is Attention
            module.fused_attn |= ", fused" in name
    return awake(model)


def awake(model: nn.Module) -> nn.Module:
    """Weights that let every layer be seen at the output; some start at almost nothing."""
    for parameter in model.parameters():
        if parameter.dim() > 1 or parameter.abs().max() < 1e-2:
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", models())
def test_backbone(name, tmp_path):
    report = check_backbone(lambda: build(name), run, tmp_path)
    assert not report.skipped


@contextmanager
def filtered_after_mixing(model, coefficients):
    """CaiT's map is the mixed one: the reference filters what comes out of ``proj_w``."""

    def hook(numbers):
        def replace(module, args, maps):
            mixed = maps.permute(0, 3, 1, 2)
            return matrix_polynomial(numbers, mixed).permute(0, 2, 3, 1)

        return replace

    handles = [
        block.attn.proj_w.register_forward_hook(hook(numbers))
        for block, numbers in zip(model.blocks, coefficients, strict=True)
    ]
    yield
    for handle in handles:
        handle.remove()


def cait() -> nn.Module:
    return awake(timm.create_model("cait_xxs24_224", **VIT))


def test_cait_is_filtered_after_its_heads_are_mixed(tmp_path):
    report = check_backbone(cait, run, tmp_path, reference=filtered_after_mixing)
    assert list(report.plugged) == ["blocks.0.attn", "blocks.1.attn"]
    assert all("class attention" in why for why in report.skipped.values())
    assert len(report.skipped) == 2


def test_xcit_is_refused():
    model = timm.create_model("xcit_nano_12_p16_224", **{**VIT, "patch_size": 16})
    for unknown in ("refuse", "trace"):
        with pytest.raises(ValueError, match="attention is over channels, not tokens") as error:
            gfsa.plug(model, unknown=unknown)
    assert "class attention has one query" in str(error.value)


def test_pooling_attention_is_left_alone():
    model = timm.create_model("vit_base_patch16_siglip_224", **VIT)
    report = gfsa.plug(model)
    assert len(report.plugged) == 2
    assert "pooling attention" in report.skipped["attn_pool"]


@pytest.mark.parametrize("fused", [True, False])
def test_the_learned_bias_between_positions_gets_its_gradient(fused):
    model = build("Swin").double().eval()
    gfsa.plug(model)
    disturb(model)
    attention = model.layers[0].blocks[1].attn  # a shifted one
    attention.fused_attn = fused
    run(model).square().sum().backward()
    table = attention.relative_position_bias_table
    index = (3, 1)
    gradient = table.grad[index].item()
    step = 1e-5
    with torch.no_grad():
        table[index] += step
        above = run(model).square().sum()
        table[index] -= 2 * step
        below = run(model).square().sum()
    assert gradient == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-5)


@pytest.mark.parametrize("place", ["attention", "filter"])
@pytest.mark.parametrize("fused", [True, False])
def test_dropout_of_the_map(place, fused):
    layer = Attention(24, 3, attn_drop=0.5)
    layer.fused_attn = fused
    gfsa.plug(layer, wK=0.3, dropout_after=place)
    x = torch.randn(2, 6, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_a_version_with_another_forward_is_traced(monkeypatch):
    x = torch.randn(2, 6, 24)
    expected = (layer := Attention(24, 3).eval())(x)

    def forward(self, x, attn_mask=None, is_causal=False):
        return original(self, x, attn_mask, is_causal) * self.something_new

    original = Attention.forward
    monkeypatch.setattr(Attention, "forward", forward)
    layer.something_new = 2.0
    assert find_adapter(layer) is KNOWN_TRACER
    gfsa.plug(layer)
    torch.testing.assert_close(layer(x), 2 * expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ViT, DeiT", "ViT, unfused", "Swin", "Swin, fused"])
def test_an_older_version_is_traced(name, monkeypatch):
    model = build(name).eval()
    expected = run(model)
    # the adapter's module is imported again, from a timm that lacks what it imports
    monkeypatch.delitem(sys.modules, adapters.__name__)
    monkeypatch.setitem(sys.modules, "timm.layers.attention", None)
    monkeypatch.setattr(gfsa.adapters, "timm", adapters)
    report = gfsa.plug(model)
    assert set(report.how.values()) == {"tracer, known class"}
    assert torch.equal(run(model), expected)


def test_compiles_into_one_graph():
    model = build("Swin").eval()
    gfsa.plug(model, wK=0.2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IMAGE), model(IMAGE))


@pytest.mark.parametrize(
    ("name", "plugged", "skipped"),
    [("levit_128s", 9, 2), ("twins_svt_small", 11, 7), ("maxvit_nano_rw_256", 14, 0)],
)
def test_classes_without_an_adapter_are_traced_after_a_trial_on_their_own_size(
    name: str, plugged: int, skipped: int, tmp_path
) -> None:
    model = timm.create_model(name).eval()
    x = torch.randn(1, *model.pretrained_cfg["input_size"])
    before = model(x)
    report = gfsa.plug(model)
    assert (len(report.plugged), len(report.skipped)) == (plugged, skipped)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-4)
    disturb(model)
    gfsa.save(model, tmp_path)
    loaded = timm.create_model(name).eval()
    loaded.load_state_dict({k: v for k, v in model.state_dict().items() if ".gfsa." not in k})
    gfsa.load(loaded, tmp_path)
    assert torch.equal(loaded(x), model(x))


def test_what_no_trial_has_shown_stays_refused() -> None:
    model = timm.create_model("levit_128s").eval()
    # a backbone with classes of timm that does not say what it takes
    backbone = nn.Sequential(model.stem)
    backbone.append(model.stages)
    with pytest.raises(ValueError, match="no adapter knows Attention"):
        gfsa.plug(backbone)
    # a part that the forward does not reach
    model.spare = timm.create_model("levit_128s").stages
    report = gfsa.plug(model)
    assert len(report.plugged) == 9
    assert all("no adapter knows" in report.skipped[f"spare.0.blocks.{i}.attn"] for i in (0, 1))


# 8 × 8 patches in windows of 3 × 3: torchvision pads the image to whole windows
TORCHVISION_SWIN = ([4, 4], 12, [2, 1], [2, 3], [3, 3])


def vit() -> nn.Module:
    model = VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # starts at zero
    return model


def swin_v2() -> nn.Module:
    return SwinTransformer(
        *TORCHVISION_SWIN,
        num_classes=5,
        block=SwinTransformerBlockV2,
        downsample_layer=PatchMergingV2,
    )


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("ViT", vit),
        ("Swin", lambda: SwinTransformer(*TORCHVISION_SWIN, num_classes=5)),
        ("Swin-V2", swin_v2),
    ],
)
def test_torchvision_backbone(name, build, tmp_path):
    report = check_backbone(build, run, tmp_path)
    assert not report.skipped
