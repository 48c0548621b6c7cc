"""Train every variant under every seed, on the same images in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import gfsa
from gfsa_experiments.tasks.digits.data import Digits, HeldOut, load_digits
from gfsa_experiments.tasks.digits.model import DigitsViT, FilterFactory


@dataclass(frozen=True)
class Settings:
    """Everything that decides what the demo does; chosen on the validation set."""

    seeds: int = 4
    epochs: int = 8
    depth: int = 12
    dim: int = 48
    heads: int = 4
    K: int = 3
    batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.05
    # a filter has to move by tenths, a weight by hundredths: it gets a learning rate of its own
    filter_lr_multiplier: float = 10.0
    held_out: HeldOut = "test"


@dataclass(frozen=True)
class Run:
    """What one training run gave."""

    variant: str
    seed: int
    accuracy: float  # percent of the held-out images
    seconds: float  # training alone
    parameters: int
    filter_parameters: int
    losses: list[float]  # mean over each epoch
    similarity: list[float]  # of the tokens entering the first block and leaving each block
    coefficients: list[list[list[float]]] = field(repr=False)  # layer, head, power


def variants(settings: Settings) -> dict[str, FilterFactory | None]:
    """Name → filter; the first is the model that the others are compared with."""
    filtered = partial(gfsa.GFSA, lr_multiplier=settings.filter_lr_multiplier)
    return {
        "plain": None,
        "degree 1": partial(filtered, K=None),
        f"GFSA K={settings.K}": partial(filtered, K=settings.K),
    }


def run_all(
    settings: Settings,
    on_step: Callable[[str, int], None],
    on_end: Callable[[str, int, DigitsViT], None] = lambda variant, seed, model: None,
) -> list[Run]:
    """Every seed for every variant, seed by seed, so that a busy machine slows all alike.

    ``on_step`` is called after each training step with the variant and the seed, ``on_end`` after
    each training run with the trained model besides.
    """
    digits = load_digits(settings.held_out)
    runs = []
    for seed in range(settings.seeds):
        for name, make_filter in variants(settings).items():
            run, model = train(name, make_filter, seed, settings, digits, on_step)
            on_end(name, seed, model)
            runs.append(run)
    return runs


def total_steps(settings: Settings) -> int:
    """Training steps of all runs together."""
    runs = settings.seeds * len(variants(settings))
    return runs * settings.epochs * steps_per_epoch(settings, load_digits(settings.held_out))


def steps_per_epoch(settings: Settings, digits: Digits) -> int:
    return len(digits.train_images) // settings.batch


def train(
    name: str,
    make_filter: FilterFactory | None,
    seed: int,
    settings: Settings,
    digits: Digits,
    on_step: Callable[[str, int], None],
) -> tuple[Run, DigitsViT]:
    """Train one model from scratch and look at it on the held-out images once, at the end."""
    torch.manual_seed(seed)
    model = DigitsViT(settings.depth, settings.dim, settings.heads, make_filter)
    steps = steps_per_epoch(settings, digits)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, total_steps=settings.epochs * steps, pct_start=0.2
    )
    # an order of its own generator: the same for every variant, whatever the model draws
    order = torch.Generator().manual_seed(seed)
    losses = []
    start = time.perf_counter()
    for _ in range(settings.epochs):
        shuffled = torch.randperm(len(digits.train_images), generator=order)
        total = 0.0
        for chosen in shuffled[: steps * settings.batch].split(settings.batch):
            loss = F.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
            on_step(name, seed)
        losses.append(total / steps)
    seconds = time.perf_counter() - start
    filters = gfsa.filters_of(model).values()
    with torch.no_grad():
        model.eval()
        states = model.tokens(digits.held_out_images)
        predicted = model.classify(states[-1]).argmax(-1)
        correct = (predicted == digits.held_out_labels).double().mean()
        run = Run(
            variant=name,
            seed=seed,
            accuracy=100 * correct.item(),
            seconds=seconds,
            parameters=_count(model.parameters()),
            filter_parameters=sum(_count(each.parameters()) for each in filters),
            losses=losses,
            similarity=[token_similarity(state) for state in states],
            coefficients=[each.coefficients().tolist() for each in filters],
        )
    return run, model


def token_similarity(tokens: Tensor) -> float:
    r"""How alike the tokens of an image are: mean cosine over all pairs, then over the batch.

    .. math:: \frac{2}{n(n-1)} \sum_{i<j} \hat x_i \cdot \hat x_j
              = \frac{\|\sum_i \hat x_i\|^2 - n}{n^2 - n}, \qquad \hat x = x / \|x\|

    O(n·d), no n×n matrix. ``tokens``: ``(B, N, D)``.
    """
    n = tokens.shape[-2]
    unit = F.normalize(tokens.double(), dim=-1)
    pairs = (unit.sum(-2).square().sum(-1) - n) / (n * n - n)
    return pairs.mean().item()


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in parameters)
