"""Every comparison method in every family of models: masks, gradients, copies, removal."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from gfsa_experiments import baselines
from support.families import DIM, FAMILIES, HEADS, METHODS, Family
from support.plugging import slow_path


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]()


def disturb(model: nn.Module) -> None:
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in baselines.parameters_of(model):
            parameter.add_(torch.randn(parameter.shape, generator=rng) * 0.5)


def outputs(family: Family, model: nn.Module, samples: list[int]) -> Tensor:
    return torch.cat([y.flatten() for y in family.run(model, samples)])


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("method", METHODS)
def test_method_in_family(method: str, family: Family) -> None:
    name, options = METHODS[method].name, METHODS[method].options
    model = family.model()
    untouched = copy.deepcopy(model)
    if method in family.refuses:
        with pytest.raises(ValueError, match=r"(cannot be applied to|has one filtered layer)"):
            baselines.apply(model, name, **options)
        _check_as_before(model, untouched)
        return
    with slow_path(), torch.no_grad():
        plain = outputs(family, untouched, [0, 1])
    report = baselines.apply(model, name, **options)
    assert len(report.plugged) == family.depth
    assert report.parameters == sum(p.numel() for p in baselines.parameters_of(model))
    _check_start(family, model, name, plain)

    disturb(model)
    with torch.no_grad():
        together = family.run(model, [0, 1])
        alone = [family.run(model, [sample])[0] for sample in (0, 1)]
    assert distance(torch.cat([y.flatten() for y in together]), plain) > 1e-6, "does something"
    for padded, single in zip(together, alone, strict=True):
        assert distance(padded, single) <= family.rounding, "padding must not be seen"

    _check_gradients(family, model)
    _check_copies(family, model, untouched, name, options)
    baselines.remove(model)
    assert not baselines.parameters_of(model)
    _check_as_before(model, untouched)
    with torch.no_grad():
        assert torch.equal(outputs(family, model, [0, 1]), outputs(family, untouched, [0, 1])), (
            "removal restores the outputs"
        )


def _check_start(family: Family, model: nn.Module, name: str, plain: Tensor) -> None:
    with torch.no_grad():
        start = outputs(family, model, [0, 1])
    if baselines.METHODS[name].identity_at_init:
        assert distance(start, plain) <= family.rounding
    else:
        assert distance(start, plain) > 1e-6


def _check_gradients(family: Family, model: nn.Module) -> None:
    model.zero_grad()
    y = outputs(family, model, [0, 1])
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    for parameter in baselines.parameters_of(model):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


@torch.no_grad()
def _check_copies(
    family: Family, model: nn.Module, untouched: nn.Module, name: str, options: dict
) -> None:
    expected = outputs(family, model, [0, 1])
    again = copy.deepcopy(untouched)
    baselines.apply(again, name, **options)
    again.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again):
        assert torch.equal(outputs(family, twin, [0, 1]), expected)
        if baselines.parameters_of(twin):
            disturb(twin)
            assert not torch.equal(outputs(family, twin, [0, 1]), expected), "its own numbers"
        baselines.remove(twin)
        _check_as_before(twin, untouched)
    assert torch.equal(outputs(family, model, [0, 1]), expected)


def _check_as_before(model: nn.Module, untouched: nn.Module) -> None:
    assert list(model.state_dict()) == list(untouched.state_dict())
    modules = dict(untouched.named_modules())
    for name, module in model.named_modules():
        assert type(module) is type(modules[name]), name
        assert not [note for note in module.__dict__ if "gfsa" in note], name
        assert getattr(module, "use_nested_tensor", None) == getattr(
            modules[name], "use_nested_tensor", None
        )
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            assert not getattr(module, hooks), f"{name}.{hooks}"


@pytest.mark.parametrize("layers", ["even", [2], lambda name, module: ".1" in name])
@pytest.mark.parametrize("method", METHODS)
def test_chosen_layers_alone(method: str, layers) -> None:
    family = FAMILIES["BERT"]()
    model = family.model()
    report = baselines.apply(model, METHODS[method].name, layers, **METHODS[method].options)
    acting = [name for name, where in report.plugged.items() if "source" not in where]
    assert len(acting) == 1
    assert ".1" in acting[0]
    assert set(report.skipped.values()) <= {"not among the selected layers"}
    with_method = _block_outputs(family, model)
    baselines.remove(model)
    without = _block_outputs(family, model)
    changed = [not torch.equal(a, b) for a, b in zip(with_method, without, strict=True)]
    expected = (
        [False, False, False] if method in ("attnscale", "featscale") else [False, True, True]
    )
    assert changed == expected


@torch.no_grad()
def _block_outputs(family: Family, model: nn.Module) -> list[Tensor]:
    kept: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda module, args, output: kept.append(output))
        for block in model.encoder.layer
    ]
    family.run(model, [0, 1])
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # BERT-base: 12 layers, 12 heads, 768 wide
        ("attnscale", 12 * 12),
        ("contranorm", 0),
        ("featscale", 12 * 2 * 768),
        ("layerscale", 12 * 2 * 768),
        ("neutreno", 0),
    ],
)
def test_numbers_added_to_bert_base(name: str, count: int) -> None:
    import transformers as hf

    with torch.device("meta"):
        model = hf.BertModel(hf.BertConfig())
    before = sum(p.numel() for p in model.parameters())
    report = baselines.apply(model, name)
    assert report.parameters == count
    assert sum(p.numel() for p in model.parameters()) - before == count
    assert all(p.is_meta for p in baselines.parameters_of(model))


def test_attention_outside_of_known_blocks_is_reported() -> None:
    report = baselines.apply(FAMILIES["CaiT"]().model(), "featscale")
    assert report.skipped == {
        f"blocks_token_only.{number}.attn": "it is in no block that is known" for number in (0, 1)
    }


@pytest.mark.parametrize("name", ["featscale", "layerscale"])
@torch.no_grad()
def test_gps_on_padded_graphs(name: str) -> None:
    from torch_geometric.nn import GINConv

    from gfsa_experiments.tasks.graph.gps import DenseGPSConv

    layer = DenseGPSConv(DIM, GINConv(nn.Linear(DIM, DIM)), HEADS).double().eval()
    report = baselines.apply(layer, name)
    assert report.parameters == 2 * DIM
    disturb(layer)
    x, edges = torch.randn(2, 5, DIM, dtype=torch.float64), torch.tensor([[0, 5], [1, 6]])
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    together = layer(x, edges, padding)
    assert distance(together[1, :3], layer(x[1:, :3], edges[:, :1], padding[1:, :3])[0]) <= 1e-10


def test_conformers_have_four_branches() -> None:
    model = FAMILIES["Conformer"]().model()
    report = baselines.apply(model, "layerscale")
    assert report.parameters == 3 * 4 * DIM
