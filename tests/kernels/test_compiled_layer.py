"""What a filter adds to the graph of a compiled layer: small numbers, and no copy of its tokens.

The graphs are those of a training step as AOTAutograd hands them to the compiler of kernels, for a
GPU that is made up.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from functorch.compile import min_cut_rematerialization_partition  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import gfsa  # noqa: E402
from support.nothing_launched import nothing_launched  # noqa: E402

BATCH, HEADS, TOKENS, DIM = 2, 2, 304, 64
# of a tensor of tokens, in elements
SIZE = BATCH * HEADS * TOKENS * DIM
# operations that make no kernel
VIEWS = ("view", "permute", "alias", "expand", "unsqueeze", "squeeze", "slice.", "getitem")


class Traced(NamedTuple):
    forward: fx.Graph
    backward: fx.Graph


def trace(model: Any) -> Traced:
    """The graphs of a training step in bfloat16."""
    found: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        found.append(module.graph)
        return module.forward

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    torch.compiler.reset()
    with nothing_launched(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        ids = torch.randint(3, 50, (BATCH, TOKENS))
        # a second step compiles nothing anew; a cache is filled where the model does so by itself
        for _ in range(2):
            compiled(input_ids=ids).last_hidden_state.float().sum().backward()
    torch.compiler.reset()
    return Traced(*found)


def decoder(kind: str) -> Any:
    """A block with norms and rotations around its attention, or one whose q, k and v are views."""
    width = HEADS * DIM
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=width, n_layer=1, n_head=HEADS, n_positions=TOKENS, attn_pdrop=0.0
        )
        model = transformers.GPT2Model(config)
    else:
        config = transformers.Qwen3Config(
            vocab_size=50,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=DIM,
        )
        model = transformers.Qwen3Model(config)
    return model.train()


def is_attention(node: fx.Node) -> bool:
    return "scaled_dot" in str(node.target) or str(node.target).startswith("gfsa.")


def on_tokens(graph: fx.Graph) -> Counter[str]:
    """What makes tensors of the tokens' size, apart from attention."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        name = str(node.target)
        if value.numel() >= SIZE and not is_attention(node) and not any(v in name for v in VIEWS):
            found[name] += 1
    return found


def saved_bytes(graph: fx.Graph) -> int:
    """What a forward returns: its result, and what it saves for the gradient, without masks."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    values = {node: node.meta["val"] for node in output.args[0] if isinstance(node, fx.Node)}
    # an alias is no memory of its own
    tensors = [v for n, v in values.items() if "alias" not in str(n.target) and hasattr(v, "numel")]
    masks = (TOKENS, TOKENS)
    return sum(v.numel() * v.element_size() for v in tensors if v.shape[-2:] != masks)


@pytest.mark.parametrize(
    ("kind", "K"),
    [
        ("qwen3", 3),
        ("gpt2", None),
        pytest.param("qwen3", None, marks=pytest.mark.slow),
        pytest.param("gpt2", 3, marks=pytest.mark.slow),
    ],
)
def test_a_layer_with_a_filter(kind: str, K: int | None) -> None:
    model = decoder(kind)
    plain = trace(model)
    gfsa.plug(model, K=K)
    plugged = trace(model)
    for graph, reference, operator in (
        (plugged.forward, plain.forward, "gfsa.filter_attention.default"),
        (plugged.backward, plain.backward, "gfsa.filter_attention_backward.default"),
    ):
        (attention,) = filter(is_attention, graph.nodes)
        assert str(attention.target) == operator
        # without filters transformers writes a mask out, with them none
        assert not on_tokens(graph) - on_tokens(reference)
        # what is left are the coefficients: a product, a sum and, forward, base
        assert len(graph.nodes) <= len(reference.nodes) + 10
    # A·V is kept with a second pass, and nothing else of its size
    extra = saved_bytes(plugged.forward) - saved_bytes(plain.forward)
    assert abs(extra - (0 if K is None else SIZE * torch.bfloat16.itemsize)) < 1024
