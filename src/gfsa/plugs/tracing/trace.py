"""Trace the forward of one attention module, and filter its map where it multiplies v.

The map is the result of a softmax over the last axis, followed through every operation that keeps
its size (dropout, casts, masks, mixing of heads) to a product with the values; or a call of torch's
own attention. The axes of queries, keys and values are followed from the module's inputs, so that
what is filtered is attention of tokens to themselves, head by head.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.operators import AttentionOperator, DenseOperator, Operator
from gfsa.plugs.cross_attention import OTHER_SEQUENCE, require_same_tokens
from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing.einsums import keeps_map, operands_of_einsum, product_equations
from gfsa.plugs.tracing.following import AxisFollower
from gfsa.plugs.tracing.layout import HeadLayout
from gfsa.plugs.tracing.maps import MapHistory, Step, with_tensors
from gfsa.plugs.tracing.memory import TraceMemory
from gfsa.plugs.tracing.path import PathRecorder, inputs_of
from gfsa.plugs.tracing.sides import Side, sides_of_map, sides_of_tokens
from gfsa.plugs.tracing.verification import NewPathError, Verifier

# arguments of known classes that may hold the tokens of another sequence
_MAY_BE_OTHER_TOKENS = (*OTHER_SEQUENCE, "key", "memory", "q_global")


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


class Trace(TorchFunctionMode):
    """One forward of one module.

    Args:
        module: the attention module; its filter is ``module.gfsa``.
        name: what to call it in errors.
        memory: what earlier forwards have shown.
        follow: whether to follow the axes of the inputs. If not, the forward must take a path that
            has been verified, or :class:`NewPathError` is raised.
        wants_maps: whether attention weights that the module returns are looked at.
    """

    def __init__(
        self, module: nn.Module, name: str, memory: TraceMemory, follow: bool, wants_maps: bool
    ) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self.memory = memory
        self.follower = AxisFollower() if follow else None
        self.wants_maps = wants_maps
        self.filter: GraphFilter = module.gfsa  # type: ignore[assignment]
        self.inputs: dict[str, Tensor] = {}
        self.recorder = PathRecorder()
        self.verifier = Verifier(
            module, self.filter.num_heads, memory, self.recorder, self.follower
        )
        self.history = MapHistory()
        self.undropped: Tensor | None = None
        self.dropout_p = 0.0
        self.products = 0
        self.error: BaseException | None = None
        self.layout: HeadLayout | None = None
        self.handles: list[RemovableHandle] = []
        # the map that multiplied the values, with its heads apart, and its shape there
        self.filtered: tuple[Step, Tensor, torch.Size] | None = None

    def begin(self, given: Mapping[str, Any]) -> None:
        """Read the arguments of the forward, by name, before it runs."""
        self.inputs = inputs_of(given)
        self.recorder.start(self.inputs, given)
        if self.memory.known:
            self._require_same_tokens(given)
        if self.memory.known or torch.compiler.is_compiling():
            return
        linear = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        # quantised layers may compute out of torch's sight
        own = [layer for layer in linear if type(layer).forward is not nn.Linear.forward]
        self.handles = [layer.register_forward_hook(self._note_layer) for layer in own]
        if self.follower is not None:
            for name, x in self.inputs.items():
                self.follower.start(name, x)
            self.handles += [
                layer.register_forward_hook(self.follower.note_linear) for layer in linear
            ]

    def _note_layer(self, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if not self.products:
            self.recorder.note(type(layer), args, {})
            self.recorder.number_results(result)

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if error[0] is not None:
            # on its way to the caller; kept here, it would keep the tensors of the forward
            self.error = None
        super().__exit__(*error)

    def _require_same_tokens(self, given: Mapping[str, Any]) -> None:
        """Refuse another sequence by the name of its argument, where axes are not followed."""
        tokens = next(iter(self.inputs.values()), None)
        for name in _MAY_BE_OTHER_TOKENS:
            other = given.get(name)
            if isinstance(other, Tensor) and tokens is not None:
                require_same_tokens(self.module, tokens, other)

    def end(self, result: Any) -> Any:
        """Check the forward after it ran; returns its result, with H where it has A."""
        if self.error is not None:
            # the module caught it
            raise self.error
        if not self.products:
            self._refuse(
                "its forward has no product of a softmax with values that torch dispatches (a "
                "softmax written out, a softmax over another axis, or an extension of its own)"
            )
        if self.filtered is None:
            return result
        return with_tensors(result, self._filtered_map)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.products or self.memory.known or torch.compiler.is_compiling():
            return self._dispatch(func, args, kwargs)
        self.recorder.note(func, args, kwargs)
        result = self._dispatch(func, args, kwargs)
        self.recorder.number_results(result)
        return result

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func in ops.SOFTMAX:
            result = self._run(func, args, kwargs)
            axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if axis in (-1, result.dim() - 1):
                self.history.start(result)
            return result
        if not self._takes_map(func, args, kwargs):
            if func in ops.MAP_PRODUCTS and any(self.history.find(x) for x in args):
                # as for values that depend on the distance, or for a column that is a sink
                self._refuse(
                    "a product takes a part or a sum of its map, and the filter needs all of it"
                )
            return self._run_and_follow(func, args, kwargs)
        if func in ops.DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in ops.MATMUL:
            return self._written(self._product(*ops.operands_of(args, kwargs)[:2]), kwargs)
        if func in ops.ADDED_MATMUL:
            return self._written(self._added_product(args, kwargs), kwargs)
        if func is torch.einsum:
            return self._einsum(args)
        return self._run_and_follow(func, args, kwargs)

    def _takes_map(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether one of the arguments of an operation is an attention map."""
        if not self.history.steps:
            return False
        operands = (*args, *kwargs.values())
        if func is torch.einsum:
            operands = (*operands, *operands_of_einsum(args))
        return self.history.find_map(*operands) is not None

    def _run_and_follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._run(func, args, kwargs)
        self.history.follow(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self.follower is not None and not self.products:
            self.follower.note(func, args, kwargs, result)
        return result

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        # F.dropout calls the argument training, torch.dropout train
        if not (training if train is None else train) or not p:
            return input
        self.undropped = input.clone() if inplace and not self.memory.rows_checked else input
        if self.filter.dropout_after == "filter":
            self.dropout_p = p
            return input
        dropped: Tensor = self._run(F.dropout, (input, p, True, inplace), {})
        self.history.follow(F.dropout, (input, p), {}, dropped)
        return dropped

    def _product(self, left: Any, right: Any) -> Tensor:
        step = self.history.find_map(left)
        if step is not None:
            return self._filter_map(step, left, right)
        step = self.history.find_map(right)
        assert step is not None
        # y = v·Aᵀ with tokens as columns
        y = self._filter_map(step, self._turned(right), self._turned(left))
        return y.transpose(-2, -1)

    def _turned(self, x: Tensor) -> Tensor:
        turned: Tensor = self._run_and_follow(torch.transpose, (x, -2, -1), {})
        return turned

    def _added_product(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """``beta·input + alpha·(left @ right)``."""
        added, left, right = ops.operands_of(args, kwargs)[:3]
        if self.history.find_map(left, right) is None:
            self._refuse("its map is added to a product")
        y = kwargs.get("alpha", 1) * self._product(left, right)
        beta = kwargs.get("beta", 1)
        return y + beta * added if beta else y

    def _written(self, y: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The product, in the tensor that the caller passed as ``out=``, if any."""
        out = kwargs.get("out")
        if out is None:
            return y
        if out.shape != y.shape:
            out.resize_(y.shape)
        out.copy_(y)
        written: Tensor = out
        return written

    def _einsum(self, args: tuple[Any, ...]) -> Tensor:
        equation, operands = args[0], operands_of_einsum(args)
        if not isinstance(equation, str):
            # torch writes an equation for axes by number before it dispatches, its compiler after
            self._refuse("its map is in an einsum without an equation")
        place = next(i for i, x in enumerate(operands) if self.history.find_map(x) is not None)
        step = self.history.find_map(operands[place])
        assert step is not None
        if keeps_map(equation, place):
            # the einsum mixes heads: its result is still a map
            mixed: Tensor = self._run(torch.einsum, args, {})
            self.history.follow(torch.einsum, (equation, *operands), {}, mixed)
            return mixed
        equations = product_equations(equation, place)
        if equations is None:
            self._refuse(f"its map is in an einsum that is not understood: {equation!r}")
        values = self._run(torch.einsum, (equations.values, operands[1 - place]), {})
        y = self._filter_map(step, operands[place], values)
        return torch.einsum(equations.result, y)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        lead = query.shape[:-2]
        if not enable_gqa:
            # torch broadcasts here: multi-query attention has one head of keys and values
            lead = torch.broadcast_shapes(lead, key.shape[:-2], value.shape[:-2])
        rows, columns = (sides_of_tokens(self._origins(x)) for x in (query, key))
        self._check((*lead, query.shape[-2], key.shape[-2]), rows, columns, value)
        assert self.layout is not None
        layout, heads = self.layout, self.filter.num_heads
        if not enable_gqa:
            query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
        dims, shape = query.dim(), query.shape
        query, key, value = (layout.split(x, heads) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = layout.split(attn_mask[(None,) * (dims - attn_mask.dim())], heads)
        operator = AttentionOperator(
            query,
            key,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            dropout_after=self.filter.dropout_after,
        )
        return layout.join(self._filter(operator, value), heads, shape)

    def _filter_map(self, step: Step, matrix: Tensor, values: Tensor) -> Tensor:
        rows, columns = sides_of_map(self._origins(matrix))
        # a product broadcasts: multi-query attention has one head of values
        lead = torch.broadcast_shapes(matrix.shape[:-2], values.shape[:-2])
        self._check((*lead, *matrix.shape[-2:]), rows, columns, values)
        assert self.layout is not None
        layout, heads = self.layout, self.filter.num_heads
        if not self.memory.rows_checked:
            self._check_rows(matrix if self.undropped is None else self.undropped)
        of_map = matrix
        matrix, values = (x.expand(*lead, *x.shape[-2:]) for x in (matrix, values))
        shape = values.shape
        split = layout.split(matrix, heads)
        operator = DenseOperator(split, self.dropout_p, self.filter.dropout_after)
        y = layout.join(self._filter(operator, layout.split(values, heads)), heads, shape)
        if self.wants_maps:
            self.filtered = self.history.find(of_map) or step, split, matrix.shape
        return y

    def _filter(self, operator: Operator, values: Tensor) -> Tensor:
        y: Tensor = self.filter(operator, values)
        return y

    def _origins(self, x: Tensor) -> Any:
        return self.follower.of(x) if self.follower is not None else ()

    def _check(
        self, scores: Sequence[int], rows: list[Side], columns: list[Side], values: Tensor
    ) -> None:
        """Refuse a map that is not tokens × tokens, and find its axis of heads."""
        self.products += 1
        if self.products > 1:
            self._refuse("its forward has more than one attention product")
        try:
            layout = self.verifier.layout(scores, rows, columns, values, self.inputs)
        except (NewPathError, ValueError) as error:
            self.error = error
            raise
        if isinstance(layout, str):
            self._refuse(layout)
        self.layout = layout

    def _filtered_map(self, x: Tensor) -> Tensor:
        """H in place of ``x``, if that is an attention map that the module returns."""
        assert self.filtered is not None
        assert self.layout is not None
        own = self.history.find(x)
        if own is None:
            return x
        # built here, because H costs a product of maps and few modules return them
        step, split, shape = self.filtered
        new = self.filter.map(DenseOperator(split)).to(split.dtype)
        new = self.layout.join(new, self.filter.num_heads, shape)
        returned = None
        if new.shape == step.tensor.shape:
            returned = self.history.transfer(new, step, own)
        if returned is None:
            self._refuse(
                "it returns attention weights that are not the map that multiplies its values, so "
                "there is no filtered map in their place. Do not ask it for attention weights"
            )
        return returned.to(x.dtype)

    def _check_rows(self, matrix: Tensor) -> None:
        if torch.compiler.is_compiling() or matrix.is_meta:
            return
        self.memory.rows_checked = True
        sums = matrix.detach().sum(-1, dtype=torch.float32)
        # a fully masked row may be zeros
        off = torch.where(sums == 0, 0.0, (sums - 1).abs())
        if bool((off > 1e-2).any()):
            warnings.warn(
                f"the rows of the attention map of {self.name} do not sum to one (by up to "
                f"{off.max().item():.3g}); the filter uses the map as it is",
                stacklevel=2,
            )

    def _kind(self) -> str:
        # the class of a traced module is made for it; users know the one that it was
        kind: type = self.module.__dict__.get("_gfsa_class", type(self.module))
        return kind.__name__

    def _refuse(self, why: str) -> NoReturn:
        self.error = TraceError(
            f"cannot filter {self.name} ({self._kind()}) by tracing: {why}. "
            "gfsa.unplug(model), then plug(..., inputs=batch), which leaves out the layers that it "
            "cannot filter, or plug(..., layers=...) without this one; or teach gfsa its class "
            "with gfsa.register_adapter"
        )
        raise self.error
