"""Masks as models hand them over reach the kernels for short sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import gfsa  # noqa: E402
from gfsa.kernels import op, routes, short  # noqa: E402
from support.nothing_launched import nothing_launched  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "attention_probs_dropout_prob": 0.0,
}


def models() -> dict[str, Any]:
    hf = transformers
    return {
        "bert": hf.BertModel(hf.BertConfig(**SMALL)),
        "roberta": hf.RobertaModel(hf.RobertaConfig(**SMALL, max_position_embeddings=60)),
        "bert decoder": hf.BertLMHeadModel(hf.BertConfig(**SMALL, is_decoder=True)),
        "gpt2": hf.GPT2Model(
            hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0)
        ),
    }


@pytest.mark.parametrize("name", ["bert", "roberta", "bert decoder", "gpt2"])
def test_padded_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask that arrives hides what the model hides: padding, and the future if it decodes."""
    model = models()[name].train()
    gfsa.plug(model)
    seen: list[torch.Tensor] = []
    causal: list[bool] = []
    attend = op.filter_attention

    def note(*args: Any) -> Any:
        causal.append(args[6].is_causal)
        return attend(*args)

    def forward(tiles: Any, pointers: Any, mask: Any, *_: Any) -> Any:
        seen.append(mask.expand(2, 1, 9, 9))
        q, *_ = tiles
        return torch.zeros_like(q), torch.zeros_like(q), q.new_zeros(q.shape[:3])

    monkeypatch.setattr(short, "_FORWARD", forward)
    monkeypatch.setattr(op, "filter_attention", note)
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    with nothing_launched(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.randint(3, 50, (2, 9)), attention_mask=real, use_cache=False)
    expected = real.bool()[:, None, None].expand(2, 1, 9, 9)
    # a key mask, and causality by the kernel
    assert causal == [name in ("bert decoder", "gpt2")] * 2
    assert len(seen) == 2
    for mask in seen:
        assert torch.equal(mask, expected)


def mistral(window: int, **sizes: int) -> Any:
    small = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": window}
    return transformers.MistralModel(transformers.MistralConfig(**small | heads | sizes))


@pytest.mark.parametrize("K", [3, None])
def test_packed_rows_of_a_decoder_reach_the_kernels_as_spans(
    K: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window and documents of 4, 2 and 3 tokens: both layers get the same few numbers."""
    model = mistral(3, num_hidden_layers=2).train()
    gfsa.plug(model, K=K)
    masks: list[torch.Tensor] = []
    attend = op.filter_attention

    def note(*args: Any) -> Any:
        masks.append(args[4])
        assert args[6].is_causal
        return attend(*args)

    monkeypatch.setattr(op, "filter_attention", note)
    # rows of nine tokens stand for long ones, which were measured
    monkeypatch.setattr(routes, "SHORT_LENGTH", 8)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    ids = torch.randint(3, 50, (1, 9))
    with nothing_launched(), torch.autocast("cpu", torch.bfloat16):
        model(
            input_ids=ids, position_ids=places, use_cache=False
        ).last_hidden_state.sum().backward()
    first, last = [0, 0, 0, 1, 4, 4, 6, 6, 6], [2, 3, 3, 3, 5, 5, 8, 8, 8]
    assert masks[0].tolist() == [[first, last]]
    assert masks[1] is masks[0]


@pytest.mark.parametrize("K", [3, None])
@pytest.mark.parametrize(("kind", "length", "layers"), [("bert", 9, 2), ("window", 304, 1)])
def test_a_compiled_model_keeps_the_kernels_in_its_graph(
    kind: str, length: int, layers: int, K: int | None
) -> None:
    """What auto chooses on a Hopper GPU, compiled: one operator a layer, forward and backward.

    A window has no mask by rows beside torch's attention.
    """
    if kind == "bert":
        model = models()["bert"].train()
    else:
        model = mistral(100, hidden_size=128, head_dim=64, num_hidden_layers=layers).train()
    gfsa.plug(model, K=K)
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with nothing_launched(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
        ids = torch.randint(3, 50, (2, length))
        options = {} if kind == "bert" else {"use_cache": False}
        compiled(input_ids=ids, **options).last_hidden_state.float().sum().backward()
    kernels = [target for target in found if target.startswith("gfsa.")]
    forward, backward = "gfsa.filter_attention.default", "gfsa.filter_attention_backward.default"
    assert kernels == [forward] * layers + [backward] * layers
    assert not any("scaled_dot" in target for target in found)
