"""gfsa: graph-filter self-attention for any PyTorch Transformer."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gfsa._version import __version__

if TYPE_CHECKING:
    from gfsa._public import (
        GFSA,
        Exclusive,
        FilterRate,
        GraphFilter,
        Laplacian,
        PageRank,
        Polynomial,
        Twicing,
        convert,
        filters_of,
        from_pretrained,
        graph_filter_attention,
        linear_graph_filter_attention,
        load,
        load_peft,
        parameter_groups,
        plug,
        prune,
        push_to_hub,
        register_adapter,
        save,
        unplug,
    )
    from gfsa.lens import diagnose
    from gfsa_experiments import baselines as baselines
    from gfsa_experiments import models as models

__all__ = [
    "GFSA",
    "Exclusive",
    "FilterRate",
    "GraphFilter",
    "Laplacian",
    "PageRank",
    "Polynomial",
    "Twicing",
    "__version__",
    "convert",
    "diagnose",
    "filters_of",
    "from_pretrained",
    "graph_filter_attention",
    "linear_graph_filter_attention",
    "load",
    "load_peft",
    "parameter_groups",
    "plug",
    "prune",
    "push_to_hub",
    "register_adapter",
    "save",
    "unplug",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import and `gfsa --help` does not need it, so every name is imported
    # when it is first used
    if name in ("filters", "functional", "operators", "plugs"):
        import gfsa.filters as filters
        import gfsa.functional as functional
        import gfsa.operators as operators
        import gfsa.plugs as plugs

        return {
            "filters": filters,
            "functional": functional,
            "operators": operators,
            "plugs": plugs,
        }[name]
    if name in ("diagnose", "lens"):
        import gfsa.lens as lens

        return lens if name == "lens" else lens.diagnose
    if name in ("baselines", "models"):
        return _of_experiments(name)
    if name in __all__:
        import gfsa._public as public

        globals().update({public_name: vars(public)[public_name] for public_name in public.__all__})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _of_experiments(name: str) -> Any:
    try:
        from gfsa_experiments import baselines, models
    except ModuleNotFoundError as error:
        if error.name != "gfsa_experiments":
            raise
        raise ModuleNotFoundError(
            f"gfsa.{name} is gfsa_experiments.{name}, and the distribution gfsa-experiments is not "
            "installed: in a clone of the repository, pip install ./experiments",
            name=error.name,
        ) from None
    return {"baselines": baselines, "models": models}[name]


def __dir__() -> list[str]:
    modules = ["filters", "functional", "lens", "operators", "plugs"]
    # help() and inspect read every name listed here, so names that would raise are left out
    if find_spec("gfsa_experiments") is not None:
        modules += ["baselines", "models"]
    return sorted([*__all__, *modules])
