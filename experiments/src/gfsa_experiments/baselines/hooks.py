"""The hooks of the methods, on the modules of one model; removed again by their class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gfsa_experiments.baselines.forward_state import FirstValues, Scope
from gfsa_experiments.baselines.mask_readers import Reader
from gfsa_experiments.baselines.token_methods import TokenMethod


class Hook:
    """A hook of this package."""


class OpenScope(Hook):
    """Before a block (or its attention) runs: reads which tokens see each other."""

    def __init__(self, scope: Scope, reader: Reader | None) -> None:
        self.scope = scope
        self.reader = reader

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.reader is None:
            self.scope.open(None, 0)
        else:
            tokens, seen = self.reader(args, kwargs)
            self.scope.open(seen, tokens.numel() // tokens.shape[-1])


class CloseScope(Hook):
    """After the block ran."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.scope.close()


class AtPlace(Hook):
    """Passes the tokens at one place of a block to a method."""

    def __init__(self, scope: Scope, method: TokenMethod, sequence_first: bool) -> None:
        self.scope = scope
        self.method = method
        self.sequence_first = sequence_first

    def change(self, x: Tensor) -> Tensor:
        self.scope.visit()
        if not self.method.needs_sight:
            return self.method(x, None)
        seen = self.scope.sight.for_tokens()
        self.scope.check_tokens(x)
        return over_tokens(x, self.sequence_first, lambda tokens: self.method(tokens, seen))


class AtInput(AtPlace):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.change(args[0]), *args[1:]


class AtOutput(AtPlace):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.change(output)
        return self.change(output[0]), *output[1:]


class OpenFirstValues(Hook):
    def __init__(self, memory: FirstValues) -> None:
        self.memory = memory

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.memory.open()


class CloseFirstValues(Hook):
    def __init__(self, memory: FirstValues) -> None:
        self.memory = memory

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.memory.close()


def over_tokens(x: Tensor, sequence_first: bool, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to tokens ``(B, N, D)``, whatever layout the block uses."""
    if x.dim() == 2:
        return change(x[None])[0]
    if x.dim() == 4:
        # a grid (B, height, width, D)
        return change(x.flatten(1, 2)).view(x.shape)
    if sequence_first:
        return change(x.transpose(0, 1)).transpose(0, 1)
    return change(x)


def has_hooks(model: nn.Module) -> bool:
    """Whether a hook of this package is on any module."""
    return any(
        isinstance(hook, Hook)
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def remove_hooks(model: nn.Module) -> None:
    """Remove every hook of this package; a copied or unpickled model has no handles to them."""
    for module in model.modules():
        for hooks, others in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (
                module._forward_hooks,
                (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
            ),
        ):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
                del hooks[key]
                for other in others:
                    other.pop(key, None)
