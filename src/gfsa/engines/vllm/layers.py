r"""A filter on vLLM's paged attention: one attention layer of vLLM for each power.

.. math:: u_0 = v, \qquad u_{k+1} = A\,u_k, \qquad y = \sum_k c_k\,u_k - a\,p\,v

(the last term only for a filter with a share a of the exclusive term).

The first layer has the keys and values of the model. Each further layer has the same keys, and the
power before it as its values: to vLLM it is an ordinary layer, so its cache is paged, shared by
prefixes, chunked, sharded and rolled back like any other. That is exact, because under a causal
mask the powers of past tokens never change.

With a depth term v is ``v + r·V⁰``, and that is what the cache holds. V⁰ of the tokens of a step is
made by the first filtered layer in the same step.
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


class FirstValues:
    """V⁰ of the present step, from the first filtered layer to those with a depth term."""

    values: Tensor | None = None


class ServedFilter(nn.Module):
    """The numbers of one layer's filter, for the heads of this process.

    They are computed once for all heads, as the plugged model does, from the part of the checkpoint
    that vLLM gives to this module (:meth:`load_weights`).

    Args:
        filter: as described in the checkpoint, without its learned numbers.
        heads: the first head of this process, and how many it has.
        key_heads: how many of its keys and values.
        group: query heads that share one of them, other processes' included.
        layer: the layer's name in vLLM's model, for errors.
    """

    coefficients: Tensor
    share: Tensor | None
    r: Tensor | None
    """Of the depth term, for each head of values."""

    def __init__(
        self, filter: GraphFilter, heads: tuple[int, int], key_heads: int, group: int, layer: str
    ) -> None:
        super().__init__()
        # not a child: its numbers are not parameters of vLLM's model
        self.__dict__["filter"] = filter
        self.heads = heads
        self.key_heads = heads[0] // group, key_heads
        self.group = group
        self.layer = layer
        self.is_loaded = filter.theta is None
        here = torch.empty(0).device
        for name, numbers in self._own().items():
            own = None if numbers is None else numbers.to(here)
            self.register_buffer(name, own, persistent=False)

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
        for name, numbers in self._own().items():
            if numbers is not None:
                getattr(self, name).copy_(numbers)
        return loaded

    @torch.no_grad()
    def _own(self) -> dict[str, Tensor | None]:
        """The coefficients, and the exclusive and depth terms', of this process's heads."""
        filter: GraphFilter = self.__dict__["filter"]
        coefficients, share, r = filter.coefficients().detach(), filter.share(), filter.depth()
        if share is not None:
            share = share.detach().narrow(0, *self.heads).clone()
            # the exclusive term needs A·v, even where no power of A has a coefficient
            missing = max(0, 2 - coefficients.shape[-1])
            coefficients = nn.functional.pad(coefficients, (0, missing))
        if r is not None:
            # heads that share values use the mean of their r, as in the plugged model
            r = r.detach().view(-1, self.group).mean(-1).narrow(0, *self.key_heads)
        return {"coefficients": coefficients.narrow(0, *self.heads).clone(), "share": share, "r": r}


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
        self.first_values: FirstValues | None = None
        # whether no layer after this one needs V⁰
        self.is_last = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``(tokens, heads · head size)`` each; fewer heads of keys and values in groups."""
        coefficients = self.filter.coefficients
        value = self._with_depth(value)
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

    def _with_depth(self, value: Tensor) -> Tensor:
        stack, r = self.first_values, self.filter.r
        if stack is None:
            return value
        if r is None:
            stack.values = value
            return value
        assert stack.values is not None
        own, first = (x.unflatten(-1, (self.num_kv_heads, -1)) for x in (value, stack.values))
        if self.is_last:
            stack.values = None
        return torch.addcmul(own, r[:, None], first).to(value.dtype).flatten(1)

    def _of_all_heads(self, x: Tensor) -> Tensor:
        """Repeat heads of keys or values for the queries of their group."""
        heads = x.unflatten(-1, (self.num_kv_heads, -1))
        return heads.repeat_interleave(self.num_heads // self.num_kv_heads, 1).flatten(1)
