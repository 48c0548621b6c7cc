"""gfsa: graph-filter self-attention for any PyTorch Transformer."""

from typing import TYPE_CHECKING, Any

from gfsa._version import __version__

if TYPE_CHECKING:
    from gfsa import baselines
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
    "baselines",
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
    # torch takes seconds to import, and `gfsa --help` needs none of it: the names are imported
    # together when the first is used. The lens and the baselines are imported when they are used.
    if name == "baselines":
        import gfsa.baselines as baselines

        return baselines
    if name == "diagnose":
        from gfsa.lens import diagnose

        return diagnose
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
    if name in __all__:
        import gfsa._public as public

        globals().update({public_name: vars(public)[public_name] for public_name in public.__all__})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
