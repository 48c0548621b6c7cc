r"""A filter on vLLM's paged attention: one attention layer of vLLM for each power.

.. math:: u_0 = v, \qquad u_{k+1} = A\,u_k, \qquad y = \sum_k c_k\,u_k - a\,p\,v

(the last term only for a filter with a share a of the exclusive term).

The first layer has the keys and values of the model. Each further layer has the same keys, and the
power before it as its values: to vLLM it is an ordinary layer, so its cache is paged, shared by
prefixes, chunked, sharded and rolled back like any other. That is exact, because under a causal
mask the powers of past tokens never change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention

from gfsa.filters import GraphFilter
from gfsa.filters.spec import EXTRA, is_same_filter, read_description, shown
from gfsa.operators.operator import combine


class ServedFilter(nn.Module):
    """The coefficients of one layer's filter, for the heads of this process.

    They are computed once for all heads, as the plugged model does, from the part of the checkpoint
    that vLLM gives to this module (:meth:`load_weights`).

    Args:
        filter: as described in the checkpoint, without its learned numbers.
        heads: the first head of this process, and how many it has.
        layer: the layer's name in vLLM's model, for errors.
    """

    coefficients: Tensor
    share: Tensor | None

    def __init__(self, filter: GraphFilter, heads: tuple[int, int], layer: str) -> None:
        super().__init__()
        # not a child: its numbers are not parameters of vLLM's model
        self.__dict__["filter"] = filter
        self.heads = heads
        self.layer = layer
        self.is_loaded = filter.theta is None
        here = torch.empty(0).device
        coefficients, share = self._own()
        self.register_buffer("coefficients", coefficients.to(here), persistent=False)
        self.register_buffer("share", None if share is None else share.to(here), persistent=False)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take θ and compare the description with the one that this filter was built from."""
        filter: GraphFilter = self.__dict__["filter"]
        loaded = set()
        for name, tensor in weights:
            if name == EXTRA:
                found, own = read_description(tensor), filter.describe()
                if not is_same_filter(found, own):
                    raise ValueError(
                        f"{self.layer} is served with a filter {shown(own)}, the new weights have "
                        f"{shown(found)}; start vLLM again to serve another filter"
                    )
            elif name == "theta" and filter.theta is not None:
                shape = tuple(filter.theta.shape)
                if tensor.shape != shape or not tensor.is_floating_point():
                    raise ValueError(
                        f"θ of {self.layer} should be floating point of shape {shape}, got "
                        f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                    )
                if not bool(torch.isfinite(tensor).all()):
                    raise ValueError(f"θ of {self.layer} has values that are not finite")
                filter.theta.copy_(tensor)
                self.is_loaded = True
            else:
                raise ValueError(
                    f"the checkpoint has {name!r:.80} for the filter of {self.layer}, expected "
                    f"{'theta, ' if filter.theta is not None else ''}{EXTRA}"
                )
            loaded.add(name)
        coefficients, share = self._own()
        self.coefficients.copy_(coefficients)
        if self.share is not None and share is not None:
            self.share.copy_(share)
        return loaded

    def _own(self) -> tuple[Tensor, Tensor | None]:
        """The coefficients and the share of the exclusive term of this process's heads."""
        filter: GraphFilter = self.__dict__["filter"]
        coefficients, share = filter.coefficients().detach(), filter.share()
        if share is not None:
            share = share.detach().narrow(0, *self.heads).clone()
            # the exclusive term needs A·v, even where no power of A has a coefficient
            missing = max(0, 2 - coefficients.shape[-1])
            coefficients = nn.functional.pad(coefficients, (0, missing))
        return coefficients.narrow(0, *self.heads).clone(), share


class FilteredAttention(nn.Module):
    """Takes the place of a vLLM attention layer, and returns the filtered tokens.

    Args:
        passes: the layer itself, then one for each further power, with a key head per query head.
        filter: of the layer's heads.
    """

    def __init__(self, passes: Iterable[Attention], filter: ServedFilter) -> None:
        super().__init__()
        self.passes = nn.ModuleList(passes)
        self.filter = filter
        first: Any = self.passes[0]
        self.num_heads: int = first.num_heads
        self.num_kv_heads: int = first.num_kv_heads
        # vLLM asks for it where a model has attention sinks
        self.has_sink: bool = first.has_sink

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``(tokens, heads · head size)`` each; fewer heads of keys and values in groups."""
        coefficients = self.filter.coefficients
        powers = [self._of_all_heads(value)]
        degree = coefficients.shape[-1] - 1
        if degree > 0:
            powers.append(self.passes[0](query, key, value))
        if degree > 1:
            key = self._of_all_heads(key)
            for further in self.passes[1:]:
                powers.append(further(query, key, powers[-1]))
        tokens = query.shape[0]
        # one token per row: the heads are the last but two axes, as in every operator
        powers = [u.view(tokens, self.num_heads, 1, -1) for u in powers]
        y = combine(coefficients, powers, exclusive=self.filter.share)
        return y.view(tokens, -1)

    def _of_all_heads(self, x: Tensor) -> Tensor:
        """Repeat heads of keys or values for the queries of their group."""
        heads = x.unflatten(-1, (self.num_kv_heads, -1))
        return heads.repeat_interleave(self.num_heads // self.num_kv_heads, 1).flatten(1)
