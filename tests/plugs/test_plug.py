"""plug, unplug, their reports and their preview, on any model."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers as hf
from torch import Tensor, nn
from typer.testing import CliRunner

import gfsa
from census.catalogue import build_transformers
from gfsa.cli import build as build_cli
from gfsa.info import build
from gfsa.plugs import FilterNotCalledError
from gfsa.plugs.checks.called import _CallHook
from support.tiny import TinyEncoder
from support.zoo import SMALL, ZOO

transformers.logging.set_verbosity_error()


def bert(layers: int = 4) -> transformers.BertModel:
    config = transformers.BertConfig(**{**SMALL, "num_hidden_layers": layers})
    return transformers.BertModel(config).eval()


def names(model: nn.Module) -> list[int]:
    """The plugged layers, counted from 1."""
    return [int(name.split(".")[2]) + 1 for name in gfsa.filters_of(model)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [1, 2, 3, 4]),
        ("even", [2, 4]),
        ("upper", [3, 4]),
        ("lower", [1, 2]),
        ("odd", [1, 3]),
        ([1, 4], [1, 4]),
        ((3,), [3]),
        (range(2, 4), [2, 3]),
        (np.arange(1, 3), [1, 2]),
        (lambda name, module: ".1." in name or module.layer_idx == 2, [2, 3]),
        (["encoder.layer.[01].*", "encoder.layer.3", 3], [1, 2, 3, 4]),
        ("*.1.*", [2]),
    ],
)
def test_layers(layers: object, expected: list[int]) -> None:
    model = bert()
    report = gfsa.plug(model, layers=layers)
    assert names(model) == expected
    assert list(report.plugged) == list(gfsa.filters_of(model))
    assert set(report.plugged.values()) == {4}
    assert report.parameters == len(expected) * 4 * 3
    assert set(report.skipped.values()) <= {"not among the selected layers"}
    assert len(report.plugged) + len(report.skipped) == 4


def test_shared_layers_are_one_layer() -> None:
    model = build_transformers("albert")
    with pytest.raises(
        ValueError, match=r"1 self-attention layer .*share one module, as in ALBERT"
    ):
        gfsa.plug(model, layers="even")
    assert len(gfsa.plug(model, layers="odd").plugged) == 1


def test_a_dry_run_changes_nothing() -> None:
    model = bert()
    keys = list(model.state_dict())
    report = gfsa.plug(model, K=3, layers="even", dry_run=True)
    assert not gfsa.filters_of(model)
    assert list(model.state_dict()) == keys
    assert report.dry_run
    assert str(report).startswith("would plug 2 layers, 24 learned numbers (2 skipped)")
    assert "encoder.layer.1.attention.self: 4 heads, attention interface" in str(report)
    assert str(gfsa.plug(model, layers="even")).startswith("plugged 2 layers")


def test_plugging_twice() -> None:
    model = bert()
    gfsa.plug(model, layers=[1, 2], K=3)
    with pytest.raises(ValueError, match=r"encoder.layer.1.*plugged already; gfsa.unplug"):
        gfsa.plug(model, layers=[2, 3])
    assert names(model) == [1, 2]
    # other layers may get other filters
    gfsa.plug(model, layers=[3], K=5)
    assert [f.K for f in gfsa.filters_of(model).values()] == [3, 3, 5]
    gfsa.unplug(model)
    assert not gfsa.filters_of(model)


def test_nothing_to_plug_or_to_unplug() -> None:
    with pytest.raises(
        ValueError, match=r"found no self-attention in Linear that[\s\S]*register_adapter"
    ):
        gfsa.plug(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="BertModel has no filters to unplug"):
        gfsa.unplug(bert())


LAYERS_MUST_BE = "layers must be 'all', 'even', 'odd', 'lower', 'upper'"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": "some"}, ValueError, f"{LAYERS_MUST_BE}.*got 'some', which matches none of"),
        ({"layers": [0]}, ValueError, "no layer 0: the model has 4 self-attention layers.*from 1"),
        ({"layers": [5]}, ValueError, "there is no layer 5"),
        ({"layers": [1.5]}, ValueError, "got 1.5 among them"),
        ({"layers": [True]}, ValueError, "got True among them"),
        ({"layers": 7}, ValueError, "layers must be .*got 7"),
        ({"layers": []}, ValueError, "selects none of the model's 4"),
        ({"layers": lambda name, module: False}, ValueError, "selects none of the model's 4"),
        ({"filter": gfsa.GFSA(4)}, TypeError, "a function of the number of heads"),
        ({"filter": 3}, TypeError, "a function of the number of heads"),
        ({"filter": gfsa.Twicing, "K": 3}, ValueError, "K are arguments of GFSA"),
        ({"filter": lambda heads: nn.Linear(1, 1)}, TypeError, "must return a gfsa.GraphFilter"),
        ({"filter": lambda heads: gfsa.Twicing(7)}, ValueError, "of 4 heads, .*; got 7 heads for"),
        (
            {"filter": functools.cache(gfsa.GFSA)},
            ValueError,
            r"a new one in each call, .*; got the filter of .*\.0\..* for .*\.1\.",
        ),
        ({"preset": "best"}, ValueError, "preset must be 'paper' or None, got 'best'"),
        ({"dropout_after": "lunch"}, ValueError, "dropout_after must be 'attention' or 'filter'"),
        ({"unknown": "guess"}, ValueError, "unknown must be one of"),
        ({"learn": ("w9",)}, ValueError, "learn takes each of"),
        ({"degree": 1, "K": 3}, ValueError, "pass one of them"),
        ({"degree": 3}, ValueError, "degree must be 1"),
        ({"filter_lr": 1e-2}, TypeError, r"no argument 'filter_lr'; .*gfsa\.parameter_groups"),
        ({"hops": 2}, TypeError, "no argument 'hops'; .*filter="),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = bert()
    with pytest.raises(error, match=message):
        gfsa.plug(model, **arguments)
    assert not gfsa.filters_of(model)


def test_arguments_reach_the_filters() -> None:
    model = bert()
    gfsa.plug(model, K=5, learn=("wK",), w0=-0.01, power="exact", lr_multiplier=10.0)
    for filter in gfsa.filters_of(model).values():
        assert (filter.K, filter.learn, filter.power) == (5, ("wK",), "exact")
        assert filter.lr_multiplier == 10.0
        assert filter.coefficients()[:, 0].tolist() == pytest.approx([-0.01] * 4)
    gfsa.unplug(model)
    gfsa.plug(model, degree=1)
    assert {filter.degree for filter in gfsa.filters_of(model).values()} == {1}


@pytest.mark.parametrize(
    ("name", "K", "after", "numbers"),
    [
        ("bert", 3, "attention", 8),
        ("albert", 3, "attention", 4),
        ("roberta", 3, "attention", 8),
        ("gpt2", 3, "attention", 8),
        ("deit", 4, "filter", 8),
        ("vit", 4, "filter", 8),
        ("swin", 3, "filter", 12),
        ("t5", 3, "filter", 16),
        ("bart", 2, "filter", 16),
        ("plbart", 2, "filter", 16),
    ],
)
def test_the_papers_settings(name: str, K: int, after: str, numbers: int) -> None:
    stages = {"depths": [2, 2], "num_heads": [2, 4]}
    model = build_transformers(name, stages if name == "swin" else None)
    report = gfsa.plug(model, preset="paper")
    assert report.parameters == numbers
    for filter in gfsa.filters_of(model).values():
        assert (filter.K, filter.learn, filter.dropout_after) == (K, ("wK",), after)


def test_arguments_go_before_the_preset() -> None:
    model = build_transformers("deit")
    gfsa.plug(model, preset="paper", K=3, w0=-0.01)
    for filter in gfsa.filters_of(model).values():
        assert (filter.K, filter.learn) == (3, ("wK",))
        assert filter.coefficients()[:, 0].tolist() == pytest.approx([-0.01] * 4)


def test_models_that_the_paper_has_no_settings_for() -> None:
    with pytest.raises(ValueError, match="the paper has no settings for LlamaForCausalLM"):
        gfsa.plug(ZOO["llama"].model("sdpa"), preset="paper")
    towers = nn.ModuleList([build_transformers("vit"), build_transformers("gpt2")])
    with pytest.raises(ValueError, match=r"got gpt2 and vit\..*plug the parts"):
        gfsa.plug(towers, preset="paper")


def checks_of(model: nn.Module) -> list[object]:
    """The hooks that look whether filters are called."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, _CallHook)]


IDS = torch.arange(6)[None]


@pytest.mark.parametrize("runs", [True, False], ids=["the model", "a part of it"])
def test_a_filter_that_is_never_called_is_an_error(runs: bool) -> None:
    net = bert(2)
    model = net if runs else nn.ModuleDict({"net": net})
    gfsa.plug(model)
    silent = net.encoder.layer[1].attention.self
    silent.forward = lambda hidden, *args, **kwargs: (hidden, None)
    # it stays one, and a copy has its own check
    copied = copy.deepcopy(model)
    for each in (net, net, copied if runs else copied["net"]):
        with pytest.raises(FilterNotCalledError, match=r"encoder\.layer\.1\.attention\.self:"):
            each(IDS)
    del silent.forward
    net(IDS)
    assert not checks_of(model)


def test_a_layer_that_its_block_passes_by_is_an_error() -> None:
    model = bert(2)
    gfsa.plug(model)
    model.encoder.layer[1].attention.forward = lambda hidden, *args, **kwargs: (hidden, None)
    with pytest.raises(FilterNotCalledError, match=r"encoder\.layer\.1\.attention\.self"):
        model(IDS)


def test_parts_can_be_plugged_and_unplugged_on_their_own() -> None:
    model = bert(2)
    gfsa.plug(model)
    gfsa.unplug(model.encoder.layer[0])
    assert names(model) == [2]
    model(IDS)
    model = bert(2)
    gfsa.plug(model.encoder)
    gfsa.unplug(model)
    model(IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("what", ["attention", "filter", "filter of a part"])
def test_what_is_replaced_is_not_checked(what: str) -> None:
    model, other = bert(2), bert(2)
    gfsa.plug(model)
    layer = model.encoder.layer[1]
    if what == "attention":
        layer.attention.self = other.encoder.layer[1].attention.self
    else:
        layer.attention.self.gfsa = layer.attention.self.gfsa.fold()
    if what == "filter of a part":
        # it is checked when the attention's own forward ends
        layer(torch.randn(1, 6, 32))
    model(IDS)
    assert names(model) == ([1] if what == "attention" else [1, 2])
    assert not checks_of(model)


class TwoTowers(nn.Module):
    """An input without images reaches the text tower only."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = TinyEncoder(depth=1), TinyEncoder(depth=1)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        if image is not None:
            text = text + self.vision(image).mean()
        return self.text(text)


def test_a_forward_that_raised_is_not_counted() -> None:
    def no_memory(*args: object) -> None:
        raise RuntimeError("out of memory")

    model = TwoTowers().eval()
    gfsa.plug(model)
    tokens = torch.randn(1, 3, 16)
    # the block of the vision tower runs, and its attention is never reached
    handle = model.vision.blocks[0].norm1.register_forward_hook(no_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(tokens, tokens)
    handle.remove()
    model(tokens)
    # the check of the vision tower goes on
    model.vision.blocks[0].attention.forward = lambda x, mask=None: x
    with pytest.raises(FilterNotCalledError, match=r"vision\.blocks\.0\.attention"):
        model(tokens, tokens)


class OwnParameter(gfsa.Twicing):
    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.gain = nn.Parameter(torch.ones(num_heads, 1))

    def coefficients(self) -> torch.Tensor:
        return self.gain * self.base


@pytest.mark.parametrize("how", ["plug", "own filter", "load", "prune", "exact prune", "baseline"])
def test_filters_train_that_were_plugged_in_inference_mode(how: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)

    model, saved = build().double(), build()
    gfsa.plug(saved, w0=0.1)
    gfsa.save(saved, tmp_path)
    with torch.inference_mode():
        if how == "load":
            gfsa.load(model, tmp_path)
        elif how == "own filter":
            gfsa.plug(model, filter=OwnParameter)
        elif how == "baseline":
            gfsa.baselines.apply(model, "attnscale")
        else:
            gfsa.plug(model, K=3, w0=0.5, wK=[0.0, 0.0, 0.0, 0.0 if how == "prune" else 1.0])
        if "prune" in how:
            gfsa.prune(model)
        model(torch.randn(1, 3, 16).double())
    parameters = [p for n, p in model.named_parameters() if "gfsa" in n]
    assert parameters
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(1, 3, 16).double()).square().sum().backward()
    optimizer.step()
    for parameter, old in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        assert not torch.equal(parameter, old)


def test_filters_live_where_their_layer_lives() -> None:
    model = bert(1).double()
    gfsa.plug(model)
    assert next(iter(gfsa.filters_of(model).values())).theta.dtype == torch.float64
    half = bert(1).bfloat16()
    gfsa.plug(half)
    # small steps would be lost in bfloat16
    assert next(iter(gfsa.filters_of(half).values())).theta.dtype == torch.float32
    assert half(IDS)[0].dtype == torch.bfloat16


def test_parameter_groups() -> None:
    model = bert(2)
    gfsa.plug(model)
    for parameter in model.embeddings.parameters():
        parameter.requires_grad_(False)
    groups = {g["name"]: g for g in gfsa.parameter_groups(model, 1e-4, 1e-2, weight_decay=0.1)}
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "weights": (1e-4, 0.1),
        "biases": (1e-4, 0.0),
        "filters": (1e-2, 0.0),
    }
    grouped = [id(p) for g in groups.values() for p in g["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}
    assert sum(p.numel() for p in groups["filters"]["params"]) == 24
    torch.optim.AdamW(list(groups.values()))
    # without one of its own, the optimizer's is not lost
    optimizer = torch.optim.AdamW(gfsa.parameter_groups(model, 1e-4), weight_decay=0.3)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0, 0.0]


@pytest.mark.parametrize(("filter", "rate"), [(gfsa.Exclusive, 0.1), (gfsa.GFSA, 0.01)])
def test_the_rate_of_depth_terms(filter: Any, rate: float) -> None:
    """r learns from 0: what is right for coefficients beside 1 would hardly move it."""
    model = bert()
    gfsa.plug(model, filter=filter, depth=True)
    for lr in (1e-4, torch.tensor(1e-4), 0.3):
        (group,) = (g for g in gfsa.parameter_groups(model, lr) if g["name"] == "filters")
        assert float(group["lr"]) == pytest.approx(max(rate, float(lr)))


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf"), "1e-3", True])
@pytest.mark.parametrize("name", ["lr", "filter_lr", "weight_decay", "gain_lr"])
def test_rates_of_parameter_groups_are_checked(name: str, value: Any) -> None:
    """An optimizer of torch checks the rates that it is given itself, not those of its groups."""
    model = TinyEncoder()
    gfsa.plug(model)
    with pytest.raises(ValueError, match=rf"^{name} must be a finite number of at least 0, got"):
        gfsa.parameter_groups(model, **{"lr": 1e-3, name: value})


def test_parameter_groups_without_filters_to_train() -> None:
    model = bert()
    for rates in ({}, {"filter_lr": 1e-2}, {"filter_lr": 1e-2, "gain_lr": 1e-2}):
        with pytest.raises(ValueError, match=r"has no filters; gfsa\.plug"):
            gfsa.parameter_groups(model, lr=1e-3, **rates)
    # the plain model to compare with
    groups = gfsa.parameter_groups(model, lr=1e-3, gain_lr=1e-2)
    rates_of = {group["name"]: group["lr"] for group in groups}
    assert rates_of == {"weights": 1e-3, "biases": 1e-2}
    gfsa.plug(model)
    for filter in gfsa.filters_of(model).values():
        filter.requires_grad_(False)
    assert "filters" not in [group["name"] for group in gfsa.parameter_groups(model, lr=1e-4)]
    with pytest.raises(ValueError, match=r"filter_lr=0\.01 has no parameters to act on"):
        gfsa.parameter_groups(model, lr=1e-4, filter_lr=1e-2)


def test_a_cast_after_plug_says_what_is_lost() -> None:
    """Training in half precision loses small steps; evaluation does not train."""
    model = TinyEncoder()
    gfsa.plug(model)
    with pytest.warns(UserWarning, match=r"filters were cast to torch\.bfloat16"):
        model.to(torch.bfloat16)
    gfsa.unplug(model)
    gfsa.plug(model)
    assert all(filter.theta.dtype == torch.float32 for filter in gfsa.filters_of(model).values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval().half()
    with pytest.warns(UserWarning, match=r"filters were cast to torch\.float16"):
        model.train()


def test_filters_that_cannot_learn_are_noticed() -> None:
    with pytest.warns(UserWarning, match="nothing to learn"):
        gfsa.plug(TinyEncoder(), learn=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gfsa.plug(TinyEncoder(), learn=(), w0=0.2)


@pytest.mark.parametrize("clears", ["optimizer", "model"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("compiles", [False, True])
def test_an_optimizer_without_the_filters_is_warned_of_once(
    order: str, clears: str, compiles: bool
) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    early = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gfsa.plug(model)
    optimizer = early if order == "before" else torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model, backend="eager") if compiles else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(30):
            forward(torch.randn(2, 4, 8)).square().sum().backward()
            optimizer.step()
            (optimizer if clears == "optimizer" else model).zero_grad()
    told = [str(w.message) for w in caught if "no filter has" in str(w.message)]
    assert len(told) == (order == "before")
    assert not any(f.theta._post_accumulate_grad_hooks for f in gfsa.filters_of(model).values())


def test_no_warning_while_gradients_accumulate_or_filters_have_none(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.body(x)
            y: Tensor = self.head(x)
            return y

    probe = Probe()
    gfsa.plug(probe)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    accumulating = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    gfsa.plug(accumulating)
    steps = torch.optim.SGD(accumulating.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(40):
            probe(torch.randn(2, 4, 8)).sum().backward()
            optimizer.step()
            accumulating(torch.randn(2, 4, 8)).sum().backward()
        steps.step()
    assert not [w for w in recwarn if "no filter has" in str(w.message)]


def test_previews(tmp_path):
    report = gfsa.plug(build("deit_small_patch16_224"), learn=("wK",), dry_run=True)
    assert report.dry_run
    assert len(report.plugged) == 12
    assert report.parameters == 72
    assert len(gfsa.plug(build("bert")).plugged) == 12
    hf.BertConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    assert len(gfsa.plug(build(str(tmp_path))).plugged) == 3
    assert all(p.is_meta for p in build("gpt2").parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deit_small_patch16_225", r"nothing is downloaded.*deit_small_patch16_224"),
        ("esm", "no model can be built from the default config of 'esm'"),
        ("longformer", "kept in bands or blocks"),
    ],
)
def test_names_without_a_preview(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gfsa.plug(build(name), dry_run=True)


def test_on_the_command_line():
    shown = CliRunner().invoke(build_cli(), ["info", "cait_xxs24_224"])
    assert shown.exit_code == 0
    assert "would plug 24 layers" in shown.output
    assert "blocks.0.attn: 4 heads, tracer, known class" in shown.output
    assert "class attention has one query" in shown.output
    assert (
        "tracer" in CliRunner().invoke(build_cli(), ["info", "tiny_vit_5m_224", "--trace"]).output
    )
    for arguments in (["xcit_nano_12_p8_224"], ["no_such_model"]):
        refused = CliRunner().invoke(build_cli(), ["info", *arguments])
        assert refused.exit_code != 0


def test_a_folder_that_has_filters_already_says_so(tmp_path):
    config = hf.BertConfig(**{**SMALL, "num_hidden_layers": 1})
    config.save_pretrained(tmp_path)
    for plugged in (None, False, True):
        if plugged is not None:
            model = hf.BertModel(config)
            if plugged:
                gfsa.plug(model)
            model.save_pretrained(tmp_path)
        shown = CliRunner().invoke(build_cli(), ["info", str(tmp_path)])
        assert shown.exit_code == 0
        assert "would plug 1 layer," in shown.output
        assert ("has filters already" in shown.output) == bool(plugged)


def test_a_report_in_place_of_the_model_says_so() -> None:
    report: Any = gfsa.plug(bert())
    assert copy.deepcopy(report) == report
    uses = (
        lambda: report(1),
        lambda: report.train(),
        lambda: report.parameters(),
        lambda: gfsa.unplug(report),
    )
    for use in uses:
        with pytest.raises((TypeError, AttributeError), match="in place and returns a report"):
            use()
