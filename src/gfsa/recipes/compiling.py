"""``torch.compile`` for models that are trained: whole, or one of the blocks they are stacks of."""

from __future__ import annotations

from typing import Any

from torch import _dynamo as dynamo
from torch import nn


def compile_model(model: nn.Module, **options: Any) -> None:
    """Compile ``model`` in place, as one."""
    model.compile(**options)


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
    for block in blocks:
        block.compile(**options)
    return len(blocks)


def forget_compiled(model: nn.Module) -> None:
    """Let ``model`` run as it is written again, so that hooks in it are called."""
    for module in model.modules():
        module._compiled_call_impl = None


def _stacks(module: nn.Module) -> list[list[nn.Module]]:
    """The outermost stacks of blocks of one kind, which have modules of their own inside."""
    blocks = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
        kind = type(blocks[0])
        if all(type(b) is kind and any(b.children()) for b in blocks):
            return [blocks]
    return [stack for child in blocks for stack in _stacks(child)]
