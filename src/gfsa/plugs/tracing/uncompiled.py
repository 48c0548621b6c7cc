"""The forward of a traced module that no forward has verified yet, where a graph is compiled.

A module of its own, because torch's compiler is imported with it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gfsa.plugs.tracing.refusals import TraceError

_REASON = (
    "gfsa has not verified a traced attention module yet. Run one forward without torch.compile "
    "or torch.export first, with more than one sample, and neither as many as heads nor as many as "
    "tokens"
)


def _follow(module: Any, given: Any, args: Any, kwargs: Any) -> Any:
    try:
        return module.run_traced(given, True, args, kwargs)
    except TraceError as error:
        # torch.export goes on tracing here, which can hide how tensors follow from each other;
        # after a graph break of torch.compile the module runs as without it
        if torch.compiler.is_compiling():
            raise TraceError(f"{_REASON}. Without it: {error}") from error
        raise


# compiled code has no axes to follow, so the graph breaks here; an older torch gives no reason
_explained = "reason" in inspect.signature(torch.compiler.disable).parameters
follow = torch.compiler.disable(_follow, **({"reason": _REASON} if _explained else {}))
