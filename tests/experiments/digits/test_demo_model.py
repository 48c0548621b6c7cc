"""The demo's Vision Transformer."""

from functools import partial

import pytest
import torch

import gfsa
from gfsa_experiments.tasks.digits.model import DigitsViT


def build(make_filter=None):
    torch.manual_seed(0)
    return DigitsViT(depth=3, dim=16, heads=2, make_filter=make_filter).eval()


@pytest.mark.parametrize("K", [None, 3])
def test_a_fresh_filter_changes_no_bit(K):
    images = torch.randn(4, 8, 8)
    plain, filtered = build(), build(partial(gfsa.GFSA, K=K))
    assert torch.equal(plain(images), filtered(images))


def test_a_moved_filter_changes_the_model():
    images = torch.randn(4, 8, 8)
    filtered = build(partial(gfsa.GFSA, w0=0.5))
    assert not torch.allclose(build()(images), filtered(images), atol=1e-3)


def test_variants_differ_in_the_filters_parameters_alone():
    plain, filtered = build(), build(gfsa.GFSA)
    mine = dict(filtered.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, mine.pop(name))
    assert sum(each.numel() for each in mine.values()) == 3 * 2 * 3


def test_patches_are_the_image_cut_in_squares():
    model = build()
    image = torch.arange(64.0).reshape(1, 8, 8)
    entering = model.tokens(image)[0][:, 1:] - model.position
    # the second token is the square of rows 0–1 and columns 2–3
    square = torch.tensor([2.0, 3.0, 10.0, 11.0])
    torch.testing.assert_close(entering[0, 1], model.embed(square))
