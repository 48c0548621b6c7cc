"""The two terms beside a polynomial: the token's own value taken out, the first layer's added."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gfsa

SHAPE = (2, 4, 9, 8)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor, share: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """``c0·v + c1·A·v + c2·A²·v − a·p·v``, written out."""
    group = q.shape[1] // v.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    a = scores.softmax(-1)
    u = a @ v
    p = (u * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True)
    c0, c1, c2 = coeffs.T[..., None, None]
    return c0 * v + c1 * u + c2 * (a @ u) - share[:, None, None] * p * v


@pytest.fixture
def tensors() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *SHAPE, dtype=torch.float64)
    return q, k, v, torch.rand(4, 3, dtype=torch.float64), torch.rand(4, dtype=torch.float64)


class TestExclusiveTerm:
    @pytest.mark.parametrize("backend", ["auto", "dense", "sdpa"])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("heads", [4, 2])
    def test_is_the_formula(
        self, tensors: tuple[Tensor, ...], backend: str, causal: bool, heads: int
    ) -> None:
        q, k, v, coeffs, share = tensors
        k, v = k[:, :heads], v[:, :heads]
        y = gfsa.graph_filter_attention(
            *(q, k, v, coeffs),
            is_causal=causal,
            enable_gqa=True,
            backend=backend,  # type: ignore[arg-type]
            exclusive=share,
        )
        hidden = ~torch.ones(9, 9).tril().bool() if causal else None
        torch.testing.assert_close(y, by_hand(q, k, v, coeffs, share, hidden))

    def test_output_is_orthogonal_to_own_value(self, tensors: tuple[Tensor, ...]) -> None:
        q, k, v, *_ = tensors
        y = gfsa.graph_filter_attention(q, k, v, torch.tensor([0.0, 1.0]), exclusive=1.0)
        assert (y * v).sum(-1).abs().max() < 1e-6

    def test_gradients(self, tensors: tuple[Tensor, ...]) -> None:
        parts = [x[:1, :2, :5, :3] if x.dim() == 4 else x[:2] for x in tensors]
        inputs = tuple(x.clone().requires_grad_() for x in parts)

        def call(*x: Tensor) -> Tensor:
            return gfsa.graph_filter_attention(*x[:4], exclusive=x[4], backend="dense")

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_half_precision(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        *tokens, coeffs, share = tensors
        half = (x.to(dtype) for x in tokens)
        y = gfsa.graph_filter_attention(*half, coeffs.float(), exclusive=share.float())
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), by_hand(*tensors), atol=0.03, rtol=0.03)

    def test_token_without_a_value_keeps_what_attention_gives(
        self, tensors: tuple[Tensor, ...]
    ) -> None:
        q, k, v, coeffs, share = tensors
        v[:, :, 3] = 0.0
        v.requires_grad_()
        y = gfsa.graph_filter_attention(q, k, v, coeffs, exclusive=share)
        plain = gfsa.graph_filter_attention(q, k, v, coeffs)
        assert torch.equal(y[:, :, 3], plain[:, :, 3])
        assert torch.autograd.grad(y.sum(), v)[0].isfinite().all()

    @pytest.mark.parametrize("share", [torch.rand(3), "1", float("nan"), True])
    def test_refuses(self, tensors: tuple[Tensor, ...], share: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="exclusive must be"):
            gfsa.graph_filter_attention(*tensors[:4], exclusive=share)


class TestExclusiveFilter:
    @pytest.mark.parametrize(
        "filter",
        [
            gfsa.Exclusive(4, 0.7),
            gfsa.GFSA(4, wK=0.2).exclude([0.1, 0.2, 0.3, 0.4]),
            gfsa.Twicing(4).exclude(0.5),
            gfsa.filters.PartialPolynomial(4, 2, [1, 2]).exclude(0.5, learn=True),
        ],
        ids=lambda filter: type(filter).__name__,
    )
    def test_any_filter(self, tensors: tuple[Tensor, ...], filter: gfsa.GraphFilter) -> None:
        q, k, v, *_ = tensors
        filter = filter.double()
        if filter.theta is not None:
            nn.init.normal_(filter.theta, std=0.3)
        operator = gfsa.operators.AttentionOperator(q, k)
        coeffs, share = filter.coefficients(), filter.share()
        coeffs = nn.functional.pad(coeffs, (0, 3 - coeffs.shape[1]))
        expected = by_hand(q, k, v, coeffs, share)
        torch.testing.assert_close(filter(operator, v), expected)
        torch.testing.assert_close(filter.fold()(operator, v), expected)
        dense = gfsa.operators.DenseOperator(operator.dense())
        torch.testing.assert_close(filter.map(dense, v) @ v, expected)

    def test_learned_share_starts_as_the_model(self) -> None:
        model, x = stack(), tokens()
        expected = model(x)
        report = gfsa.plug(model, filter=lambda heads: gfsa.Exclusive(heads, 0.0, learn=True))
        assert report.parameters == 4 * 4
        assert torch.equal(model(x), expected)
        model(x).sum().backward()
        assert all(f.theta.grad.abs().sum() > 0 for f in gfsa.filters_of(model).values())

    def test_once(self) -> None:
        with pytest.raises(ValueError, match="has an exclusive term already"):
            gfsa.Exclusive(4).exclude()
        with pytest.raises(ValueError, match="exclude comes before add_depth"):
            gfsa.GFSA(4).add_depth().exclude()


def stack(layers: int = 4, kind: type[nn.Module] = nn.TransformerEncoder) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
    return kind(layer, layers, enable_nested_tensor=False).double().eval()


class Checkpointed(nn.TransformerEncoder):
    """A stack whose forward says how its layers are checkpointed, or that they are not."""

    def forward(  # type: ignore[override]
        self, x: Tensor, reentrant: bool | None = None, mask: Tensor | None = None
    ) -> Tensor:
        for layer in self.layers:
            plain = reentrant is None
            x = layer(x, mask) if plain else checkpoint(layer, x, mask, use_reentrant=reentrant)
        return x


def tokens(seed: int = 2) -> Tensor:
    return torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.manual_seed(seed))


def with_depth(model: Any, filter: Callable[[int], gfsa.GraphFilter] | None = None) -> Any:
    """The model, plugged with random filters."""
    gfsa.plug(model, filter=filter or gfsa.Exclusive, depth=True)
    torch.manual_seed(3)
    for found in gfsa.filters_of(model).values():
        if found.theta is not None:
            nn.init.normal_(found.theta, std=0.3)
    return model


def learned_share(heads: int) -> gfsa.GraphFilter:
    return gfsa.GFSA(heads).exclude(0.3, learn=True)


def gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.sin().sum(), list(model.parameters()), allow_unused=False))


class TestDepthTerm:
    def test_starts_as_the_model_and_is_the_formula(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x = stack(2), tokens()
        expected = model(x)
        gfsa.plug(model, filter=lambda heads: gfsa.Polynomial(heads, degree=1), depth=True)
        assert torch.equal(model(x), expected)
        r = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
        gfsa.filters_of(model)["layers.1.self_attn"].theta.data[:, -1] = r  # type: ignore[union-attr]
        seen: list[Tensor] = []
        for found in gfsa.filters_of(model).values():
            found.register_forward_pre_hook(lambda _, args: seen.append(args[1].detach()))
        calls: list[Tensor] = []
        polynomial = gfsa.operators.AttentionOperator.polynomial

        def recorded(self, coeffs, v, *rest):  # type: ignore[no-untyped-def]
            calls.append(v.detach())
            return polynomial(self, coeffs, v, *rest)

        monkeypatch.setattr(gfsa.operators.AttentionOperator, "polynomial", recorded)
        model(x)
        torch.testing.assert_close(calls[1], seen[1] + r[:, None, None] * seen[0])

    def test_copies_are_apart_and_unplug_restores(self, tmp_path: Path) -> None:
        model, x = stack(), tokens()
        plain = model(x)
        with_depth(model)
        expected = model(x)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(x), expected)
            ours, theirs = (gfsa.filters_of(m)["layers.0.self_attn"] for m in (model, copied))
            assert ours.first_values is not theirs.first_values
        gfsa.save(model, tmp_path)
        state = model.state_dict()
        gfsa.unplug(model)
        assert torch.equal(model(x), plain)
        gfsa.load(model, tmp_path)
        assert torch.equal(model(x), expected)
        other = stack()
        gfsa.plug(other, filter=gfsa.Exclusive, depth=True)
        other.load_state_dict(state)
        assert torch.equal(other(x), expected)

    def test_filters_without_its_term_are_told_apart(self) -> None:
        models = [stack(2), stack(2)]
        gfsa.plug(models[0], depth=True)
        gfsa.plug(models[1], filter=lambda heads: gfsa.GFSA(heads).exclude(0.5))
        assert "; depth" in repr(models[0])
        assert "; exclusive" in repr(models[1])
        for model, other in (models, models[::-1]):
            with pytest.raises(ValueError, match=r"'share': 0\.5"):
                model.load_state_dict(other.state_dict())

    def test_prune_keeps_the_terms(self) -> None:
        model, x = with_depth(stack(), learned_share), tokens()
        for found in gfsa.filters_of(model).values():
            found.theta.data[:, 2] = 0.0
        expected = model(x)
        report = gfsa.prune(model)
        assert all(degree == 1 for degrees in report.after.values() for degree in degrees)
        torch.testing.assert_close(model(x), expected)

    def test_folded_filters_keep_their_place(self) -> None:
        model, x = with_depth(stack(), gfsa.GFSA), tokens()
        expected = model(x)
        for name, found in gfsa.filters_of(model).items():
            model.get_submodule(name).gfsa = found.fold()
        torch.testing.assert_close(model(x), expected)

    @pytest.fixture
    def checkpointed(self) -> Any:
        return with_depth(stack(kind=Checkpointed))

    def test_checkpointing_finds_the_values_of_its_own_forward(self, checkpointed: Any) -> None:
        model, x, other = checkpointed, tokens(), tokens(5)
        expected = gradients(model, model(x))
        y = model(x, reentrant=False)
        # forwards between: one for evaluation, one whose backward pass comes later
        with torch.no_grad():
            model(other)
        later = model(other, reentrant=False)
        torch.testing.assert_close(gradients(model, y), expected)
        torch.testing.assert_close(gradients(model, later), gradients(model, model(other)))

    def test_checkpointing_of_rows_that_end_in_the_same_document(self, checkpointed: Any) -> None:
        model = checkpointed
        mask = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)) == 0
        rows = [tokens(), tokens()]
        rows[1][:, :3] = tokens(5)[:, :3]
        expected, got = (
            gradients(model, sum(model(x, reentrant, mask) for x in rows))
            for reentrant in (None, False)
        )
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("learn", ["gfsa", "linear1"])
    def test_checkpointing_below_a_frozen_first_layer(self, learn: str, checkpointed: Any) -> None:
        model, x = checkpointed, tokens()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learn in name and "layers.0" not in name)
        learned = [p for p in model.parameters() if p.requires_grad]
        expected, got = (
            torch.autograd.grad(model(x, reentrant).sin().sum(), learned)
            for reentrant in (None, False)
        )
        torch.testing.assert_close(got, expected)

    def test_checkpointing_of_tokens_that_are_not_finite(self, checkpointed: Any) -> None:
        model, x = checkpointed, tokens()
        x[0, 0] = torch.nan
        expected, got = (gradients(model, model(x, reentrant)[1]) for reentrant in (None, False))
        torch.testing.assert_close(got, expected, equal_nan=True)

    def test_checkpointing_refuses_what_it_cannot_tell_apart(self, checkpointed: Any) -> None:
        y = checkpointed(tokens().requires_grad_(), reentrant=True)
        with pytest.raises(ValueError, match="use_reentrant=False"):
            y.sum().backward()
        for layer in checkpointed.layers[1:]:
            nn.init.zeros_(layer.self_attn.in_proj_weight[64:])
        y = sum(checkpointed(x, False) for x in (tokens(), tokens(5)))
        with pytest.raises(ValueError, match="backward after each forward"):
            y.sum().backward()

    def test_each_thread_has_its_own_values(self) -> None:
        model = with_depth(stack())
        inputs = [tokens(seed) for seed in range(4)]
        expected = [model(x) for x in inputs]
        together = threading.Barrier(len(inputs), timeout=60)

        def wait(*_: object) -> None:
            together.wait()

        for layer in model.layers:
            layer.register_forward_pre_hook(wait)
        with ThreadPoolExecutor(len(inputs)) as pool:
            assert all(map(torch.equal, pool.map(model, inputs), expected))

    def test_a_container_with_a_forward_of_its_own(self) -> None:
        class Body(nn.ModuleList):
            def forward(self, x: Tensor) -> Tensor:
                for layer in self:
                    x = layer(x)
                return x

        model, x = Body(stack().layers), tokens()
        before = model(x)
        gfsa.plug(model, depth=True)
        assert torch.equal(model(x), before)

    def test_a_dropped_first_layer_leaves_no_values_of_an_earlier_forward(self) -> None:
        model, x = with_depth(stack()), tokens()
        layers = model.layers
        model.layers = layers[:-1]
        model(x)
        model.layers = layers[1:]
        with pytest.raises(ValueError, match="has not run in this forward"):
            model(x)
        model.layers = layers
        gfsa.unplug(model)
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
        assert not model._forward_hooks_always_called

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_layers_outside_of_a_forward_have_no_first_values(
        self, error: type[BaseException]
    ) -> None:
        def interrupt(*_: object) -> None:
            raise error

        model, x = with_depth(stack()), tokens()
        handle = model.layers[3].register_forward_pre_hook(interrupt)
        with pytest.raises(error):
            model(x)
        handle.remove()
        if error is KeyboardInterrupt:
            # torch calls no hook when Ctrl-C ends a forward: the next one forgets it
            model(x)
        for _ in range(2):
            with pytest.raises(ValueError, match="call the model itself"):
                model.layers[2](x)
            # stages of a pipeline: this micro-batch's first layer, another one's second
            model.layers[0](tokens(5))

    def test_timm_checkpoints_the_blocks_of_a_sequential_one_by_one(self) -> None:
        timm = pytest.importorskip("timm")
        sizes = {"embed_dim": 32, "num_heads": 4, "img_size": 32, "num_classes": 5}
        model = with_depth(timm.create_model("vit_tiny_patch16_224", depth=3, **sizes).double())
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        expected = gradients(model, model(x))
        model.set_grad_checkpointing()
        torch.testing.assert_close(gradients(model, model(x)), expected)

    def test_compiles_block_by_block_without_a_break(self) -> None:
        # what other tests have compiled of torch's layers
        torch.compiler.reset()
        model, x = with_depth(stack()), tokens()
        expected = gradients(model, model(x))
        other = copy.deepcopy(model)
        for layer in (*model.layers, *other.layers):
            layer.compile(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(gradients(model, model(x)), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(other(x), model(x))

    def test_exports(self) -> None:
        model, x = with_depth(stack(2)), tokens()
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), model(x))

    def test_refuses_where_layers_have_no_order(self) -> None:
        for groups, inside, error in (
            (1, 1, "one filtered layer"),
            (1, 2, "1 groups of layers for 4 depths"),
            (2, 1, "2 groups of layers for 4 depths"),
        ):
            config = transformers.AlbertConfig(
                vocab_size=32, embedding_size=16, hidden_size=32, num_attention_heads=4,
                num_hidden_layers=4, intermediate_size=32, num_hidden_groups=groups,
                inner_group_num=inside,
            )  # fmt: skip
            model = transformers.AlbertModel(config)
            with pytest.raises(ValueError, match=error):
                gfsa.plug(model, depth=True)
            assert not gfsa.filters_of(model)
        grid = nn.ModuleList(nn.ModuleList(stack(1).layers) for _ in range(2))
        grid[0].append(stack(1).layers[0])
        with pytest.raises(ValueError, match="more than one number"):
            gfsa.plug(grid, depth=True)

    def test_refuses_a_first_layer_that_runs_twice(self) -> None:
        model = with_depth(stack())
        model.layers.append(model.layers[0])
        with pytest.raises(ValueError, match="run twice in this forward"):
            model(tokens())

    def test_refuses_other_heads_and_head_dims(self) -> None:
        layers = [nn.TransformerEncoderLayer(32, heads, 48) for heads in (4, 2)]
        wider = nn.TransformerEncoderLayer(64, 4, 48)
        for model in (nn.Sequential(*layers), nn.Sequential(layers[0], nn.Linear(32, 64), wider)):
            gfsa.plug(model, depth=True)
            with pytest.raises(ValueError, match="other heads or head dims"):
                model(torch.randn(5, 2, 32))
            gfsa.unplug(model)

    def test_refuses_layers_with_the_values_of_others(self) -> None:
        kinds = ["sliding_attention", "full_attention"] * 2
        config = transformers.Gemma3nTextConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=4, layer_types=kinds, head_dim=8,
            intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, laurel_rank=2,
            num_kv_shared_layers=2, hidden_size_per_layer_input=4, vocab_size_per_layer_input=32,
            activation_sparsity_pattern=None,
        )  # fmt: skip
        model = transformers.Gemma3nForCausalLM(config)
        # the cache would hold the mixed values, a forward without one hands on the plain ones
        with pytest.raises(ValueError, match=r"layers\.2\.self_attn attends to those of another"):
            gfsa.plug(model, filter=gfsa.Exclusive, layers=[1, 2], depth=True)
        assert not gfsa.filters_of(model)


def decoder(kind: str) -> nn.Module:
    torch.manual_seed(4)
    shared = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    if kind == "windows":
        kinds = ["sliding_attention", "full_attention"] * 2
        config = transformers.Gemma3TextConfig(**shared, sliding_window=6, layer_types=kinds)
    else:
        config = transformers.Qwen3Config(**shared)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.double().eval()


class TestDecoding:
    @pytest.mark.parametrize("kind", ["grouped", "windows"])
    @pytest.mark.parametrize("degree", [1, 2])
    @torch.no_grad()
    def test_cached_is_uncached(self, kind: str, degree: int) -> None:
        model = with_depth(decoder(kind), None if degree == 1 else learned_share)
        ids = torch.randint(1, 64, (2, 14))
        expected = model(ids, use_cache=False).logits
        cache, logits = transformers.DynamicCache(config=model.config), []
        for new in ids.split([5, *[1] * 9], 1):
            logits.append(model(new, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(logits, 1), expected)

    @torch.no_grad()
    def test_a_cache_can_be_copied_and_pickled(self) -> None:
        model, ids = with_depth(decoder("grouped")), torch.randint(1, 64, (2, 5))
        cache = model(ids, use_cache=True).past_key_values
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        expected, *got = (
            model(ids[:, :1], past_key_values=past).logits for past in (cache, *copies)
        )
        assert all(torch.equal(logits, expected) for logits in got)

    def test_values_of_a_plain_model_are_refused(self) -> None:
        model, ids = decoder("grouped"), torch.randint(1, 64, (2, 5))
        cache = model(ids, use_cache=True).past_key_values
        with_depth(model)
        with pytest.raises(ValueError, match=r"holds 5 tokens that .* did not add"):
            model(ids[:, :1], past_key_values=cache)

    @pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}])
    def test_generate(self, options: dict[str, Any]) -> None:
        model = with_depth(decoder("grouped"), learned_share)
        ids = torch.randint(1, 64, (2, 5))
        common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        common["num_beams"] = options.pop("num_beams", 1)
        got = model.generate(ids, **common, **options, disable_compile=True)
        assert torch.equal(got, model.generate(ids, **common, use_cache=False))


def attended(model: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Map, mixed values and output of each layer, with ``need_weights=True``."""
    found: list[Any] = []
    handles = []
    maps = {"need_weights": True, "average_attn_weights": False}
    for layer in model.layers:
        seen: list[Tensor] = []
        handles += [
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | maps), with_kwargs=True
            ),
            layer.self_attn.register_forward_hook(
                lambda _, args, y, seen=seen: found.append((y[1], *seen))
            ),
            layer.self_attn.gfsa.register_forward_hook(
                lambda _, args, y, seen=seen: seen.extend((args[1], y))
            ),
        ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def lens_of(model: nn.Module, x: Tensor) -> list[Any]:
    (found,) = gfsa.diagnose(model, x, progress=False).models.values()
    return found.attention


class TestEverywhere:
    def test_returned_maps_are_what_the_output_was_computed_with(self) -> None:
        model = with_depth(stack())
        for weights, mixed, y in attended(model, tokens()):
            torch.testing.assert_close(weights @ mixed, y)

    def test_filters_added_below_leave_the_first_values(self) -> None:
        model, x = stack(), tokens()
        gfsa.plug(model, filter=gfsa.Exclusive, layers=[2, 4], depth=True)
        last = gfsa.filters_of(model)["layers.3.self_attn"]
        nn.init.constant_(last.theta, 0.5)
        expected = model(x)
        # the lens plugs the other layers for a while
        reading = lens_of(model, x)
        assert torch.equal(model(x), expected)
        assert [layer.own is not None for layer in reading] == [False, True, False, True]

        with pytest.raises(ValueError, match="comes before"):
            gfsa.plug(model, layers=[1])

    def test_lens_measures_the_map_with_its_terms(self) -> None:
        model, x = with_depth(stack()), tokens()
        (_, mixed, y), *_ = attended(model, x)
        readings = lens_of(model, x)
        own = readings[0].own
        cosine = nn.functional.cosine_similarity(y, mixed, dim=-1).mean((0, 2))
        torch.testing.assert_close(torch.tensor(own.cosine, dtype=cosine.dtype), cosine)
        # a share of 1 leaves nothing along v, so that p was the weighted part of A·v
        assert all(abs(part) > 1e-3 for layer in readings for part in layer.own.part)
        assert all(0 < weight < 1 for layer in readings for weight in layer.own.weight)
        spectrum = readings[0].spectrum
        assert spectrum.map_response != spectrum.filter_response
        # the coefficients are fixed: what moved is r
        (advice,) = gfsa.diagnose(model, x).headline.advises
        assert "the filters moved" in advice

    def test_a_filter_that_is_no_polynomial_takes_no_term(self) -> None:
        class Other(gfsa.GraphFilter):
            is_polynomial = False

            def forward(self, operator: gfsa.operators.Operator, v: Tensor) -> Tensor:
                return operator.apply(v)

        with pytest.raises(ValueError, match="not a polynomial"):
            gfsa.plug(stack(), filter=lambda h: Other(h, torch.tensor([0.0, 1.0])), depth=True)

    def test_a_model_compiles_without_a_break(self) -> None:
        model, x = decoder("grouped"), torch.randint(1, 64, (2, 9))
        gfsa.plug(model, filter=gfsa.Exclusive, depth=True)
        expected = model(x, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, use_cache=False).logits, expected)

    def test_packed_rows_stay_apart(self) -> None:
        model = with_depth(decoder("grouped"))
        first, second = torch.randint(1, 64, (1, 6)), torch.randint(1, 64, (1, 4))
        places = torch.cat((torch.arange(6), torch.arange(4)))[None]
        packed = model(torch.cat((first, second), 1), position_ids=places, use_cache=False).logits
        alone = [model(x, use_cache=False).logits for x in (first, second)]
        torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_vllm_serves_both_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    # of vLLM only the attention layer is needed here: one that has all tokens at once
    class Attention(nn.Module):
        num_heads, num_kv_heads, has_sink = 4, 2, False

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(len(x), -1, 8).transpose(0, 1) for x in (q, k, v))
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(0, 1).flatten(1)

    name = "vllm.model_executor.layers.attention"
    for part in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setattr(sys.modules[name], "Attention", Attention, raising=False)
    own = "gfsa.engines.vllm.layers"
    monkeypatch.delitem(sys.modules, own, raising=False)
    served = importlib.import_module(own)
    monkeypatch.delitem(sys.modules, own)
    filter = gfsa.GFSA(4, wK=0.2).exclude([0.1, 0.2, 0.3, 0.4], learn=True).double()
    deep = gfsa.GFSA(4).exclude(0.5).add_depth().double()
    layer, above = (
        served.FilteredAttention(
            [Attention(), Attention()], served.ServedFilter(x, (0, 4), 2, 2, x)
        )
        for x in (filter, deep)
    )
    for each in (layer, above):
        each.filter.load_weights([("theta", torch.randn(4, 4, dtype=torch.float64))])
    q, k, v = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    y = layer(q.flatten(1), k.flatten(1), v.flatten(1)).view(9, 4, 8)
    share = filter.share()
    hidden = ~torch.ones(9, 9).tril().bool()
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = by_hand(*rows, filter.coefficients(), share, hidden)
    torch.testing.assert_close(y.transpose(0, 1)[None], expected)

    layer.first_values = above.first_values = served.FirstValues()
    above.is_last = True
    own = torch.randn(9, 2, 8, dtype=torch.float64)
    layer(q.flatten(1), k.flatten(1), v.flatten(1))
    y = above(q.flatten(1), k.flatten(1), own.flatten(1)).view(9, 4, 8)
    # heads that share values use the mean of their r
    mixed = own + deep.depth().view(2, 2).mean(1)[:, None] * v
    rows = (x.transpose(0, 1)[None] for x in (q, k, mixed))
    expected = by_hand(*rows, deep.coefficients(), deep.share(), hidden)
    torch.testing.assert_close(y.transpose(0, 1)[None], expected)
    assert above.first_values.values is None
