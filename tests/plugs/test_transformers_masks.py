"""Described masks: what transformers writes out, in O(N), eager and compiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import gfsa
from gfsa.operators import AttentionOperator, attention, blocked
from support.measuring import LargestTensor
from support.zoo import SMALL

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from gfsa.adapters.transformers import masks  # noqa: E402
from gfsa.adapters.transformers.masks import DescribedMask, describe_mask  # noqa: E402

N = 12


def gpt2(depth: int = 2, **options: Any) -> Any:
    sizes = {"n_layer": depth, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **options)
    return transformers.GPT2LMHeadModel(config)


def decoder(kind: str, depth: int, **options: Any) -> Any:
    sizes = {**SMALL, "num_hidden_layers": depth, "num_key_value_heads": 2, "head_dim": 8}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = getattr(transformers, f"{kind}Config")(**sizes, **ends, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def both(depth: int) -> list[str]:
    """Layers with a window and without, by turns."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(depth)]


def bert(depth: int) -> Any:
    config = transformers.BertConfig(**{**SMALL, "num_hidden_layers": depth})
    return transformers.BertModel(config)


MODELS: dict[str, Callable[[int], Any]] = {
    "gpt2": gpt2,
    "llama": lambda depth: decoder("Llama", depth),
    "mistral": lambda depth: decoder("Mistral", depth, sliding_window=5),
    # calls the functions that make masks in a lambda
    "mellum": lambda depth: decoder(
        "Mellum",
        depth,
        sliding_window=5,
        layer_types=both(depth),
        mlp_layer_types=["dense"] * depth,
    ),
    "olmo3": lambda depth: decoder("Olmo3", depth, sliding_window=5, layer_types=both(depth)),
    "bert": bert,
}


def plugged(name: str, layers: Any = "all", depth: int = 2) -> Any:
    torch.manual_seed(0)
    model = MODELS[name](depth).double().eval()
    gfsa.plug(model, K=3, w0=0.2, w1=0.9, wK=-0.3, layers=layers)
    return model


@contextmanager
def written_by_transformers() -> Iterator[None]:
    """Masks as an unplugged model makes them."""
    with pytest.MonkeyPatch.context() as patch:
        real = property(lambda view: view.real._attn_implementation)
        patch.setattr(masks.MaskConfigView, "_attn_implementation", real)
        yield


def padding(side: str) -> Tensor:
    mask = torch.ones(3, N, dtype=torch.long)
    if side == "left":
        mask[0, :4] = mask[1, :1] = 0
    else:
        mask[0, -4:] = mask[1, -1:] = 0
    return mask


def batches() -> dict[str, dict[str, Any]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 32, (3, N))
    places = torch.arange(N)
    packed = torch.stack([places % 5, places, places % 7])
    return {
        "plain": {"input_ids": ids},
        "nothing hidden": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "left": {"input_ids": ids, "attention_mask": padding("left")},
        "right": {"input_ids": ids, "attention_mask": padding("right")},
        "packed": {"input_ids": ids, "position_ids": packed, "use_cache": False},
    }


def result(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The mask and the description of every operator that the layers make."""
    found: list[tuple[Any, Any]] = []
    make = AttentionOperator.__init__

    def note(self: AttentionOperator, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        found.append((self.call.attn_mask, self.call.visible))

    monkeypatch.setattr(AttentionOperator, "__init__", note)
    return found


class Graphs(list[Any]):
    """A backend that keeps the graphs that it is asked to compile."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.append(graph)
        return graph

    def attention(self) -> list[tuple[Any, Any]]:
        """The mask and the causality of every call of torch's attention."""
        return [
            (node.kwargs["attn_mask"], node.kwargs["is_causal"])
            for graph in self
            for node in graph.graph.nodes
            if node.target is torch.nn.functional.scaled_dot_product_attention
        ]


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_what_a_written_mask_gives(
    name: str, seen: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plugged(name)
    for kind, batch in batches().items():
        if name == "bert" and kind == "packed":
            continue
        with torch.no_grad(), written_by_transformers():
            expected = result(model(**batch))
        for entries in (2**25, 40):
            monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
            seen.clear()
            with torch.no_grad():
                torch.testing.assert_close(result(model(**batch)), expected)
            assert len(seen) == 2
            for mask, visible in seen:
                assert mask is None or mask.shape[2] == 1, kind
                if kind in ("left", "right") and name != "bert":
                    assert visible.keys.shape == (3, 1, N)
                if kind == "packed":
                    assert visible.documents.unique().numel() > 1


def test_windows_and_documents_are_numbers(seen: list[tuple[Any, Any]]) -> None:
    model, data = plugged("mistral"), batches()
    with torch.no_grad():
        model(**data["plain"])
        assert {visible.window for _, visible in seen} == {5}
        seen.clear()
        model(**data["packed"])
    assert all(visible.window == 5 and visible.documents is not None for _, visible in seen)
    # so that the fused kernels need not look whether documents lie across one another
    assert all(visible.in_order for _, visible in seen)


def test_gradients_are_those_of_a_written_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 40)
    model, batch = plugged("llama"), batches()["left"]
    gradients = []
    for described in (True, False):
        model.zero_grad()
        if described:
            result(model(**batch)).square().sum().backward()
        else:
            with written_by_transformers():
                result(model(**batch)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_layers_without_a_filter_get_tensors(name: str) -> None:
    model, batch = plugged(name, layers=[2]), batches()["left"]
    got: list[Any] = []
    first = model.transformer.h[0].attn if name == "gpt2" else model.model.layers[0].self_attn
    first.register_forward_pre_hook(
        lambda module, args, kwargs: got.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        y = result(model(**batch))
        with written_by_transformers():
            torch.testing.assert_close(y, result(model(**batch)))
    assert type(got[0]) is Tensor


def test_a_compiled_layer_without_a_filter_is_causal_by_its_kernel() -> None:
    torch._dynamo.reset()
    model = plugged("llama", layers=[2])
    batch = {**batches()["plain"], "use_cache": False}
    graphs = Graphs()
    with torch.no_grad():
        found = result(torch.compile(model, backend=graphs, fullgraph=True)(**batch))
        torch.testing.assert_close(found, result(model(**batch)))
    assert graphs.attention() == [(None, True)] * 3


def test_a_mask_of_the_user_is_honoured(seen: list[tuple[Any, Any]]) -> None:
    model, ids = plugged("llama"), batches()["plain"]["input_ids"]
    torch.manual_seed(2)
    mask = (torch.rand(3, 1, N, N) < 0.5) | torch.eye(N, dtype=torch.bool)
    with torch.no_grad():
        y = result(model(input_ids=ids, attention_mask=mask))
    assert all(torch.equal(given, mask) for given, _ in seen)
    with torch.no_grad():
        assert not torch.allclose(y, result(model(input_ids=ids)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefill_chunks_and_decoding_after_described_masks(name: str, cache: str) -> None:
    model, batch = plugged(name), batches()["left"]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), written_by_transformers():
        expected = result(
            model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        )
    if cache == "dynamic":
        past: Any = transformers.DynamicCache(config=model.config)
    else:
        past = transformers.StaticCache(config=model.config, max_cache_len=N + 4)
    rows = []
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 10), (10, 11), (11, 12)):
            output = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=past,
                position_ids=positions[:, start:stop],
            )
            rows.append(result(output))
    valid = mask.bool()
    torch.testing.assert_close(torch.cat(rows, 1)[valid], expected[valid])


@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "plain"), ("llama", "left"), ("mistral", "packed")]
)
def test_a_compiled_decoder_is_one_graph_and_the_same(name: str, kind: str) -> None:
    """One graph for two calls; without padding and documents its attention is torch's causal."""
    torch._dynamo.reset()
    model, batch = plugged(name, depth=1), {**batches()[kind], "use_cache": False}
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        expected = result(model(**batch))
        for _ in range(2):
            torch.testing.assert_close(result(compiled(**batch)), expected)
    assert len(graphs) == 1
    assert len(graphs.attention()) == 2
    if kind == "plain":
        assert graphs.attention() == [(None, True)] * 2


def test_no_tensor_of_all_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a prompt in a static cache."""
    length = 1024
    monkeypatch.setattr(blocked, "MOST_ENTRIES", 2 * 32 * length)
    model = gpt2(attn_implementation="sdpa").eval()
    model.transformer.wpe = torch.nn.Embedding(length, 16)
    gfsa.plug(model, K=3, wK=0.1)
    ids = torch.zeros(2, length, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, :300] = 0
    cache = transformers.StaticCache(config=model.config, max_cache_len=length + 8)
    with torch.no_grad():
        for batch in (
            {"attention_mask": mask},
            {"position_ids": torch.arange(length)[None] % 100},
            {"attention_mask": mask, "past_key_values": cache, "use_cache": True},
        ):
            with LargestTensor() as largest:
                model(input_ids=ids, **{"use_cache": False, **batch})
            # a mask has a byte for each query and key, of one sequence
            assert largest.bytes < length * length


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_padded_prompt_in_a_static_cache_generates_the_same(
    name: str, side: str, seen: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As dense attention without a cache, and as an unplugged model if the filter is A."""
    batch = batches()[side]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True}

    def generated(model: Any, **cache: Any) -> tuple[Tensor, Tensor]:
        found = model.generate(
            **batch, **settings, **cache, disable_compile=True, return_dict_in_generate=True
        )
        return found.sequences, torch.stack(found.logits)

    model = plugged(name)
    found = generated(model, cache_implementation="static")
    # of the two layers' prompts; a decoded token has an operator of its own
    assert len(seen) == 2
    assert all(mask is None and visible.keys.shape == (3, 1, N) for mask, visible in seen)
    with monkeypatch.context() as patch, written_by_transformers():
        decide = attention.routes.decide
        patch.setattr(attention.routes, "decide", lambda situation, _: decide(situation, "dense"))
        torch.testing.assert_close(found, generated(model, use_cache=False))
    torch.manual_seed(0)
    unplugged = MODELS[name](2).double().eval()
    expected = generated(unplugged, cache_implementation="static")
    gfsa.plug(unplugged, K=3, w0=0.0, w1=1.0, wK=0.0)
    torch.testing.assert_close(generated(unplugged, cache_implementation="static"), expected)
    assert not torch.allclose(found[1], expected[1])


def test_a_mask_of_more_tokens_than_there_are_is_an_error_as_it_was() -> None:
    model, ids = plugged("llama"), batches()["plain"]["input_ids"]
    mask = torch.ones(3, N + 4, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="does not broadcast"):
        model(input_ids=ids, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_that_hides_nothing_is_left_out_of_a_compiled_graph(padded: bool) -> None:
    """One graph for all lengths within the window, and one for those beyond."""
    torch._dynamo.reset()
    graphs = Graphs()

    @torch.compile(fullgraph=True, dynamic=True, backend=graphs)
    def window(ids: Tensor) -> tuple[Tensor, int | None]:
        batch, length = ids.shape
        mask = describe_mask(
            *(batch, length, length),
            mask_function=sliding_window_causal_mask_function(8),
            attention_mask=ids.bool() if padded else None,
            local_size=8,
        )
        return ids + 1, mask.visible.window

    for lengths, expected in (((5, 6, 8), None), ((9, 20, 30), 8)):
        for length in lengths:
            assert window(torch.ones(2, length, dtype=torch.long))[1] == expected
    assert len(graphs) == 2


def test_only_functions_of_transformers_are_described() -> None:
    def dilated(sliding_window: int) -> Any:
        return lambda batch, head, query, key: (query - key) % sliding_window == 0

    def mask(*parts: Any) -> Any:
        function = and_masks(*parts, causal_mask_function)
        return describe_mask(1, N, N, mask_function=function, local_size=4)

    assert isinstance(mask(sliding_window_overlay(4)), DescribedMask)
    token = torch.arange(N)
    distance = token[:, None] - token
    expected = (distance >= 0) & (distance % 4 == 0)
    assert torch.equal(mask(dilated(4))[0, 0], expected)
    # another window than the one that the caller announces
    assert torch.equal(mask(sliding_window_overlay(2))[0, 0], (distance >= 0) & (distance < 2))


def test_outside_of_its_forward_a_model_has_its_own_config() -> None:
    model = plugged("bert")
    config = model.config
    model(**batches()["left"])
    assert model.config is config
    with pytest.raises(ValueError, match="input_ids"):
        model(input_ids=None)
    assert model.config is config
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert type(twin.config) is type(config)
    torch.testing.assert_close(
        result(twin(**batches()["left"])), result(model(**batches()["left"]))
    )
    gfsa.unplug(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_ctrl_c_in_a_forward_leaves_no_view_in_an_unplugged_model() -> None:
    model = plugged("bert")
    config = model.config

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.encoder.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batches()["left"])
    handle.remove()
    gfsa.unplug(model)
    assert model.config is config


def test_a_call_may_say_whether_it_is_causal() -> None:
    model, batch = plugged("llama"), batches()["left"]
    # transformers writes the argument into the config, and deletes it there afterwards
    assert torch.equal(result(model(**batch, is_causal=True)), result(model(**batch)))
    assert not hasattr(model.model.config, "is_causal")
    found = result(model(**batch, is_causal=False))
    with written_by_transformers():
        torch.testing.assert_close(found, result(model(**batch, is_causal=False)))
    assert not torch.allclose(found, result(model(**batch)))


def test_threads_may_leave_a_model_at_the_same_time() -> None:
    real = plugged("bert").config
    reads = [masks.MaskConfigView(real)]

    class LeftMeanwhile:
        """A model that another thread leaves after its config was read once."""

        @property
        def config(self) -> Any:
            return reads.pop() if reads else real

        @config.setter
        def config(self, value: Any) -> None:
            assert value is real

    masks._leave_view(LeftMeanwhile())
    assert not reads


def test_a_description_answers_like_the_mask() -> None:
    torch.manual_seed(0)
    keys = torch.rand(2, 1, 5) < 0.7
    visible = gfsa.operators.Visibility(keys, causal=True)
    described = DescribedMask(visible, (2, 1, 5, 5), "cpu")
    mask = visible.rows(0, 5, 5, keys.device).expand(2, 1, 5, 5)
    assert described.shape == mask.shape
    assert described.dim() == described.ndim == 4
    assert described.to("cpu") is described
    # else generate of transformers 5.22 writes out the mask of a prompt in a static cache
    assert described.contiguous() is described
    assert described.contiguous(memory_format=torch.channels_last).is_contiguous(
        memory_format=torch.channels_last
    )
    assert torch.equal(described[:, :, -1:], mask[:, :, -1:])
    assert torch.equal(described.to(torch.float32), mask.float())
    assert torch.equal(torch.where(described, 0.0, 1.0), torch.where(mask, 0.0, 1.0))
    assert torch.equal(described & mask.mT, mask & mask.mT)
    assert torch.equal(~described, ~mask)
    assert torch.equal(described == 0, mask == 0)
    assert torch.equal(described != mask.mT, mask != mask.mT)
    assert described.sum() == mask.sum()
    longer = DescribedMask(visible, (2, 1, 5, 7), "cpu")
    assert torch.equal(longer.tensor(), torch.nn.functional.pad(mask, (0, 2)))
    assert longer.shape == longer.to("meta").shape == (2, 1, 5, 7)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mistral", "bert"])
def test_torch_jit_traces_a_plugged_model_for_other_lengths(name: str) -> None:
    """While torch.jit traces, the sizes of a tensor are tensors."""
    model = plugged(name, depth=1).requires_grad_(False)

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        cache = {} if name == "bert" else {"use_cache": False}
        return result(model(input_ids=ids, attention_mask=mask, **cache))

    batch = batches()["left"]
    with torch.no_grad():
        traced = torch.jit.trace(forward, tuple(batch.values()), check_trace=False)
        for rows, first in ((3, 0), (2, 3)):
            ids, mask = (part[:rows, first:] for part in batch.values())
            torch.testing.assert_close(traced(ids, mask), forward(ids, mask))
