"""The lens: measure whether a model over-smooths, where, and what its filters change."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gfsa.lens.diagnosis import diagnose
    from gfsa.lens.report import LensReport

__all__ = ["LensReport", "diagnose"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # the command `gfsa diagnose` is in this package, and `gfsa --help` imports it without torch
    from gfsa.lens import diagnosis

    return getattr(diagnosis, name)
