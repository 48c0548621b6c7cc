"""Small random models with filters, saved as a user saves them, and what transformers generates.

Each is made in a process of its own: vLLM's Transformers backend changes the classes of
transformers in its process, which then cannot build a model outside of vLLM. Initial weights are
large, so that a text does not repeat one token, and the filters differ from head to head. Windows
are shorter than the prompts.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import gfsa
from gfsa.filters import PartialPolynomial
from support.plugging import randomise

VOCABULARY = 96
NEW_TOKENS = 40
VARIED = 6
"""How many different tokens each text has at least."""
LENGTHS = (3, 7, 12, 17, 21, 26, 33, 38, 47, 52, 61, 64, 70, 83, 97, 130)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 192,
    "num_key_value_heads": 2,
    # vLLM's attention on CPUs has kernels for 32 and more
    "head_dim": 32,
    "pad_token_id": None,
}
_WINDOW = {**_GROUPED, "sliding_window": 24}
_GEMMA = {
    **_WINDOW,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}

# the class of transformers, and its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "Mistral": ("MistralForCausalLM", _WINDOW),
    # its attention scores are capped
    "Gemma 2": ("Gemma2ForCausalLM", _GEMMA),
    "Gemma 3": ("Gemma3ForCausalLM", _GEMMA),
    "GPT-2": ("GPT2LMHeadModel", _SIZES),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", {**_GROUPED, **_EXPERTS}),
    "Bert": ("BertForMaskedLM", _SIZES),
}


def build(name: str) -> Any:
    kind, settings = MODELS[name]
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**settings))


def _plug_layers(model: Any, kinds: list[Callable[[int], gfsa.GraphFilter] | None]) -> None:
    """One filter a layer; None leaves a layer as it is."""
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        if kind is not None:
            gfsa.plug(layer, filter=kind)


def _plug_in_bfloat16(model: nn.Module) -> None:
    gfsa.plug(model.to(torch.bfloat16), K=3)


LEARNED = [
    lambda heads: gfsa.GFSA(heads, K=5, learn=("wK",), w0=[0.1, -0.2, 0.3, 0.0]),
    lambda heads: gfsa.GFSA(heads, K=4, power="exact", lr_multiplier=0.5),
    None,
]
POLYNOMIALS = [
    lambda heads: gfsa.Polynomial(heads, degree=1),
    lambda heads: gfsa.Polynomial(heads, degree=0),
    lambda heads: PartialPolynomial(heads, degree=3, high=[0, 2]),
]
EXCLUSIVE = [
    gfsa.Exclusive,
    lambda heads: gfsa.GFSA(heads, K=3).exclude(0.3, learn=True),
    lambda heads: gfsa.Polynomial(heads, degree=0).exclude(0.5),
]
FIXED = [gfsa.Twicing, gfsa.Laplacian, lambda heads: gfsa.PageRank(heads, alpha=0.2, hops=3)]

ARCHITECTURES = ("Llama", "Qwen3", "Mistral", "Gemma 3", "GPT-2")
# what is served in every way: one with every term
SERVED = (*ARCHITECTURES, "exclusive and depth")


class OwnFilter(gfsa.Polynomial):
    """A class of the user's, which a checkpoint cannot describe."""


# recipe → the model and how it is plugged
RECIPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (name, partial(gfsa.plug, K=3)) for name in ARCHITECTURES},
    "soft cap": ("Gemma 2", partial(gfsa.plug, K=3)),
    "experts": ("Qwen3 MoE", partial(gfsa.plug, K=3, layers="odd")),
    "learned": ("Llama", partial(_plug_layers, kinds=LEARNED)),
    "polynomials": ("Llama", partial(_plug_layers, kinds=POLYNOMIALS)),
    "fixed": ("Llama", partial(_plug_layers, kinds=FIXED)),
    "exclusive": ("Llama", partial(_plug_layers, kinds=EXCLUSIVE)),
    "bfloat16": ("Llama", _plug_in_bfloat16),
    # two layers with a depth term above the first one
    "depth": ("Mistral", partial(gfsa.plug, K=3, depth=True)),
    "exclusive and depth": ("Qwen3", partial(gfsa.plug, filter=gfsa.Exclusive, depth=True)),
    # vLLM cannot serve these
    "encoder": ("Bert", partial(gfsa.plug, K=3)),
    "own class": ("Llama", partial(gfsa.plug, filter=OwnFilter)),
}
NOT_SERVED = ("encoder", "own class")


@dataclass
class Text:
    """One generated text: its tokens, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]

    def first(self, count: int) -> Text:
        return Text(self.tokens[:count], self.logprobs[:count])


@dataclass
class Checkpoint:
    """A plugged model in a folder, and what transformers generates with it."""

    folder: Path
    plain: Path
    """The same model without its filters."""
    prompts: list[list[int]]
    texts: list[Text]
    """What the plugged model generates."""
    plain_texts: list[Text]
    """What the model without filters generates, of some prompts."""


def checkpoint_of(recipe: str, folder: Path) -> Checkpoint:
    """Make a checkpoint in ``folder``, in another process."""
    # forked: to import torch and transformers again takes longer than to make a model
    process = multiprocessing.get_context("fork").Process(target=make, args=(recipe, folder))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the checkpoint {recipe} was not made; its error is above")
    texts, plain_texts = (
        [Text(**text) for text in texts] for texts in json.loads((folder / "texts").read_text())
    )
    return Checkpoint(folder / "plugged", folder / "plain", prompts_of(), texts, plain_texts)


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def make(recipe: str, folder: Path) -> None:
    """Build, plug and save a model, load it again, and let transformers generate."""
    # a forked process has none of the threads of its parent's pool
    torch.set_num_threads(1)
    for seed in range(30):
        texts = _made(recipe, folder, seed)
        # some random weights repeat few tokens, which would hide an error
        if min((len(set(text.tokens)) for text in texts[0]), default=VARIED) >= VARIED:
            break
    (folder / "texts").write_text(json.dumps([[asdict(text) for text in part] for part in texts]))


def _made(recipe: str, folder: Path, seed: int) -> list[list[Text]]:
    """What the plugged model of this seed generates, and the model without filters."""
    architecture, plug = RECIPES[recipe]
    torch.manual_seed(seed)
    model = build(architecture).eval()
    model.save_pretrained(folder / "plain")
    plug(model)
    assert gfsa.filters_of(model)
    randomise(model)
    model.save_pretrained(folder / "plugged")
    texts: list[list[Text]] = [[], []]
    if recipe not in NOT_SERVED:
        # eager: transformers' sdpa leaves out Gemma 2's soft cap
        load = partial(
            transformers.AutoModelForCausalLM.from_pretrained, attn_implementation="eager"
        )
        plugged = gfsa.from_pretrained(
            transformers.AutoModelForCausalLM, folder / "plugged", attn_implementation="eager"
        )
        assert len(gfsa.filters_of(plugged)) == len(gfsa.filters_of(model))
        texts = [_texts(plugged, prompts_of()), _texts(load(folder / "plain"), prompts_of()[:4])]
    return texts


def _texts(model: Any, prompts: list[list[int]]) -> list[Text]:
    """What transformers generates greedily, all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.eval().generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    rows: Tensor = torch.stack(out.logits, dim=1).float().log_softmax(-1)
    tokens = out.sequences[:, longest:]
    logprobs = rows.gather(-1, tokens[..., None])[..., 0]
    return [Text(*pair) for pair in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
