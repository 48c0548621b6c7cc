"""Restore a model if a change of it fails: plugging, unplugging and loading are all or nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gfsa.plugs.checks.called import checks_of

# parameters, buffers, children and hooks: what torch keeps in containers of a module
_CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]

CHANGING = threading.RLock()
"""Held while a model is changed: threads that plug and unplug one model take turns."""


@contextmanager
def all_or_nothing(model: nn.Module, values: Iterable[Tensor] = ()) -> Iterator[None]:
    """If the block raises, by Ctrl-C too, every module of ``model`` is as it was before.

    Restored are classes, attributes, parameters, buffers, children and hooks of the modules, the
    state of the checks for uncalled filters, and the numbers in ``values``. Attributes that are
    plain dicts, lists or sets get their content back.
    """
    with CHANGING:
        before = _Snapshot(model, values)
        try:
            yield
        except BaseException:
            before.restore()
            raise


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block, every module of ``model`` is as it was before, also if the block raised.

    Restored is what :func:`all_or_nothing` restores, and the numbers in the buffers.
    """
    with CHANGING:
        before = _Snapshot(model, [buffer for buffer in model.buffers() if _can_be_written(buffer)])
        try:
            yield
        finally:
            before.restore()


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a forward can write into a tensor: not if it is expanded or an inference tensor."""
    if tensor.layout is not torch.strided:
        return False
    expanded = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return not expanded and not tensor.is_inference()


class _Snapshot:
    """The modules of a model as they are now; tensors are not copied, except ``values``."""

    def __init__(self, model: nn.Module, values: Iterable[Tensor]) -> None:
        self.modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self.containers = [
            (container, copy.copy(container))
            for _, _, attributes in self.modules
            for name, container in attributes.items()
            # others may be subclasses that cannot be emptied
            if name in _CONTAINERS or type(container) in (dict, list, set)
            if isinstance(container, (dict, list, set))
        ]
        self.checks = [(check, check.called) for check in checks_of(model)]
        self.values = [(tensor, tensor.detach().clone()) for tensor in values]

    def restore(self) -> None:
        while True:
            try:
                self._restore()
            except KeyboardInterrupt:
                # a second Ctrl-C must not leave a model half restored; the first one is raised
                continue
            return

    def _restore(self) -> None:
        for module, kind, attributes in self.modules:
            if type(module) is not kind:
                module.__class__ = kind
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
        # in place: the handles of hooks refer to these containers
        for container, content in self.containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        for check, called in self.checks:
            check.called = called
        with torch.no_grad():
            for tensor, value in self.values:
                # an unneeded write would invalidate graphs that autograd has recorded
                if tensor.is_meta or not torch.equal(tensor, value):
                    tensor.copy_(value)
