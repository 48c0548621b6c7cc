"""diagnose on models of other libraries: features against the hidden states they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gfsa
from gfsa.lens import diagnose, measure
from support.graphs import ATOMS, BONDS, molecule
from support.lens_readings import only

IDS = torch.arange(30).reshape(3, 10) % 17
MASK = torch.arange(10) < torch.tensor([[10], [6], [8]])


def cosines(states: list[Tensor], mask: Tensor | None) -> list[float]:
    return [measure.cosine_similarity(x, mask).mean().item() for x in states]


def transformers_model(kind: str, implementation: str = "sdpa") -> Any:
    import transformers as hf

    small = {
        "vocab_size": 31,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = {
        "bert": lambda: hf.BertConfig(**small),
        "albert": lambda: hf.AlbertConfig(**small, embedding_size=16),
        "llama": lambda: hf.LlamaConfig(**small, num_key_value_heads=2),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=31, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
        ),
    }[kind]()
    config.initializer_range = 0.5
    return hf.AutoModel.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "albert", "llama", "gpt2"])
@pytest.mark.parametrize("plugged", [False, True])
def test_transformers(kind: str, implementation: str, plugged: bool) -> None:
    model = transformers_model(kind, implementation)
    batch = {"input_ids": IDS, "attention_mask": MASK.flip(1) if kind == "llama" else MASK}
    batch["attention_mask"] = batch["attention_mask"].long()
    if plugged:
        gfsa.plug(model, w0=0.2, wK=0.3)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    reading = only(diagnose(model, batch))
    expected = cosines(list(states), batch["attention_mask"].bool())
    got = [feature.cosine for feature in reading.features]
    assert len(got) == 4
    # decoders report their last features after the final norm
    last = 3 if kind in ("llama", "gpt2") else 4
    assert got[:last] == pytest.approx(expected[:last], abs=1e-5)
    assert reading.tokens == int(MASK.sum())
    assert bool(gfsa.filters_of(model)) == plugged


@pytest.mark.parametrize("batch_first", [False, True])
def test_as_many_samples_as_tokens(batch_first: bool) -> None:
    """Where sizes are ambiguous, the module's batch_first says which axis is the batch."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    tokens = torch.randn(6, 6, 16)
    reading = only(diagnose(model, tokens))
    expected = measure.cosine_similarity(tokens if batch_first else tokens.transpose(0, 1))
    assert reading.features[0].cosine == pytest.approx(expected.mean().item(), abs=1e-6)


def test_graphs_whose_tokens_lie_one_after_another() -> None:
    """PyG's GPS layers: features of all graphs in one list, attention on padded graphs."""
    geometric = pytest.importorskip("torch_geometric.nn")

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(geometric.GPSConv(16, None, heads=4) for _ in range(2))

        def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edges, batch)
            return x

    counts = [5, 3, 7]
    x = torch.randn(sum(counts), 16)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    model = Graphs().eval()
    reading = only(diagnose(model, (x, torch.zeros(2, 0, dtype=torch.long), batch)))
    parts = [measure.cosine_similarity(part[None]) for part in x.split(counts)]
    assert reading.samples == 3
    assert reading.features[0].cosine == pytest.approx(torch.cat(parts).mean().item(), abs=1e-6)
    assert len(reading.features) == 3


@pytest.mark.parametrize("attention", ["softmax", "efficient"])
def test_our_encoder(attention: Any) -> None:
    from gfsa_experiments.models import Encoder

    model = Encoder(17, 2, 10, attention, dim=16, depth=2, num_heads=4, ffn_dim=16)
    gfsa.plug(model, w0=0.2)
    reading = only(diagnose(model, (IDS, ~MASK)))
    # a class token for each of three samples
    assert (reading.samples, reading.tokens) == (3, int(MASK.sum()) + 3)
    alone = [only(diagnose(model, ids[mask][None])) for ids, mask in zip(IDS, MASK, strict=True)]
    for name in ("cosine", "residual"):
        parts = [getattr(reading_alone.features[-1], name) for reading_alone in alone]
        assert getattr(reading.features[-1], name) == pytest.approx(sum(parts) / 3, rel=1e-4)
    parts = torch.tensor([reading_alone.attention[-1].entropy for reading_alone in alone]).mean(0)
    torch.testing.assert_close(torch.tensor(reading.attention[-1].entropy), parts)


def graphormer() -> tuple[nn.Module, Any]:
    from gfsa_experiments.models import Graphormer, GraphormerCollator

    model = Graphormer((ATOMS,), (BONDS,), dim=12, depth=3, num_heads=3, ffn_dim=12)
    return model, GraphormerCollator()


def graph_vit() -> tuple[nn.Module, Any]:
    from gfsa_experiments.models import GraphViT, GraphViTCollator

    return GraphViT((ATOMS,), (BONDS,), dim=12, num_heads=3, gnn_depth=1), GraphViTCollator(4)


@pytest.mark.parametrize("build", [graphormer, graph_vit])
def test_our_graph_models(build: Any) -> None:
    """Together, with padding, as one by one."""
    graphs = [molecule(9, 3), molecule(6, 1, seed=1), molecule(12, seed=2)]
    model, collate = build()
    reading = only(diagnose(model, collate(graphs)))
    alone = [only(diagnose(model, collate([graph]))) for graph in graphs]
    assert reading.samples == 3
    assert reading.tokens == sum(reading_alone.tokens for reading_alone in alone)
    assert len(reading.features) == len(reading.attention) + 1
    for depth, feature in enumerate(reading.features):
        parts = [reading_alone.features[depth].cosine for reading_alone in alone]
        assert feature.cosine == pytest.approx(sum(parts) / 3, abs=1e-4)


def test_windows_of_a_grid() -> None:
    """Swin attends within windows; its features are the whole grid's."""
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        depths=(1, 2),
        embed_dim=24,
        num_heads=(1, 2),
        img_size=56,
    ).eval()
    states: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda module, args, output: states.append(output.detach()))
        for stage in model.layers
        for block in stage.blocks
    ]
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    reading = only(diagnose(model, images))
    # a stage of one block ends where its only block does; the next begins by merging patches
    expected = cosines([state.flatten(1, 2) for state in states], None)
    assert [feature.cosine for feature in reading.features[1:]] == pytest.approx(expected, abs=1e-5)
    assert [len(layer.entropy) for layer in reading.attention] == [1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = transformers_model("bert")
    batch = {"input_ids": IDS, "attention_mask": MASK.long()}
    single = only(diagnose(model, batch))
    other = only(diagnose(model.to(dtype), batch))
    for one, two in zip(single.features, other.features, strict=True):
        assert one.cosine == pytest.approx(two.cosine, abs=0.02)
        assert one.effective_rank == pytest.approx(two.effective_rank, rel=0.02)
    for layer, same in zip(single.attention, other.attention, strict=True):
        assert layer.entropy_share == pytest.approx(same.entropy_share, abs=0.05)
        for row, again in zip(layer.spectrum.map_response, same.spectrum.map_response, strict=True):
            assert row == pytest.approx(again, abs=0.05)
