"""torchvision: ViT through torch's attention, Swin by tracing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.vision_transformer import VisionTransformer

from support.plugging import check_backbone

# 8 × 8 patches in windows of 3 × 3: torchvision pads the image to whole windows
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SWIN = ([4, 4], 12, [2, 1], [2, 3], [3, 3])


def run(model: nn.Module) -> Tensor:
    return model(IMAGE.to(next(model.parameters()).dtype))


def vit() -> nn.Module:
    model = VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # starts at zero
    return model


def swin_v2() -> nn.Module:
    return SwinTransformer(
        *SWIN, num_classes=5, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    )


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("ViT", vit),
        ("Swin", lambda: SwinTransformer(*SWIN, num_classes=5)),
        ("Swin-V2", swin_v2),
    ],
)
def test_backbone(name, build, tmp_path):
    report = check_backbone(build, run, tmp_path)
    assert not report.skipped
