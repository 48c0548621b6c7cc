"""The forward of a traced module that no forward has verified yet, where a graph is compiled.

A module of its own, because torch's compiler is imported with it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gfsa.plugs.tracing.capture import TraceError

REASON = (
    "gfsa has not verified a traced attention module yet. Run one forward without torch.compile "
    "or torch.export first, with more than one sample, and neither as many as heads nor as many as "
    "tokens"
)


def _run(module: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        # torch.export goes on tracing here; torch.compile runs this as without it
        raise TraceError(REASON)
    return module.forward(*args, **kwargs)


# a proof needs gradients, so the graph breaks here; an older torch gives no reason
_explained = "reason" in inspect.signature(torch.compiler.disable).parameters
run = torch.compiler.disable(_run, **({"reason": REASON} if _explained else {}))
