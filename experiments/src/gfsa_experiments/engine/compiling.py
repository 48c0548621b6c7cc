"""``torch.compile`` for training: the whole model, or each of its repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import _dynamo as dynamo
from torch import nn


def compile_model(model: nn.Module, **options: Any) -> None:
    """Compile ``model`` in place, as a whole."""
    _compile([model], options)


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compile each block of ``model``'s stacks in place, and return the number of blocks.

    Blocks of a stack share their code: the first is compiled and the others reuse it, which takes a
    fraction of the time of compiling the whole model and leaves little unfused. Blocks that differ
    in a constant (a drop-path rate that rises with depth) are compiled one by one.
    """
    blocks = [block for stack in _stacks(model) for block in stack]
    if not blocks:
        raise ValueError(
            f"compile=blocks compiles stacks of blocks of one class, and {type(model).__name__} "
            "has no such stack; use compile=model"
        )
    # above its limit the compiler runs blocks eagerly; a block may have code for training and for
    # evaluation, each for one shape and for dynamic shapes
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 4 * len(blocks))
    _compile(blocks, options)
    return len(blocks)


def forget_compiled(model: nn.Module) -> None:
    """Undo compilation in place, so that hooks inside ``model`` are called again."""
    for module in model.modules():
        module._compiled_call_impl = None


def _compile(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    # code of earlier runs in this process counts against the limit, and sizes that differed from
    # theirs would be compiled as dynamic: each run starts from an empty cache
    dynamo.reset()
    for module in modules:
        # the compiler skips frames of torch.nn's own files, and therefore silently a module of a
        # class defined there, unless a function of another file calls it
        def call(*args: Any, own: nn.Module = module, **kwargs: Any) -> Any:
            return own._call_impl(*args, **kwargs)

        module._compiled_call_impl = torch.compile(call, **options)


def _stacks(module: nn.Module) -> list[list[nn.Module]]:
    """The outermost stacks of blocks of one class that have submodules."""
    blocks = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
        kind = type(blocks[0])
        if all(type(b) is kind and any(b.children()) for b in blocks):
            return [blocks]
    return [stack for child in blocks for stack in _stacks(child)]
