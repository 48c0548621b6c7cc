"""Generation with a cache: the same tokens and the same logits as without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import Tensor

import gfsa
from gfsa.adapters.transformers.adapter import _Arguments, _look_at_inputs
from gfsa.filters import PartialPolynomial
from gfsa.operators import attention
from support.zoo import SMALL, VOCABULARY, ZOO, randomise

transformers.logging.set_verbosity_error()

_SIZES = {**SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 4, "eos_token_id": None}
DECODERS = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"]
PAIRS = ["bart", "t5"]
NEW = 8


def plugged(name: str, filter: Any = None, **arguments: Any) -> Any:
    model = ZOO[name].model(ZOO[name].implementations[0]).float()
    gfsa.plug(model, filter=filter, **arguments)
    randomise(model)
    # a random model's largest logits are far closer to one another than rounding should decide
    head = model.get_output_embeddings()
    head.weight.data.mul_(20)
    return model


def prompt(padding: str | None = None) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(
        **inputs, **options, return_dict_in_generate=True, output_logits=True, eos_token_id=None
    )


def agree(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for mine, theirs in zip(one.logits, other.logits, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "dynamic in chunks": {"cache_implementation": "dynamic", "prefill_chunk_size": 3},
    "static in chunks": {"cache_implementation": "static", "prefill_chunk_size": 3},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", DECODERS)
def test_cached_generation_is_uncached_generation(name: str, how: str, padding: str | None) -> None:
    # the windows of mistral, gemma2 and gpt-oss are four tokens wide: they slide here
    model, inputs = plugged(name), prompt(padding)
    beams = {"num_beams": OPTIONS[how].get("num_beams", 1)}
    agree(
        generate(model, inputs, **OPTIONS[how]), generate(model, inputs, use_cache=False, **beams)
    )


@pytest.mark.parametrize("name", PAIRS)
def test_encoder_decoder(name: str) -> None:
    model, inputs = plugged(name), prompt()
    inputs["attention_mask"][0, -2:] = 0
    agree(generate(model, inputs), generate(model, inputs, use_cache=False))


@pytest.mark.parametrize(
    "filter",
    [
        gfsa.Twicing,
        gfsa.PageRank,
        gfsa.Laplacian,
        lambda heads: gfsa.GFSA(heads, K=None),
        lambda heads: gfsa.GFSA(heads, K=4, power="exact"),
        lambda heads: gfsa.Polynomial(heads, degree=0),
    ],
    ids=["twicing", "pagerank", "laplacian", "degree-1", "exact-4", "degree-0"],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_any_degree(filter: Any, cache: str) -> None:
    model, inputs = plugged("llama", filter), prompt("left")
    agree(
        generate(model, inputs, cache_implementation=cache),
        generate(model, inputs, use_cache=False),
    )


def test_one_new_token_looks_at_the_past_once_a_power() -> None:
    """With the past's powers kept, no past token is computed again."""
    model = plugged("gpt2")
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(query.shape[2])
        return original(query, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = counted
    try:
        generate(model, prompt(), max_new_tokens=3)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    # two layers, two passes: the prompt once, then single tokens
    assert seen == [7] * 4 + [1] * 8


def test_assisted_decoding() -> None:
    model, draft = plugged("llama"), plugged("llama", K=2)
    inputs = {name: x[:1] for name, x in prompt().items()}
    assisted = generate(model, inputs, assistant_model=draft)
    assert torch.equal(assisted.sequences, generate(model, inputs).sequences)


def test_a_prompt_can_be_cached_and_copied() -> None:
    model = plugged("llama")
    inputs = {name: x[:1] for name, x in prompt().items()}
    cache = empty_cache(model, "dynamic")
    with torch.no_grad():
        model(inputs["input_ids"][:, :5], past_key_values=cache)
    expected = generate(model, inputs, use_cache=False)
    for _ in range(2):
        again = generate(model, inputs, past_key_values=copy.deepcopy(cache))
        assert torch.equal(again.sequences, expected.sequences)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_decoding_with_a_static_cache_is_one_graph(name: str) -> None:
    model = plugged(name)
    ids = prompt()["input_ids"]
    cache = empty_cache(model, "static")
    graphs = torch._dynamo.testing.CompileCounter()
    step = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        sequence = ids
        for token in range(4):
            new = torch.full((2, 1), 7 + token)
            sequence = torch.cat([sequence, new], dim=1)
            position = torch.full((2, 1), sequence.shape[1] - 1)
            logits = step(new, past_key_values=cache, position_ids=position).logits
            expected = model(sequence, use_cache=False).logits[:, -1:]
            assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert graphs.frame_count == 1


def test_training_with_a_cache_costs_nothing_and_cannot_be_decoded_from() -> None:
    model = plugged("gpt2")
    model.train()
    outputs = model(prompt()["input_ids"])
    outputs.logits.sum().backward()
    assert all(not hasattr(layer, "gfsa_powers") for layer in outputs.past_key_values.layers)
    model.eval()
    with pytest.raises(ValueError, match="holds 7 tokens without the powers"):
        model(torch.tensor([[3], [4]]), past_key_values=outputs.past_key_values)


def test_decoding_under_dropout_is_refused() -> None:
    model = plugged("gpt2")
    ids = prompt()["input_ids"]
    with torch.no_grad():
        cache = model(ids).past_key_values
        model.train()
        # nothing is decoded as long as every token is new
        model(ids)
        with pytest.raises(ValueError, match=r"attention dropout.*disable_dropout=True"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_degree_one_decodes_under_dropout(implementation: str) -> None:
    model = plugged("gpt2", K=None)
    model.set_attn_implementation(implementation)
    ids = prompt()["input_ids"]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            # dropout that leaves every entry where it is
            module.p = 1e-12
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        model.train()
        cache = model(ids[:, :-1]).past_key_values
        logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("how", ["assigned", "written", "selected afterwards"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_rows_that_the_caller_reorders_are_refused(kind: str, copied: bool, how: str) -> None:
    model, ids, order = plugged("llama"), prompt()["input_ids"], torch.tensor([1, 0])
    cache = empty_cache(model, kind)
    with torch.no_grad():
        model(ids[:, :-2], past_key_values=cache)
        if copied:
            cache = copy.deepcopy(cache)
            model(ids[:, -2:-1], past_key_values=cache)
        layer = cache.layers[0]
        if how == "written":
            layer.values.copy_(layer.values[order])
        else:
            layer.keys, layer.values = layer.keys[order], layer.values[order]
        with pytest.raises(ValueError, match="assigned or written after a plugged model"):
            _ = (
                layer.reorder_cache(order)
                if how == "selected afterwards"
                else model(ids[:, -1:], past_key_values=cache)
            )


def test_a_cache_filled_by_an_unplugged_model_is_refused() -> None:
    model = ZOO["llama"].model("sdpa")
    ids = prompt()["input_ids"]
    cache = model(ids).past_key_values
    gfsa.plug(model)
    with pytest.raises(ValueError, match="filled by prefix tuning, by an unplugged model"):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("degree", [1, 2])
def test_whisper_rebuilds_its_cache_from_keys_and_values(degree: int) -> None:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, num_mel_bins=8, max_source_positions=16, pad_token_id=0,
        encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, decoder_layers=2,
        decoder_attention_heads=4, decoder_ffn_dim=48, max_target_positions=40,
        decoder_start_token_id=3, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    gfsa.plug(model, degree=degree)
    randomise(model)
    sounds = torch.randn(1, 8, 32)
    done = generate(model, {"input_features": sounds})
    step = {"decoder_input_ids": done.sequences[:, -1:], "past_key_values": done.past_key_values}
    if degree == 2:
        with pytest.raises(ValueError, match="rebuilt from its keys and values alone"):
            model(sounds, **step)
    else:
        expected = model(sounds, decoder_input_ids=done.sequences, use_cache=False).logits
        torch.testing.assert_close(model(sounds, **step).logits, expected[:, -1:])


def test_degree_one_filters_exactly_on_a_cache_filled_by_an_unplugged_model() -> None:
    # one layer: keys and values of the past do not depend on filters
    model = ZOO["llama"].model("sdpa")
    model.model.layers = model.model.layers[:1]
    ids = prompt()["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-1]).past_key_values
        gfsa.plug(model, K=None)
        randomise(model)
        logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, -1])


# with a window, transformers knows the length of a static layer without reading the device
def test_a_compiled_model_refuses_a_static_one() -> None:
    model = plugged("mistral")
    bare = copy.deepcopy(model)
    gfsa.unplug(bare)
    ids = prompt()["input_ids"]
    step = torch.compile(model, backend="eager", fullgraph=True)
    cache = empty_cache(model, "static")
    with torch.no_grad():
        bare(ids, past_key_values=cache)
        with pytest.raises(RuntimeError, match="filled by prefix tuning, by an unplugged model"):
            step(ids, past_key_values=cache)
        cache.reset()
        logits = step(ids, past_key_values=cache).logits
        expected = model(ids, use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def empty_cache(model: Any, kind: str, tokens: int = 16) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=tokens)


class Step(torch.nn.Module):
    """One token at a position of a static cache in buffers, as transformers exports a decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, config = model, model.config
        self.cache = transformers.StaticCache(config=config, max_cache_len=16)
        dim = config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(
            1, config.num_key_value_heads, dim, torch.float32, torch.device("cpu")
        )
        for number, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{name}_{number}", getattr(layer, name), persistent=False)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position[0])
        return self.model(token, past_key_values=self.cache, use_cache=True).logits


def test_an_exported_step_of_degree_1_is_exact() -> None:
    ids = prompt()["input_ids"][:1]
    model = plugged("llama", K=None)
    with torch.no_grad():
        program = torch.export.export(Step(model), (ids[:, :1], torch.tensor([0])), strict=False)
        run = program.module()
        steps = [run(ids[:, n : n + 1], torch.tensor([n])) for n in range(ids.shape[1])]
        expected = model(ids, use_cache=False).logits
    assert (torch.cat(steps, 1) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_step_that_would_lose_its_powers_is_refused(strict: bool) -> None:
    given = torch.tensor([[3]]), torch.tensor([0])
    # dynamo, which traces a strict export, puts the reason into an error of its own
    error = torch._dynamo.exc.Unsupported if strict else ValueError
    with torch.no_grad(), pytest.raises(error, match="cannot keep the powers of past"):
        torch.export.export(Step(plugged("llama")), given, strict=strict)
    with torch.no_grad(), pytest.raises(ValueError, match="cannot keep the powers of past"):
        torch.jit.trace(Step(plugged("llama")), given)


def refusal(kind: str, tokens: int, powers: int) -> str:
    if kind == "static":
        return "holds tokens without their powers: an unplugged model"
    return f"holds {tokens} earlier tokens, but the powers of {powers}: an unplugged model"


def decode_with_an_unplugged_step_between(model: Any, cache: Any, step: Any, other: Any) -> None:
    """The last token has a past of which one token, the sixth, has no powers."""
    ids = prompt()["input_ids"]
    positions = torch.arange(7).expand(2, -1)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        for at, run in ((4, step), (5, other), (6, step)):
            chosen = slice(at, at + 1)
            run(ids[:, chosen], past_key_values=cache, position_ids=positions[:, chosen])


def unplugged(model: Any) -> Any:
    bare = copy.deepcopy(model)
    gfsa.unplug(bare)
    return bare


# mistral's window is full by then: the powers of another past have as many rows as the keys
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_compiled_model_refuses_a_cache_used_in_between(kind: str) -> None:
    torch._dynamo.reset()
    model = plugged("mistral")
    cache = empty_cache(model, kind)
    step = torch.compile(model, backend="eager", fullgraph=True)
    # dynamo puts the reason into an error of its own
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an unplugged model has used it in b"):
        decode_with_an_unplugged_step_between(model, cache, step, unplugged(model))


def test_copies_and_a_reset_cache_are_no_other_past() -> None:
    model = plugged("llama")
    bare, cache = unplugged(model), empty_cache(model, "static")
    with torch.no_grad():
        # what fills a copy does not fill the original
        model(prompt()["input_ids"][:, :2], past_key_values=cache)
        bare(prompt()["input_ids"][:, :2], past_key_values=copy.deepcopy(cache))
        model(prompt()["input_ids"][:, 2:4], past_key_values=cache)
    cache.reset()
    with pytest.raises(ValueError, match="holds tokens without their powers: an unplugged model"):
        decode_with_an_unplugged_step_between(model, cache, model, bare)


@pytest.mark.parametrize("high", [[0, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_used_by_an_unplugged_model_in_between_is_refused(
    kind: str, high: list[int]
) -> None:
    model = plugged("llama", filter=lambda heads: PartialPolynomial(heads, 2, high=high))
    cache = empty_cache(model, kind)
    with pytest.raises(ValueError, match=refusal(kind, 6, 5)):
        decode_with_an_unplugged_step_between(model, cache, model, unplugged(model))


def plugged_in_heads(model: Any, heads: list[int]) -> Any:
    gfsa.plug(model, filter=lambda number: PartialPolynomial(number, 2, high=heads))
    randomise(model)
    return model


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_powers_of_other_heads_are_refused(kind: str) -> None:
    model = plugged_in_heads(unplugged(plugged("llama")), [0, 2])
    ids, cache = prompt()["input_ids"], empty_cache(model, kind)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        gfsa.unplug(model)
        plugged_in_heads(model, [1, 3])
        with pytest.raises(ValueError, match=r"of the heads \[0, 2\].* needs those of \[1, 3"):
            model(ids[:, :1], past_key_values=cache)
        gfsa.unplug(model)
        gfsa.plug(model)
        with pytest.raises(ValueError, match=r"powers of the heads \[0, 2\].* of \[0, 1, 2, 3"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_keeps_powers_of_the_same_heads_in_short_and_long_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a short prompt by itself would be processed in all heads."""
    monkeypatch.setattr(attention.AttentionOperator, "second_pass", lambda *_: None)
    model = plugged_in_heads(unplugged(plugged("llama")), [0, 2])
    agree(
        generate(model, prompt("left"), cache_implementation=kind),
        generate(model, prompt("left"), use_cache=False),
    )


@pytest.fixture(params=["Gemma3n", "Gemma4"])
def sharing(request: pytest.FixtureRequest) -> Any:
    """Four layers of two kinds, the last two of which look at keys and values of the first two."""
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}
    per_layer = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    config = getattr(transformers, f"{request.param}TextConfig")(
        **{**_SIZES, **sizes, **per_layer},
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval()
    gfsa.plug(model)
    with torch.no_grad():
        for filter in gfsa.filters_of(model).values():
            filter.theta.normal_(std=0.3)
        model.get_output_embeddings().weight.mul_(20)
    return model


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_layers_that_share_keys_have_powers_of_their_own(
    sharing: Any, cache: str, padding: str | None
) -> None:
    without = generate(sharing, prompt(padding), use_cache=False)
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    found = generate(sharing, prompt(padding), **options)
    agree(found, without)
    layers = found.past_key_values.layers
    assert [sorted(layer.gfsa_powers) for layer in layers] == [[0, 2], [1, 3]]
    agree(
        generate(sharing, prompt(padding), num_beams=3, **options),
        generate(sharing, prompt(padding), num_beams=3, use_cache=False),
    )


def test_a_layer_that_attends_twice_is_refused_with_a_cache() -> None:
    config = transformers.DiffLlamaConfig(**{**_SIZES, "num_hidden_layers": 1})
    model = transformers.DiffLlamaForCausalLM(config).eval()
    gfsa.plug(model)
    ids = prompt()["input_ids"]
    with torch.no_grad():
        model(ids, use_cache=False)
        with pytest.raises(ValueError, match="attends more than once per forward"):
            model(ids)


# a recurrent mixer and attention share a layer of the cache, and one module serves several depths
_ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
    "use_mem_rope": True,
}


def test_a_cache_that_keeps_more_than_keys_and_values() -> None:
    torch.manual_seed(0)
    model = transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**{**_SIZES, **_ZAMBA})).eval()
    ids = prompt()["input_ids"]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        gfsa.plug(model, w0=0.3, w1=0.5, wK=0.4)
        expected = model(ids, use_cache=False).logits
        first = model(ids[:, :4])
        second = model(ids[:, 4:], past_key_values=first.past_key_values)
    assert not torch.allclose(expected, plain, atol=1e-4)
    found = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    model.get_output_embeddings().weight.data.mul_(20)
    beams = generate(model, prompt(), num_beams=3)
    agree(beams, generate(model, prompt(), num_beams=3, use_cache=False))


def test_a_module_without_a_layer_of_the_cache_is_refused_by_name() -> None:
    model = plugged("llama")
    model.model.layers[1].self_attn.layer_idx = None
    with torch.no_grad(), pytest.raises(ValueError, match=r"layers\.1\.self_attn \(LlamaAtt.*None"):
        model.model.layers[1](
            torch.randn(1, 3, 32, dtype=model.dtype),
            position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)),
            past_key_values=_Anywhere(config=model.config),
        )


class _Anywhere(transformers.DynamicCache):
    """A cache that takes keys without the index of a layer."""

    def update(self, keys: Any, values: Any, index: Any, *rest: Any) -> Any:
        return keys, values


def test_a_cache_of_a_lower_degree_is_refused() -> None:
    model = plugged("llama")
    ids = prompt()["input_ids"]
    with torch.no_grad():
        cache = model(ids).past_key_values
        gfsa.unplug(model)
        gfsa.plug(model, filter=gfsa.PageRank)
        with pytest.raises(ValueError, match="filled by a filter of degree 2"):
            model(ids[:, :1], past_key_values=cache)


def test_a_quantised_cache_is_refused() -> None:
    class QuantisedLayer(transformers.cache_utils.DynamicLayer):
        pass

    model = plugged("llama")
    cache = empty_cache(model, "dynamic")
    cache.layers[0] = QuantisedLayer()
    with torch.no_grad(), pytest.raises(TypeError, match="cannot decode with a QuantisedLayer"):
        model(prompt()["input_ids"], past_key_values=cache)


def test_attention_maps_while_decoding_need_degree_one() -> None:
    model = plugged("llama")
    with torch.no_grad():
        ids = prompt()["input_ids"]
        expected = model(ids).logits[:, -1]
        cache = model(ids[:, :-1], output_attentions=True).past_key_values
        refused = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="use_cache=False"):
            model(ids[:, -1:], past_key_values=refused, output_attentions=True)
        # the powers of the prompt are in the cache although its maps were looked at
        logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_maps_of_decoded_tokens_are_rows_of_the_whole_map(
    implementation: str, cache: str
) -> None:
    model, ids = plugged("llama", K=None), prompt()["input_ids"]
    model.set_attn_implementation(implementation)
    tokens = ids.shape[1]
    kept = empty_cache(model, cache, tokens)
    with torch.no_grad():
        whole = model(ids, output_attentions=True, use_cache=False)
        for start, end in ((0, tokens - 3), (tokens - 3, tokens - 1), (tokens - 1, tokens)):
            step = model(ids[:, start:end], past_key_values=kept, output_attentions=True)
            torch.testing.assert_close(step.logits, whole.logits[:, start:end])
            for rows, every in zip(step.attentions, whole.attentions, strict=True):
                columns = rows.shape[-1]
                torch.testing.assert_close(rows, every[:, :, start:end, :columns])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("K", [None, 3])
def test_decoding_is_the_dense_filter_in_double_precision(K: int | None, cache: str) -> None:
    model, ids = plugged("gpt2", K=K).double(), prompt()["input_ids"]
    kept = empty_cache(model, cache)
    with torch.no_grad():
        decoded = [model(ids[:, :4], past_key_values=kept).logits]
        for token in ids[:, 4:].split(1, dim=1):
            position = torch.full_like(token, decoded[0].shape[1] + len(decoded) - 1)
            decoded.append(model(token, past_key_values=kept, position_ids=position).logits)
        # the model's own maps, multiplied as they are
        model.set_attn_implementation("eager")
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(decoded, 1), expected, rtol=1e-10, atol=1e-10)


def test_a_decoded_token_can_be_differentiated() -> None:
    """Sums that are rounded where they are made are for those who want no gradient."""
    model, ids = plugged("gpt2", K=None), prompt()["input_ids"]
    cache = empty_cache(model, "dynamic")
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        expected = model(ids, use_cache=False).logits[:, -1:]
    logits = model(ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    logits.sum().backward()
    assert all(filter.theta.grad.abs().sum() > 0 for filter in gfsa.filters_of(model).values())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_may_come_without_its_name(name: str) -> None:
    model, ids = plugged(name), prompt()["input_ids"]
    seen: list[Any] = []
    attention = next(m for m in model.modules() if hasattr(m, "gfsa"))
    handover = _look_at_inputs
    assert handover in attention._forward_pre_hooks.values()
    cache = empty_cache(model, "dynamic")
    place = _Arguments.of(type(attention)).positional.index("past_key_values")
    args = (ids,) * place + (cache,)
    seen.append(handover(attention, args, {}))
    seen.append(handover(attention, args[:1], {"past_key_values": cache}))
    assert all(kwargs["gfsa_cache"][0] is cache for _, kwargs in seen)
    assert handover(attention, args[:1], {"past_key_values": None}) is None
    assert handover(attention, args[:1], {"encoder_hidden_states": None}) is None
