"""Small random graphs, and the models of gfsa.models written out in plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from gfsa_experiments.models.attention import Block, SelfAttention

ATOMS, BONDS = 7, 4


def molecule(
    num_nodes: int, extra: int = 0, seed: int = 0, connected: bool = True
) -> SimpleNamespace:
    """A random tree with ``extra`` more bonds, each bond as two edges of one kind."""
    rng = torch.Generator().manual_seed(seed)
    bonds = set()
    for node in range(1, num_nodes):
        if connected or node % 4:
            bonds.add((int(torch.randint(node, (), generator=rng)), node))
    for _ in range(extra):
        a, b = torch.randperm(num_nodes, generator=rng)[:2].sort().values.tolist()
        bonds.add((a, b))
    kinds = torch.randint(BONDS, (len(bonds),), generator=rng)
    pairs = torch.tensor(sorted(bonds), dtype=torch.long).reshape(-1, 2)
    return SimpleNamespace(
        x=torch.randint(ATOMS, (num_nodes, 1), generator=rng),
        edge_index=torch.cat([pairs, pairs.flip(1)]).T.contiguous(),
        edge_attr=torch.cat([kinds, kinds]),
        y=torch.randn(1, generator=rng),
    )


def one_way(graph: SimpleNamespace) -> SimpleNamespace:
    """The same graph with a third of its edges gone, so that some lead one way only."""
    kept = torch.arange(graph.edge_index.shape[1]) % 3 != 0
    edges = {"edge_index": graph.edge_index[:, kept], "edge_attr": graph.edge_attr[kept]}
    return SimpleNamespace(**{**vars(graph), **edges})


def permuted(graph: SimpleNamespace, order: Tensor) -> SimpleNamespace:
    """The same graph, node ``order[i]`` now called i, and its edges shuffled."""
    new_name = torch.argsort(order)
    shuffle = torch.randperm(graph.edge_index.shape[1], generator=torch.Generator().manual_seed(3))
    return SimpleNamespace(
        x=graph.x[order],
        edge_index=new_name[graph.edge_index][:, shuffle],
        edge_attr=graph.edge_attr[shuffle],
        y=graph.y,
    )


def randomise(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """Every parameter and running statistic away from its start, so that none can hide."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.add_(torch.rand_like(buffer))
    return model


def reference_attention(
    attention: SelfAttention,
    x: Tensor,
    map_of: Callable[[Tensor, Tensor, int], Tensor],
    coefficients: Tensor | None = None,
) -> Tensor:
    """One sequence ``(N, dim)`` through attention, head by head, the filter as a matrix H.

    ``map_of(q, k, head)`` gives A, ``(N, N)``.
    """
    dim = x.shape[1]
    size = dim // attention.num_heads
    projected = x @ attention.qkv.weight.T + attention.qkv.bias
    q, k, v = projected[:, :dim], projected[:, dim : 2 * dim], projected[:, 2 * dim :]
    heads = []
    for head in range(attention.num_heads):
        mine = slice(head * size, (head + 1) * size)
        A = map_of(q[:, mine], k[:, mine], head)
        H = A
        if coefficients is not None:
            H = torch.zeros_like(A)
            for power, coefficient in enumerate(coefficients[head]):
                H = H + coefficient * torch.linalg.matrix_power(A, power)
        heads.append(H @ v[:, mine])
    return torch.cat(heads, dim=1) @ attention.out.weight.T + attention.out.bias


def reference_blocks(
    blocks: Sequence[Block] | nn.ModuleList,
    x: Tensor,
    map_of: Callable[[Tensor, Tensor, int], Tensor],
    coefficients: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """One sequence through pre-norm blocks, in evaluation."""
    for number, block in enumerate(blocks):
        filtered = None if coefficients is None else coefficients[number]
        normed = layer_norm(block.attention_norm, x)
        x = x + reference_attention(block.attention, normed, map_of, filtered)
        inner, _, _, outer = block.mlp
        hidden = layer_norm(block.mlp_norm, x) @ inner.weight.T + inner.bias
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        x = x + hidden @ outer.weight.T + outer.bias
    return x


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / scale * norm.weight + norm.bias


def softmax(scores: Tensor) -> Tensor:
    weights = (scores - scores.max(-1, keepdim=True).values).exp()
    return weights / weights.sum(-1, keepdim=True)
