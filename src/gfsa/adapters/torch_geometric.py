"""PyTorch Geometric: linear attention is refused; ``GPSConv`` holds torch's attention."""

from __future__ import annotations

from torch import nn

from gfsa.plugs.adapter import Adapter

_REASONS = {
    "PerformerAttention": "Performer's map is that of random features, redrawn as it trains",
    "SGFormerAttention": "SGFormer's map of normalised queries and keys has a residual built in",
    "PolynormerAttention": "Polynormer's map of sigmoids is followed by a norm and a gate",
}


class LinearAttentionAdapter(Adapter):
    """Refuses linear attention, except Efficient Attention, whose powers gfsa can compute."""

    def num_heads(self, module: nn.Module) -> int:
        raise TypeError(self.refusal("", module))

    def refusal(self, name: str, module: nn.Module) -> str | None:
        return (
            f"linear attention: {_REASONS[type(module).__name__]}; gfsa computes powers of softmax "
            "and of Efficient Attention (gfsa.linear_graph_filter_attention)"
        )

    def install(self, module: nn.Module) -> None:
        raise TypeError(self.refusal("", module))

    def remove(self, module: nn.Module) -> None:
        raise TypeError(self.refusal("", module))


LINEAR_ATTENTION = LinearAttentionAdapter()


def find(module: nn.Module) -> Adapter | None:
    """The adapter for ``module`` if it is an attention module of PyG."""
    kind = type(module)
    known = kind.__module__.startswith("torch_geometric.") and kind.__name__ in _REASONS
    return LINEAR_ATTENTION if known else None
