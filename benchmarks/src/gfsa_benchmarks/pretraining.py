"""A pretraining step of the recipe's decoder: what filters cost in training, compiled or not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from gfsa.filters import Exclusive
from gfsa.plugs import filters_of, plug
from gfsa_benchmarks.case import Case, Setting, Shape, Variant
from gfsa_benchmarks.training import backend_of, compile_for
from gfsa_experiments.engine.step import build_optimiser, compile_model
from gfsa_experiments.tasks.pretrain.model import NextTokenLoss, build_decoder
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig

LAYERS = 12
VOCABULARY = PretrainConfig.vocab_size

# the arguments of plug, None for the model as it is
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "gfsa degree 1": {"K": None, "learn": ("w0", "w1")},
    "gfsa": {"K": 3},
    "gfsa exclusive": {"filter": Exclusive},
    "gfsa exclusive depth": {"filter": Exclusive, "depth": True},
}


def pretraining_step(shape: Shape, setting: Setting) -> Case:
    """Forward, backward, clipped gradients and AdamW, as the recipe ``pretrain`` trains.

    Autocast to the setting's dtype, fused AdamW on a GPU, random tokens. ``fwd`` is the forward of
    such a step, with what it keeps for the gradient: the compiler needs one graph for both.
    """
    if shape.padded:
        raise ValueError(f"rows of pretraining have no padding, got the shape {shape}")
    shape = dataclasses.replace(shape, causal=True)
    sizes = decoder_sizes(shape)
    config = PretrainConfig(batch_size=shape.batch, graphs=setting.graphs)
    # random numbers are drawn on the CPU: the same on every device
    tokens = torch.randint(VOCABULARY, (shape.batch, shape.tokens + 1)).to(setting.device)
    plain = _decoder(sizes, setting)
    variants = []
    for name, arguments in ARMS.items():
        ran = "torch" if arguments is None else _ran(sizes, arguments, tokens, setting)
        model = copy.deepcopy(plain)
        if arguments is not None:
            plug(model, **arguments)
        variants.append(_variant(name, ran, model, tokens, config, setting))
    return Case(str(shape), variants)


def decoder_sizes(shape: Shape) -> PretrainConfig:
    """The decoder of a size of the recipe that has these heads, or one of 12 layers like them."""
    for size in get_args(get_type_hints(PretrainConfig)["size"]):
        known = PretrainConfig(size=size, block=shape.tokens).whole()
        if (known.heads, known.head_dim) == (shape.heads, shape.dim):
            return known
    width = shape.heads * shape.dim
    return PretrainConfig(
        depth=LAYERS,
        width=width,
        heads=shape.heads,
        kv_heads=shape.heads,
        head_dim=shape.dim,
        # SwiGLU has three matrices instead of two: 8/3 of the width
        mlp=-(-8 * width // (3 * 64)) * 64,
        block=shape.tokens,
    )


def _decoder(sizes: PretrainConfig, setting: Setting) -> Any:
    model = build_decoder(sizes, VOCABULARY)
    model.loss_function = NextTokenLoss(compiled=setting.compiled is not None)
    return model.to(setting.device).train()


def _variant(
    name: str, ran: str, model: Any, tokens: Tensor, config: PretrainConfig, setting: Setting
) -> Variant:
    parameters = list(model.parameters())
    added = [p for layer in filters_of(model).values() for p in layer.parameters()]
    optimiser = build_optimiser(model, added, config, filter_lr=None)
    compile_for(setting, model)
    loss = _loss(model, tokens, setting)

    def forward() -> Tensor:
        return loss().detach()

    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.clip, foreach=True)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return Variant(name, ran, forward, step)


def _loss(model: Any, tokens: Tensor, setting: Setting) -> Callable[[], Any]:
    def loss() -> Any:
        with setting.autocast():
            # a mask that is handed over ready, as in the recipe: none
            return model(
                input_ids=tokens[:, :-1],
                labels=tokens[:, 1:],
                attention_mask={"full_attention": None},
                use_cache=False,
            ).loss

    return loss


def _ran(sizes: PretrainConfig, arguments: dict[str, Any], tokens: Tensor, setting: Setting) -> str:
    """Which operator serves a layer with these filters; its choice may differ when compiled."""
    model = _decoder(dataclasses.replace(sizes, depth=2), setting)
    plug(model, **arguments)
    if setting.compiled:
        compile_model(model, backend="eager")
    return backend_of(_loss(model, tokens, setting))
