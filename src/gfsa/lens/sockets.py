"""A look at every attention map of a model, without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from torch import nn

from gfsa.filters import GFSA
from gfsa.plugs.adapter import CHILD, Unknown
from gfsa.plugs.plug import Socket, detach, finish, plug, sockets_of


def ordinary_attention(heads: int) -> GFSA:
    """A filter that is ordinary attention, one pass, with nothing to learn."""
    return GFSA(heads, K=None, learn=())


@contextmanager
def every_socket(
    model: nn.Module, unknown: Unknown
) -> Iterator[tuple[dict[str, Socket], set[str], dict[str, str]]]:
    """The model's attention modules, all plugged for the time being.

    Modules without a filter get one that is ordinary attention, to the bit; at the end it is taken
    out again, whatever happened.

    Gives the sockets, the names of those that had no filter, and why others cannot be looked at.
    """
    before = set(sockets_of(model))
    bare: list[str] = []

    def is_bare(name: str, module: nn.Module) -> bool:
        if not hasattr(module, CHILD):
            bare.append(name)
        return bool(bare) and bare[-1] == name

    skipped: dict[str, str] = {}
    try:
        report = plug(model, filter=ordinary_attention, unknown=unknown, layers=is_bare)
        skipped = {name: why for name, why in report.skipped.items() if name not in before}
    except ValueError:
        # a model with a filter in every layer has nothing left to plug: that is no error here
        if bare or not before:
            raise
    sockets = sockets_of(model)
    added = set(sockets) - before
    try:
        yield sockets, added, skipped
    finally:
        for name in added:
            detach(sockets[name])
        finish(model, {sockets[name].adapter for name in added})


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention module of the model that has a filter or could have one."""
    found = {name: socket.module for name, socket in sockets_of(model).items()}

    def note(name: str, module: nn.Module) -> bool:
        found[name] = module
        return False

    # a dry run knows what could be plugged; choosing nothing, it has nothing to object to either
    with suppress(ValueError):
        plug(model, filter=ordinary_attention, layers=note, dry_run=True)
    if not found:
        plug(model, filter=ordinary_attention, dry_run=True)
    modules = dict(model.named_modules())
    return {name: modules[name] for name in modules if name in found}


def blocks_around(model: nn.Module, attention: Iterable[str]) -> dict[str, list[str]]:
    """For each attention module the names of the blocks it is the only attention of.

    Innermost first, beginning with the attention module itself. A block is an element of a
    ``ModuleList`` or ``Sequential``: what a model repeats with depth.
    """
    modules = dict(model.named_modules())
    names = list(attention)
    found = {}
    for name in names:
        parts = name.split(".")
        blocks = [name]
        for end in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:end])
            if sum(other == name or other.startswith(around + ".") for other in names) > 1:
                break
            parent = modules[".".join(parts[: end - 1])]
            repeats = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            if repeats and not isinstance(modules[around], (nn.ModuleList, nn.ModuleDict)):
                blocks.append(around)
        found[name] = blocks
    return found
