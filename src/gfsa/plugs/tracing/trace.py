"""Trace the forward of one attention module, and filter its map where it multiplies v.

The map is the result of a softmax over the last axis, followed through every operation that keeps
its size (dropout, casts, masks, mixing of heads) to a product with the values; or a call of torch's
own attention. The axes of queries, keys and values are followed from the module's inputs, so that
what is filtered is attention of tokens to themselves, head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gfsa.filters import GraphFilter
from gfsa.operators.call import check_kinds
from gfsa.plugs.cross_attention import OTHER_SEQUENCE, require_same_tokens
from gfsa.plugs.tracing import operations as ops
from gfsa.plugs.tracing.einsums import keeps_map, operands_of_einsum, product_equations
from gfsa.plugs.tracing.following import AxisFollower
from gfsa.plugs.tracing.maps import MapHistory, with_tensors
from gfsa.plugs.tracing.memory import TraceMemory
from gfsa.plugs.tracing.path import PathRecorder, inputs_of
from gfsa.plugs.tracing.product import FilteredProduct
from gfsa.plugs.tracing.refusals import Refusals
from gfsa.plugs.tracing.verification import Verifier

# arguments of known classes that may hold the tokens of another sequence
_MAY_BE_OTHER_TOKENS = (*OTHER_SEQUENCE, "key", "memory", "q_global")


class Trace(TorchFunctionMode):
    """One forward of one module.

    Args:
        module: the attention module; its filter is ``module.gfsa``.
        name: what to call it in errors.
        memory: what earlier forwards have shown.
        given: the arguments of the forward, by name.
        follow: whether to follow the axes of the inputs. If not, the forward must take a path that
            has been verified, or :class:`NewPathError` is raised.
        wants_maps: whether attention weights that the module returns are looked at.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        memory: TraceMemory,
        given: Mapping[str, Any],
        follow: bool,
        wants_maps: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.memory = memory
        self.given = given
        self.inputs = inputs_of(given)
        self.follower = AxisFollower() if follow else None
        self.recorder = PathRecorder()
        self.history = MapHistory()
        self.refusals = Refusals(module, name)
        filter: GraphFilter = module.gfsa  # type: ignore[assignment]
        verifier = Verifier(module, filter.num_heads, memory, self.recorder, self.follower)
        self.product = FilteredProduct(
            filter, self.inputs, verifier, self.history, self.refusals, wants_maps
        )
        self.handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Read the arguments of the forward before it runs."""
        check_kinds(**{k: v for k, v in self.given.items() if isinstance(v, torch.fx.Proxy)})
        self.recorder.start(self.inputs, self.given)
        if self.memory.known:
            self._require_same_tokens()
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
        if not self.product.count:
            self.recorder.note(type(layer), args, {})
            self.recorder.number_results(result)

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if error[0] is not None:
            # on its way to the caller; kept here, it would keep the tensors of the forward
            self.refusals.error = None
        super().__exit__(*error)

    def _require_same_tokens(self) -> None:
        """Refuse another sequence by the name of its argument, where axes are not followed."""
        tokens = next(iter(self.inputs.values()), None)
        for name in _MAY_BE_OTHER_TOKENS:
            other = self.given.get(name)
            if isinstance(other, Tensor) and tokens is not None:
                require_same_tokens(self.module, tokens, other)

    def end(self, result: Any) -> Any:
        """Check the forward after it ran; returns its result, with H where it has A."""
        if self.refusals.error is not None:
            # the module caught it
            raise self.refusals.error
        if not self.product.count:
            self.refusals.refuse(
                "its forward has no product of a softmax with values that torch dispatches (a "
                "softmax written out, a softmax over another axis, or an extension of its own)"
            )
        if self.product.filtered is None:
            return result
        return with_tensors(result, self.product.filtered_map)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.product.count or self.memory.known or torch.compiler.is_compiling():
            return self._dispatch(func, args, kwargs)
        self.recorder.note(func, args, kwargs)
        result = self._dispatch(func, args, kwargs)
        self.recorder.number_results(result)
        return result

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.product.of_attention(*args, **kwargs)
        if func in ops.SOFTMAX:
            return self._softmax(func, args, kwargs)
        if not self._takes_map(func, args, kwargs):
            if func in ops.MAP_PRODUCTS and any(self.history.find(x) for x in args):
                # as for values that depend on the distance, or for a column that is a sink
                self.refusals.refuse(
                    "a product takes a part or a sum of its map, and the filter needs all of it"
                )
            return self._run_and_follow(func, args, kwargs)
        if func in ops.DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in ops.MATMUL:
            return _written(self._matmul(*ops.operands_of(args, kwargs)[:2]), kwargs)
        if func in ops.ADDED_MATMUL:
            return _written(self._added_matmul(args, kwargs), kwargs)
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
        if self.follower is not None and not self.product.count:
            self.follower.note(func, args, kwargs, result)
        return result

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        result: Tensor = self._run(func, args, kwargs)
        axis = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
        if axis in (-1, result.dim() - 1):
            self.history.start(result)
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
        if self.product.take_dropout(input, p, inplace):
            return input
        dropped: Tensor = self._run(F.dropout, (input, p, True, inplace), {})
        self.history.follow(F.dropout, (input, p), {}, dropped)
        return dropped

    def _matmul(self, left: Any, right: Any) -> Tensor:
        step = self.history.find_map(left)
        if step is not None:
            return self.product.of_map(step, left, right)
        step = self.history.find_map(right)
        assert step is not None
        # y = v·Aᵀ with tokens as columns
        y = self.product.of_map(step, self._turned(right), self._turned(left))
        return y.transpose(-2, -1)

    def _turned(self, x: Tensor) -> Tensor:
        turned: Tensor = self._run_and_follow(torch.transpose, (x, -2, -1), {})
        return turned

    def _added_matmul(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """``beta·input + alpha·(left @ right)``."""
        added, left, right = ops.operands_of(args, kwargs)[:3]
        if self.history.find_map(left, right) is None:
            self.refusals.refuse("its map is added to a product")
        y = kwargs.get("alpha", 1) * self._matmul(left, right)
        beta = kwargs.get("beta", 1)
        return y + beta * added if beta else y

    def _einsum(self, args: tuple[Any, ...]) -> Tensor:
        equation, operands = args[0], operands_of_einsum(args)
        if not isinstance(equation, str):
            # torch writes an equation for axes by number before it dispatches, its compiler after
            self.refusals.refuse("its map is in an einsum without an equation")
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
            self.refusals.refuse(f"its map is in an einsum that is not understood: {equation!r}")
        values = self._run(torch.einsum, (equations.values, operands[1 - place]), {})
        for axis in equations.shared:
            values = self._run(torch.unsqueeze, (values, axis), {})
        y = self.product.of_map(step, operands[place], values)
        return torch.einsum(equations.result, y)


def _written(y: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The product, in the tensor that the caller passed as ``out=``, if any."""
    out = kwargs.get("out")
    if out is None:
        return y
    if out.shape != y.shape:
        out.resize_(y.shape)
    out.copy_(y)
    written: Tensor = out
    return written
