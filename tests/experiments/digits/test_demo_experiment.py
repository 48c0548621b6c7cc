"""Training runs: paired, reproducible, and honest about their data."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from gfsa_experiments.tasks.digits.data import load_digits
from gfsa_experiments.tasks.digits.experiment import (
    Settings,
    run_all,
    token_similarity,
    total_steps,
    variants,
)

TINY = Settings(seeds=1, epochs=1, depth=2, dim=16, heads=2, batch=256, held_out="validation")


def silent(variant, seed):
    pass


def test_similarity_is_the_mean_over_pairs():
    tokens = torch.randn(3, 7, 5)
    unit = F.normalize(tokens, dim=-1)
    cosines = unit @ unit.transpose(1, 2)
    pairs = torch.stack([cosines[:, i, j] for i in range(7) for j in range(i + 1, 7)])
    assert abs(token_similarity(tokens) - pairs.mean().item()) < 1e-6


def test_similarity_of_equal_tokens_is_one():
    assert abs(token_similarity(torch.ones(2, 5, 3)) - 1) < 1e-12


def test_splits_share_no_image_and_training_is_the_same_for_both():
    test, validation = load_digits("test"), load_digits("validation")
    assert torch.equal(test.train_images, validation.train_images)
    sizes = [len(test.train_images), len(validation.held_out_images), len(test.held_out_images)]
    assert sum(sizes) == 1797
    # the pictures themselves are unique, so sets of them must not meet
    train, tuned, reported = (
        {tuple(image.flatten().tolist()) for image in images}
        for images in (test.train_images, validation.held_out_images, test.held_out_images)
    )
    assert [len(train), len(tuned), len(reported)] == sizes
    assert train.isdisjoint(tuned | reported)
    assert tuned.isdisjoint(reported)


def test_the_same_seed_gives_the_same_numbers():
    first, second = run_all(TINY, silent), run_all(TINY, silent)
    for one, other in zip(first, second, strict=True):
        assert replace(one, seconds=0.0) == replace(other, seconds=0.0)


def test_filters_learn_and_every_step_is_counted():
    steps = []
    runs = run_all(TINY, lambda variant, seed: steps.append(variant))
    assert len(steps) == total_steps(TINY)
    assert [run.variant for run in runs] == list(variants(TINY))
    plain, degree1, high = runs
    assert (plain.filter_parameters, degree1.filter_parameters, high.filter_parameters) == (
        0,
        8,
        12,
    )
    for run, start in ((degree1, [0.0, 1.0]), (high, [0.0, 1.0, 0.0])):
        moved = torch.tensor(run.coefficients) - torch.tensor(start)
        assert moved.abs().min() > 0
    # a first epoch of the same model on the same images starts from the same loss
    assert abs(plain.losses[0] - high.losses[0]) < 0.05
