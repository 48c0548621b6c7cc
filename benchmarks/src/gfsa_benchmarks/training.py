"""A training step of a whole model: what a filter costs where attention is one part of many."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from gfsa.filters import Exclusive
from gfsa.kernels import routes
from gfsa.operators import Coefficients, attention
from gfsa.operators.call import DecisionCache
from gfsa.plugs import plug
from gfsa_benchmarks.case import Case, Setting, Shape, Variant
from gfsa_benchmarks.published import published_attention
from gfsa_experiments.engine.step import compile_blocks, compile_model

LAYERS = 12
# a picture of 224 pixels in patches of 16, and the class token
TOKENS_OF_A_PICTURE = 197

Way = Literal["torch", "auto", "sdpa", "published"]


def training_step(shape: Shape, setting: Setting) -> Case:
    """Forward, backward and AdamW, under autocast to the setting's dtype.

    A causal shape is a GPT-2, one of 197 tokens a ViT, any other a BERT; all of 12 layers and as
    wide as the shape's heads. Attention is not dropped. ``fwd`` is the loss without gradients.
    """
    plain, batch = _model(shape, setting)
    variants = [_variant("plain", "torch", plain, batch, setting)]
    ways: list[tuple[str, Way, dict[str, Any]]] = [
        ("gfsa degree 1", "auto", {"K": None, "learn": ("w0", "w1")}),
        ("gfsa exclusive", "auto", {"filter": Exclusive}),
        ("gfsa", "auto", {"K": 3}),
        ("gfsa sdpa", "sdpa", {"K": 3}),
    ]
    if not setting.compiled:
        ways.append(("published", "published", {"K": 3}))
    for name, way, arguments in ways:
        model = copy.deepcopy(plain)
        plug(model, **arguments)
        variants.append(_variant(name, way, model, batch, setting))
    return Case(str(shape), variants)


def _model(shape: Shape, setting: Setting) -> tuple[Any, dict[str, Any]]:
    import transformers

    width = shape.heads * shape.dim
    device = setting.device
    # random numbers are drawn on the CPU: the same on every device
    if shape.causal:
        config: Any = transformers.GPT2Config(
            n_embd=width,
            n_layer=LAYERS,
            n_head=shape.heads,
            n_positions=shape.tokens,
            attn_pdrop=0.0,
            # each layer of a cache is another one to the compiler
            use_cache=setting.compiled != "blocks",
        )
        model: Any = transformers.GPT2LMHeadModel(config)
        ids = torch.randint(config.vocab_size, (shape.batch, shape.tokens)).to(device)
        batch = {"input_ids": ids, "labels": ids}
    else:
        sizes = {
            "hidden_size": width,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": shape.heads,
            "intermediate_size": 4 * width,
            "attention_probs_dropout_prob": 0.0,
        }
        labels = torch.randint(2, (shape.batch,)).to(device)
        if shape.tokens == TOKENS_OF_A_PICTURE:
            model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
            batch = {"pixel_values": torch.randn(shape.batch, 3, 224, 224).to(device)}
        else:
            config = transformers.BertConfig(max_position_embeddings=shape.tokens, **sizes)
            model = transformers.BertForSequenceClassification(config)
            ids = torch.randint(config.vocab_size, (shape.batch, shape.tokens))
            batch = {"input_ids": ids.to(device)}
        batch["labels"] = labels
    if shape.padded:
        if "input_ids" not in batch:
            raise ValueError(f"pictures are not padded, got the shape {shape}")
        batch["attention_mask"] = shape.real_tokens().long().to(device)
    return model.to(device).train(), batch


def _variant(name: str, way: Way, model: Any, batch: dict[str, Any], setting: Setting) -> Variant:
    # in a graph the number of steps must be counted on the GPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, capturable=setting.graphs)
    served = _Served(way)
    whole = setting.graphs and "attention_mask" not in batch
    uncaptured = _no_masks_for_graphs if whole else nullcontext

    def loss() -> Any:
        with setting.autocast(), uncaptured():
            return model(**batch).loss

    def forward() -> object:
        with torch.no_grad(), served():
            return loss()

    def step() -> None:
        with served():
            loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ran: str = "torch" if way == "published" else way
    if way == "auto":
        if setting.compiled == "model":
            # traced, transformers makes masks that it leaves out otherwise: others may serve then
            compile_model(model, backend="eager")
        ran = backend_of(loss)
    compile_for(setting, model)
    return Variant(name, ran, forward, step)


def compile_for(setting: Setting, model: Any) -> None:
    """Compile the part of a model that the setting names; what was compiled before is forgotten."""
    if setting.compiled == "model":
        compile_model(model)
    elif setting.compiled == "blocks":
        compile_blocks(model)


def _no_masks_for_graphs() -> AbstractContextManager[Any]:
    """Let transformers take a capture for a call like any other.

    For batches without padding it would make masks of ones there, which it leaves out otherwise
    and with which torch has no fast attention: not the computation that is asked about.
    """
    place = "transformers.utils.import_utils.is_cuda_stream_capturing"
    return mock.patch(place, return_value=False)


class _Served:
    """A context in which attention operators run in one way, whatever they would choose."""

    def __init__(self, way: Way) -> None:
        self.way = way
        # decisions are cached; this cache holds those of this way alone
        self.decisions: DecisionCache[routes.Decision] = DecisionCache()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.way in ("torch", "auto"):
            yield
            return
        sdpa = mock.patch.object(routes, "decide", _always_sdpa)
        decisions = mock.patch.object(attention, "_DECISIONS", self.decisions)
        published = mock.patch.object(attention.AttentionOperator, "polynomial", _published)
        with sdpa, decisions, published if self.way == "published" else nullcontext():
            yield


_decide = routes.decide


def _always_sdpa(situation: routes.Situation, wanted: routes.Backend = "auto") -> routes.Decision:
    return _decide(situation, "sdpa")


def _published(operator: attention.AttentionOperator, coeffs: Coefficients, v: Tensor) -> Tensor:
    """The published form in place of a GFSA filter's: its θ are w0, w1 − 1 and wK."""
    call = operator.call
    w0, w1, wK = coeffs.theta.unbind(1)
    return published_attention(
        call.q, call.k, v, w0, 1 + w1, wK, is_causal=call.is_causal, attn_mask=call.attn_mask
    )


def backend_of(loss: Callable[[], object]) -> str:
    """Whose kernels a model's layers run in training, by watching one forward."""
    taken: set[str] = set()

    def recording(*arguments: Any) -> routes.Decision:
        decision = _decide(*arguments)
        taken.add(decision.backend)
        return decision

    with (
        mock.patch.object(routes, "decide", recording),
        mock.patch.object(attention, "_DECISIONS", DecisionCache()),
    ):
        loss()
    return "+".join(sorted(taken))
