"""SpeechBrain: recognisers with regular, relative and rotary attention; cross-attention refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.attention import RelPosMHAXL
from torch import Tensor, nn
from torch.nn import functional as F

import gfsa
from support.plugging import check_backbone, disturb, matrix_polynomial

DIM, HEADS, WORDS = 16, 4, 11
SOUND = torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(0))
TEXT = torch.arange(10).view(2, 5) % (WORDS - 1) + 1


def recogniser(encoder: str, attention: str) -> nn.Module:
    options = {"num_encoder_layers": 2, "num_decoder_layers": 1, "d_ffn": 32, "dropout": 0.0}
    if encoder == "branchformer":
        options |= {"csgu_linear_units": 32, "kernel_size": 3}
    return TransformerASR(
        WORDS, 20, DIM, HEADS,
        encoder_module=encoder, attention_type=attention, normalize_before=True, causal=False,
        **options,
    )  # fmt: skip


def run(model: nn.Module) -> Tensor:
    # relative attention erases the columns of padding after its softmax, in the reference's H too,
    # where a padding token's own c0 stands; with masks it has a test of its own
    lengths = torch.tensor([1.0, 1.0 if model.attention_type == "RelPosMHAXL" else 0.7])
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        if hasattr(module, "emb_dtype"):
            module.emb_dtype = dtype  # positions keep the precision they were built in
    # relative attention takes its softmax in float32, too coarse for a reference in float64
    with mock.patch.object(F, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim)):
        encoded, decoded = model(SOUND.to(dtype), TEXT, lengths)
    return torch.cat([encoded.flatten(), decoded.flatten()])


@pytest.mark.parametrize(
    ("encoder", "attention"),
    [
        ("transformer", "regularMHA"),
        ("conformer", "RelPosMHAXL"),
        ("conformer", "RoPEMHA"),
        ("branchformer", "RelPosMHAXL"),
    ],
)
def test_recogniser(encoder, attention, tmp_path):
    report = check_backbone(lambda: recogniser(encoder, attention), run, tmp_path)
    assert len(report.plugged) == 3, "two layers of the encoder and the decoder's own"
    assert ["multihead_attn" in name for name in report.skipped] == [True]


@pytest.fixture
def layer() -> RelPosMHAXL:
    # the library's own forward runs in float32 and below only
    return RelPosMHAXL(DIM, HEADS).eval()


def test_relative_positions_return_the_filter_s_map(layer):
    x, positions = torch.randn(2, 6, DIM), torch.randn(1, 11, DIM)
    _, attention = layer(x, x, x, positions)
    gfsa.plug(layer, filter=gfsa.Twicing)
    _, filtered = layer(x, x, x, positions)
    torch.testing.assert_close(filtered, 2 * attention - attention @ attention)
    assert isinstance(layer(x, x, x, positions, return_attn_weights=False), Tensor)


def test_relative_positions_with_every_mask(layer):
    x, positions = torch.randn(2, 6, DIM), torch.randn(1, 11, DIM)
    hidden = (torch.rand(6, 6) < 0.4) & ~torch.eye(6, dtype=torch.bool)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    cases = [
        {"attn_mask": hidden, "key_padding_mask": padding},
        {"attn_mask": torch.randn(6, 6)},
        {"attn_mask": hidden.expand(2 * HEADS, 6, 6)},
        {"value": torch.randn(2, 6, DIM)},
    ]

    def outputs(case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        value = case.get("value", x)
        masks = {name: mask for name, mask in case.items() if "mask" in name}
        return layer(x, x, value, positions, **masks)

    before = [outputs(case) for case in cases]
    gfsa.plug(layer)
    for case, (expected, attention) in zip(cases, before, strict=True):
        y, weights = outputs(case)
        assert torch.equal(y, expected)
        assert torch.equal(weights, attention)
    (coefficients,) = disturb(layer)
    for case, (_, attention) in zip(cases, before, strict=True):
        torch.testing.assert_close(outputs(case)[1], matrix_polynomial(coefficients, attention))


def test_a_token_that_sees_nothing_keeps_c0_v(layer):
    gfsa.plug(layer)
    disturb(layer)
    x, positions = torch.randn(1, 3, DIM), torch.randn(1, 5, DIM)
    blind = torch.zeros(3, 3, dtype=torch.bool)
    blind[1] = True
    y, weights = layer(x, x, x, positions, attn_mask=blind)
    assert y.isfinite().all()
    own = layer.gfsa.coefficients()[:, 0]
    torch.testing.assert_close(weights[0, :, 1], own[:, None] * torch.eye(3)[1])


def test_relative_positions_refuse_another_sequence(layer):
    gfsa.plug(layer)
    x, positions = torch.randn(1, 3, DIM), torch.randn(1, 5, DIM)
    with pytest.raises(ValueError, match="other values"):
        layer(x, x + 1, x + 1, positions)
