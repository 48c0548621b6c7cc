"""``torch.compile`` for models that are trained: whole, or one of the blocks they are stacks of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import _dynamo as dynamo
from torch import nn


def compile_model(model: nn.Module, **options: Any) -> None:
    """Compile ``model`` in place, as one."""
    _compile([model], options)


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compile each block of ``model``'s stacks in place, and return how many there are.

    Blocks of a stack share their code: the first one is compiled, the others find it done, which
    takes a fraction of the time that the whole model takes and leaves little unfused. Blocks that
    differ in a number (a rate of dropped paths that rises with depth) are compiled one by one.
    """
    blocks = [block for stack in _stacks(model) for block in stack]
    if not blocks:
        raise ValueError(
            f"compile=blocks compiles stacks of blocks of one kind, and a {type(model).__name__} "
            "has none; use compile=model"
        )
    # beyond its limit the compiler would leave blocks as they are; each has its code for training
    # and for evaluation, for one shape of batches and for any
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 4 * len(blocks))
    _compile(blocks, options)
    return len(blocks)


def forget_compiled(model: nn.Module) -> None:
    """Let ``model`` run as it is written again, so that hooks in it are called."""
    for module in model.modules():
        module._compiled_call_impl = None


def _compile(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    # what earlier runs of this process compiled counts against the limit, and whichever of their
    # shapes differed would be taken for variable in this one: each begins as if it were alone
    dynamo.reset()
    for module in modules:
        module._compiled_call_impl = torch.compile(_call_of(module), **options)


def _call_of(module: nn.Module) -> Any:
    """What ``module.compile()`` compiles, in a function of ours.

    The compiler passes over frames of ``torch.nn``'s own code, and with them, in silence, over a
    module of its classes (a ``TransformerEncoderLayer``, a ``Sequential``), unless ours is around.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _stacks(module: nn.Module) -> list[list[nn.Module]]:
    """The outermost stacks of blocks of one kind, which have modules of their own inside."""
    blocks = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
        kind = type(blocks[0])
        if all(type(b) is kind and any(b.children()) for b in blocks):
            return [blocks]
    return [stack for child in blocks for stack in _stacks(child)]
