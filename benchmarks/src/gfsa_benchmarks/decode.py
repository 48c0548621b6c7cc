"""The suites ``decode``, ``decode-static`` and ``prefill``: a GPT-2-shaped model and its cache.

One new token with a filled cache, which grows or is static: on a GPU filters of degree 1 and 2 are
measured by torch's attention calls and by the kernel that does the whole token in one launch,
whichever of them is chosen. Or the prompt that fills an empty cache, and the memory that the cache
holds. Shapes with fewer heads of keys (``32/8``) are those of a Llama.
"""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gfsa.kernels import routes
from gfsa.plugs import plug
from gfsa_benchmarks.case import MIB, Case, Setting, Shape, Variant
from gfsa_benchmarks.training import backend_of

# as in use, hundreds of calls follow each other: the first ones after another variant count little
_SAMPLE_MS = 100.0
LAYERS = 12
VOCABULARY = 50257


def decode(shape: Shape, setting: Setting) -> Case:
    """``shape`` is that of each layer's cache: batch, heads, cached tokens, head dim."""
    return _case(shape, setting, static=False)


def decode_static(shape: Shape, setting: Setting) -> Case:
    """The same with a static cache, whose steps ``--graphs`` captures.

    ``--compile`` compiles the step with ``mode="reduce-overhead"``, as one that decodes would.
    """
    if setting.compiled == "blocks":
        raise ValueError("decode-static compiles the whole step: --compile, not --compile-blocks")
    return _case(shape, setting, static=True)


def prefill(shape: Shape, setting: Setting) -> Case:
    """A prompt of the shape's tokens through the model into an empty cache, which is returned."""
    variants = []
    for name, model in _models(shape, setting).items():
        forward = _prompted(model, shape, setting)
        ran = "torch" if name == "plain" else backend_of(forward)
        variants.append(Variant(name, ran, forward, step=None))
    return Case(f"{shape}", variants)


def memory_of_caches(case: Case) -> str:
    """What the cache of each variant of :func:`prefill` holds, in a sentence."""
    held = {variant.name: held_mib(variant.forward()) for variant in case.variants}
    first = next(iter(held.values()))
    sizes = [f"{name} {size:.2f} MiB, {size / first:.3f}×" for name, size in held.items()]
    return f"{case.shape}: the cache of {'; '.join(sizes)}"


def held_mib(cache: Any) -> float:
    """The memory of all tensors of a cache, free rows included, in MiB."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for held in (layer, *itertools.chain(*getattr(layer, "gfsa_powers", {}).values())):
            for tensor in vars(held).values():
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / MIB


def _models(shape: Shape, setting: Setting) -> dict[str, Any]:
    """A model without filters, and with filters of degree 1 and 2."""
    if shape.padded:
        raise ValueError(f"the suites of a cache take no padded shapes, got the shape {shape}")
    models = {"plain": _decoder(shape, setting)}
    for name, K in (("gfsa degree 1", None), ("gfsa", 3)):
        models[name] = copy.deepcopy(models["plain"])
        plug(models[name], K=K, w0=0.1, w1=0.8)
    return models


def _prompted(model: Any, shape: Shape, setting: Setting) -> Callable[[], Any]:
    from transformers import DynamicCache

    prompt = torch.randint(VOCABULARY, (shape.batch, shape.tokens), device=setting.device)

    def forward() -> Any:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, past_key_values=cache, logits_to_keep=1)
        return cache

    return forward


def _case(shape: Shape, setting: Setting, static: bool) -> Case:
    models = _models(shape, setting)
    named = [(name, model, False) for name, model in models.items()]
    if setting.device.type == "cuda":
        named += [(f"{name} kernel", models[name], True) for name in ("gfsa degree 1", "gfsa")]
    variants = [
        _variant(name, model, shape, setting, static, kernel=kernel)
        for name, model, kernel in named
    ]
    return Case(f"{shape}", variants, _SAMPLE_MS)


@contextmanager
def _measured(kernel: bool) -> Iterator[None]:
    """Choose the kernel for a decoded token where it serves, or never."""
    # not mock.patch, which takes longer than some kernels do
    before = routes.DECODES_BY_KERNEL
    routes.DECODES_BY_KERNEL = kernel
    try:
        yield
    finally:
        routes.DECODES_BY_KERNEL = before


def _decoder(shape: Shape, setting: Setting) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    # GPT-2 knows these names, too
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.heads * shape.dim,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.tokens + 1,
    }
    model: Any
    if shape.key_heads is None:
        model = GPT2LMHeadModel(GPT2Config(**sizes))
    else:
        sizes |= {"num_key_value_heads": shape.key_heads}
        sizes |= {"intermediate_size": 4 * shape.heads * shape.dim}
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return model.to(setting.device, setting.dtype).eval()


def _variant(
    name: str, model: Any, shape: Shape, setting: Setting, static: bool, kernel: bool
) -> Variant:
    from transformers import DynamicCache, StaticCache

    # a multiple of 64 rows, as a model that decodes would have
    rows = -(-(shape.tokens + 1) // 64) * 64
    cache: Any = (
        StaticCache(config=model.config, max_cache_len=rows)
        if static
        else DynamicCache(config=model.config)
    )
    prompt = torch.randint(VOCABULARY, (shape.batch, shape.tokens), device=setting.device)
    position = torch.full((shape.batch, 1), shape.tokens, device=setting.device)
    with torch.no_grad():
        model(prompt, past_key_values=cache, logits_to_keep=1)
    rewind = _rewinding(cache, static)

    called = model
    if setting.compiled:
        step = _with_own_code(model.forward, f"decode_{next(_COMPILED)}")
        called = torch.compile(step, mode="reduce-overhead", fullgraph=True)

    def forward() -> object:
        if setting.compiled:
            # the graphs of this step may write where those of the last one did
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), _measured(kernel):
            logits = called(prompt[:, :1], past_key_values=cache, position_ids=position).logits
        rewind()
        return logits

    backend = "torch" if name == "plain" else "fused" if kernel else "sdpa"
    return Variant(name, backend, forward, step=None)


_COMPILED = itertools.count()


def _with_own_code(method: Any, name: str) -> Any:
    """The same method, whose graphs are kept apart from those of other models of its class.

    Torch keeps graphs by the code that they were compiled from: a call of a later model would check
    the graphs of all former ones before it finds its own.
    """
    function = method.__func__
    copied = types.FunctionType(
        # torch also remembers by the name which numbers have changed
        function.__code__.replace(co_name=name),
        *(function.__globals__, name, function.__defaults__, function.__closure__),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copied, method.__self__)


def _rewinding(cache: Any, static: bool) -> Callable[[], None]:
    """What removes the new token, so that every call decodes at the same length."""
    if not static:
        return lambda: cache.crop(-1)
    lengths = [layer.cumulative_length for layer in cache.layers]
    # found once, and one launch for all layers: a compiled step takes as long as the host does
    return lambda: torch._foreach_sub_(lengths, 1)
