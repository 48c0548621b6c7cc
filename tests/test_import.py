"""What an import of gfsa loads, and what ``gfsa info`` says."""

import platform
import subprocess
import sys

import torch
from typer.testing import CliRunner

import gfsa
from gfsa import info
from gfsa.cli import build

LOADED = """
import sys
import torch
before = set(sys.modules)
import gfsa
gfsa.GFSA(2).coefficients()
gfsa.graph_filter_attention(*[torch.zeros(1, 2, 3, 4)] * 3, torch.ones(3))
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(" ".join(sorted(added - set(sys.stdlib_module_names))))
"""

ALONE = """
import sys
import gfsa
assert "torch" not in sys.modules
assert gfsa.functional.which_backend and gfsa.plugs.sites and gfsa.filters and gfsa.operators
assert gfsa.plug is gfsa.plugs.plug
assert not hasattr(gfsa, "no_such_name")
"""


def run(program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return finished.stdout.strip()


def test_pulls_in_torch_and_the_standard_library_only() -> None:
    assert set(run(LOADED).split()) <= {"gfsa", "torch"}


def test_torch_is_imported_with_the_first_name_that_needs_it() -> None:
    run(ALONE)


def test_public_names_are_there() -> None:
    import gfsa

    assert all(hasattr(gfsa, name) for name in gfsa.__all__)
    assert gfsa.__version__.count(".") >= 1
    modules = {"baselines", "filters", "functional", "lens", "models", "operators", "plugs"}
    assert dir(gfsa) == sorted({*gfsa.__all__, *modules})


MODULES = """
import gfsa
assert gfsa.lens.diagnose is gfsa.diagnose
assert gfsa.baselines.apply and gfsa.models.Encoder
from gfsa import models
import gfsa_experiments.models
assert models is gfsa_experiments.models
"""

LIBRARY_ALONE = """
import importlib.abc, sys
class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "gfsa_experiments":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
import gfsa
for name in ("models", "baselines"):
    try:
        getattr(gfsa, name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_modules_resolve_after_importing_gfsa() -> None:
    run(MODULES)


def test_the_experiments_are_named_where_they_are_missing() -> None:
    found = run(LIBRARY_ALONE).splitlines()
    assert [line.partition(" ")[0] for line in found] == ["gfsa.models", "gfsa.baselines"]
    assert all("pip install ./experiments" in line for line in found)


def test_prints_versions_devices_and_operators():
    shown = CliRunner().invoke(build(), ["info"])
    assert shown.exit_code == 0
    for text in (gfsa.__version__, platform.python_version(), torch.__version__, "cpu", "dense"):
        assert text in shown.output


def test_absent_packages_are_said_to_be_absent(monkeypatch):
    monkeypatch.setattr(info, "PACKAGES", ("no-such-package",))
    assert info.versions()["no-such-package"] is None
    assert "absent" in CliRunner().invoke(build(), ["info"]).output


def test_an_operator_that_cannot_run_says_why():
    answers = {(each.operator, each.device): each.refusal for each in info.operators()}
    assert answers["dense", "cpu"] is None
    assert answers["sdpa", "cpu"] is None
    assert answers["linear", "cpu"] is None
    # the fused kernels are for GPUs
    assert answers["fused", "cpu"]
