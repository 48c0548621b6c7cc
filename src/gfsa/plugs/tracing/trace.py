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
from gfsa.plugs.cross_attention import require_same_tokens
from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing.following import AxisFollower
from gfsa.plugs.tracing.layout import (
    HeadLayout,
    SelfAttention,
    Side,
    Verified,
    find_heads,
    settled,
    sides_of_map,
    sides_of_tokens,
)
from gfsa.plugs.tracing.maps import MapHistory, Step
from gfsa.plugs.tracing.memory import TraceMemory
from gfsa.plugs.tracing.path import PathRecorder, inputs_of


class TraceError(RuntimeError):
    """A traced module's forward is not the self-attention that a filter needs."""


class NewPathError(BaseException):
    """A forward took a path that no earlier forward has verified; it has to be followed.

    No Exception, so that a module that catches those does not take it for an error of its own.
    """


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
        for name in ops.OTHER_TOKENS:
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
        return self._with_filtered_maps(result) if self.filtered is not None else result

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
        operands = (*args, *kwargs.values())
        step = self.history.find_map(*operands) if self.history.steps else None
        if step is None:
            if func is torch.einsum and len(args) == 2 and isinstance(args[1], (list, tuple)):
                step = self.history.find_map(*args[1])
            if step is None:
                if func in ops.MAP_PRODUCTS and any(self.history.find(x) for x in args):
                    # as for values that depend on the distance, or for a column that is a sink
                    self._refuse(
                        "a product takes a part or a sum of its map, and the filter needs all of it"
                    )
                result = self._run(func, args, kwargs)
                self.history.follow(func, args, kwargs, result)
                return result
        if func in ops.DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in ops.MATMUL:
            return self._written(self._product(*ops.operands_of(args, kwargs)[:2]), kwargs)
        if func in ops.ADDED_MATMUL:
            return self._written(self._added_product(args, kwargs), kwargs)
        if func is torch.einsum:
            return self._einsum(*args)
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
        turned: Tensor = self._run(torch.transpose, (x, -2, -1), {})
        self.history.follow(torch.transpose, (x, -2, -1), {}, turned)
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

    def _einsum(self, equation: Any, *operands: Any) -> Tensor:
        given = (equation, *operands)
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        place = next(i for i, x in enumerate(operands) if self.history.find_map(x) is not None)
        step = self.history.find_map(operands[place])
        assert step is not None
        if not isinstance(equation, str):
            self._refuse("its map is in an einsum without an equation")
        inputs, arrow, out = equation.replace(" ", "").partition("->")
        letters = inputs.split(",")
        of_map = letters[place]
        if arrow and set(of_map[-2:]) <= set(out):
            # the einsum mixes heads: its result is still a map
            mixed: Tensor = self._run(torch.einsum, given, {})
            self.history.follow(torch.einsum, (equation, *operands), {}, mixed)
            return mixed
        if len(operands) != 2 or not arrow or "." in equation:
            self._refuse(f"its map is in an einsum that is not understood: {equation!r}")
        of_values = letters[1 - place]
        lead, row, column = of_map[:-2], of_map[-2], of_map[-1]
        features = [x for x in of_values if x not in of_map]
        if len(features) != 1 or set(of_values) != {*lead, column, *features}:
            self._refuse(f"its map is in an einsum that is not understood: {equation!r}")
        ordered = f"{of_values}->{lead}{column}{features[0]}"
        values = self._run(torch.einsum, (ordered, operands[1 - place]), {})
        y = self._filter_map(step, operands[place], values)
        return torch.einsum(f"{lead}{row}{features[0]}->{out}", y)

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
        if scores[-2] != scores[-1]:
            self._refuse(
                f"its map is {scores[-2]}×{scores[-1]}, not square: cross-attention, pooling with "
                "a few queries, or decoding with a cache (pass use_cache=False) has no powers"
            )
        heads = self.filter.num_heads
        if self.follower is None:
            self.layout = self._verified_layout(scores)
        else:
            self.layout = self._found_layout(scores, rows, columns, values)
        assert self.layout is not None
        if not self.layout.fits(scores, heads):
            self._refuse(f"its map has shape {tuple(scores)}, with no axis for its {heads} heads")

    def _found_layout(
        self, scores: Sequence[int], rows: list[Side], columns: list[Side], values: Tensor
    ) -> HeadLayout:
        """The layout that the axes of this forward show; refuses what is no self-attention."""
        assert self.follower is not None
        heads = self.filter.num_heads
        of_values = sides_of_tokens(self._origins(values))
        if 0 in scores or values.numel() == 0:
            # nothing is computed, so any layout of these sizes will do
            return self._layout_by_sizes(scores)
        if scores[-1] == 1:
            # the map of one token is the number one, whatever its queries and keys are
            layout = find_heads([*rows, *columns, *of_values], scores, heads)
            return self._layout_by_sizes(scores) if isinstance(layout, str) else layout
        attention = SelfAttention(rows, columns, of_values, self.follower, self._equal)
        if (refusal := attention.refusal()) is not None:
            self._refuse(refusal)
        layout = attention.layout(scores, heads)
        if isinstance(layout, str):
            self._refuse(layout)
        general = settled(layout, scores, heads)
        if general is not None:
            verified = Verified(general, tuple(attention.equal_inputs))
            self.memory.keep(self.recorder.path(), verified)
        return layout

    def _verified_layout(self, scores: Sequence[int]) -> HeadLayout:
        """The layout that an earlier forward on the same path has shown."""
        if self.memory.known:
            return HeadLayout(len(scores), -3)
        if torch.compiler.is_compiling():
            # operations are not recorded while a graph is compiled, so all paths of these
            # inputs and flags have to agree
            inputs = self.recorder.entries[0]
            known = [v for path, v in self.memory.paths.items() if path[0] == inputs]
            known = [v for v in known if v.layout.rank == len(scores)]
            if not known or any(v != known[0] for v in known):
                self._refuse(
                    "no forward has verified it with these inputs, which a graph that is compiled "
                    "cannot do. Run one forward without torch.compile first"
                )
            verified = known[0]
        elif self.recorder.path() in self.memory.paths:
            verified = self.memory.paths[self.recorder.path()]
        else:
            self.error = NewPathError()
            raise self.error
        for first, second in verified.equal_inputs:
            try:
                require_same_tokens(self.module, self.inputs[first], self.inputs[second])
            except ValueError as error:
                self.error = error
                raise
        return verified.layout

    def _layout_by_sizes(self, scores: Sequence[int]) -> HeadLayout:
        heads, rank = self.filter.num_heads, len(scores)
        place = next((i for i, size in enumerate(scores[:-2]) if size == heads), None)
        if place is not None or heads == 1:
            return HeadLayout(rank, (place or 0) - rank)
        for verified in self.memory.paths.values():
            if verified.layout.rank == rank:
                return verified.layout
        return HeadLayout(rank, -3, before=None)

    def _equal(self, first: str, second: str) -> bool:
        """Whether two inputs hold the same tokens."""
        tokens, others = self.inputs[first], self.inputs[second]
        if tokens.shape != others.shape:
            return False
        try:
            require_same_tokens(self.module, tokens, others)
        except ValueError:
            return False
        return True

    def _with_filtered_maps(self, result: Any) -> Any:
        """The result of the module, with H in place of the attention weights that it returns."""
        if isinstance(result, Tensor):
            return self._filtered_map(result)
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*(self._with_filtered_maps(x) for x in result))
        if isinstance(result, (list, tuple)):
            return type(result)(self._with_filtered_maps(x) for x in result)
        if isinstance(result, dict):
            for key in list(result):
                result[key] = self._with_filtered_maps(result[key])
        return result

    def _filtered_map(self, x: Tensor) -> Tensor:
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
