"""gfsa: graph-filter self-attention for any PyTorch Transformer."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gfsa._version import __version__ as __version__

if TYPE_CHECKING:
    from gfsa.filters import GFSA as GFSA
    from gfsa.filters import Exclusive as Exclusive
    from gfsa.filters import GraphFilter as GraphFilter
    from gfsa.filters import Laplacian as Laplacian
    from gfsa.filters import PageRank as PageRank
    from gfsa.filters import Polynomial as Polynomial
    from gfsa.filters import Twicing as Twicing
    from gfsa.functional import graph_filter_attention as graph_filter_attention
    from gfsa.functional import linear_graph_filter_attention as linear_graph_filter_attention
    from gfsa.functional import which_backend as which_backend
    from gfsa.lens import diagnose as diagnose
    from gfsa.plugs import FilterRate as FilterRate
    from gfsa.plugs import filters_of as filters_of
    from gfsa.plugs import parameter_groups as parameter_groups
    from gfsa.plugs import plug as plug
    from gfsa.plugs import register_adapter as register_adapter
    from gfsa.plugs import unplug as unplug
    from gfsa.plugs.hub import push_to_hub as push_to_hub
    from gfsa.plugs.prune import prune as prune
    from gfsa.plugs.published import convert as convert
    from gfsa.plugs.saving.checkpoint import load as load
    from gfsa.plugs.saving.checkpoint import save as save
    from gfsa.plugs.saving.pretrained import from_pretrained as from_pretrained
    from gfsa.plugs.saving.pretrained import load_peft as load_peft
    from gfsa_experiments import baselines as baselines
    from gfsa_experiments import models as models

# where each public name is: it is imported when it is first used, because torch takes seconds to
# import and `gfsa --help` does not need it
_PUBLIC = {
    "gfsa.filters": "GFSA Exclusive GraphFilter Laplacian PageRank Polynomial Twicing",
    "gfsa.functional": "graph_filter_attention linear_graph_filter_attention which_backend",
    "gfsa.lens": "diagnose",
    "gfsa.plugs": "FilterRate filters_of parameter_groups plug register_adapter unplug",
    "gfsa.plugs.saving.pretrained": "from_pretrained load_peft",
    "gfsa.plugs.hub": "push_to_hub",
    "gfsa.plugs.prune": "prune",
    "gfsa.plugs.published": "convert",
    "gfsa.plugs.saving.checkpoint": "load save",
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names.split()}
_PARTS = ("filters", "functional", "lens", "operators", "plugs")

__all__ = sorted(["__version__", *_WHERE])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        found = globals()[name] = getattr(import_module(_WHERE[name]), name)
        return found
    if name in _PARTS:
        return import_module(f"gfsa.{name}")
    if name not in ("baselines", "models"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"gfsa_experiments.{name}")
    except ModuleNotFoundError as error:
        if error.name != "gfsa_experiments":
            raise
        raise ModuleNotFoundError(
            f"gfsa.{name} is gfsa_experiments.{name}, and the distribution gfsa-experiments is not "
            "installed: in a clone of the repository, pip install ./experiments",
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    # help() and inspect read every name listed here, so names that would raise are left out
    optional = ["baselines", "models"] if find_spec("gfsa_experiments") is not None else []
    return sorted([*__all__, *_PARTS, *optional])
