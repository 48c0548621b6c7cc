"""What is timed as compiled has been compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# of one function: each model of a case has a graph with gradients and one without
GRAPHS = 64


@contextmanager
def compiling() -> Iterator[None]:
    """Let a case compile as if it were alone, and fail where the compiler gives up.

    Models of one library share functions, and of each the compiler keeps few graphs: beyond their
    number it would run the next model as it is, with no more than a line in the log.
    """
    dynamo = torch._dynamo
    dynamo.reset()
    with dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
        yield
