"""The command line from the outside, and what importing gfsa brings along."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import gfsa
from gfsa import cli, environment, info

runner = CliRunner()


@pytest.mark.parametrize("command", ["", "diagnose", "demo", "train", "results"])
def test_help_names_commands_and_flags_without_a_value(command):
    shown = runner.invoke(cli.build(), [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "--help" in shown.output
    assert "bool" not in shown.output.lower()
    assert command or all(name in shown.output for name in cli.COMMANDS)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_one_line_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=r"^gfsa's command .*pip install typer rich$"):
        cli.main()


def test_another_missing_module_is_not_hidden(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "broken", "gfsa.no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main()


# runs `gfsa ARGUMENTS` as its script does, then prints what it imported
AS_A_SCRIPT = """
import atexit, sys
from gfsa.cli import main
heavy = ("torch", "numpy", "matplotlib", "sklearn", "transformers", "timm")
atexit.register(lambda: print([m for m in heavy if m in sys.modules]))
sys.argv = ["gfsa", *sys.argv[1:]]
main()
"""


def run(program: str, *arguments: str, **environment: str) -> str:
    command, given = [sys.executable, "-c", program, *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_a_framework(flag):
    *shown, imported = run(AS_A_SCRIPT, flag).splitlines()
    assert imported == "[]"
    assert flag == "--help" or shown == [gfsa.__version__]


@pytest.mark.parametrize(
    ("word", "typed", "completed"),
    [("1", "gfsa inf", "info"), ("2", "gfsa diagnose --unt", "--untrained")],
)
def test_a_shell_completes_commands_and_their_options(word, typed, completed):
    asked = {"_GFSA_COMPLETE": "complete_bash", "COMP_CWORD": word, "COMP_WORDS": typed}
    assert run(AS_A_SCRIPT, **asked).split()[0] == completed


@pytest.mark.parametrize(("name", "distribution"), sorted(cli.ELSEWHERE.items()))
def test_a_command_of_a_missing_distribution_says_which(monkeypatch, name, distribution):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    shown = runner.invoke(cli.build(), [name, "anything", "--set", "a=1", "--help"])
    assert shown.exit_code == 2
    assert f"gfsa {name} is a command of {distribution}, which is not installed" in shown.output
    assert distribution in runner.invoke(cli.build(), ["--help"]).output


def test_another_distribution_adds_a_command(monkeypatch):
    entry = importlib.metadata.EntryPoint("extra", "gfsa.info:info", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry])
    assert "extra" in runner.invoke(cli.build(), ["--help"]).output


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

# torch is imported with the first name that needs it
NAMES = """
import sys
import gfsa
assert "torch" not in sys.modules
assert gfsa.functional.which_backend and gfsa.plugs.sites and gfsa.filters and gfsa.operators
assert gfsa.plug is gfsa.plugs.plug and gfsa.lens.diagnose is gfsa.diagnose
assert gfsa.baselines.apply and gfsa.models.Graphormer
from gfsa import models
import gfsa_experiments.models
assert models is gfsa_experiments.models
assert not hasattr(gfsa, "no_such_name")
"""


def test_pulls_in_torch_and_the_standard_library_only() -> None:
    assert set(run(LOADED).split()) <= {"gfsa", "torch"}


def test_names_are_imported_when_they_are_used() -> None:
    run(NAMES)


def test_public_names_are_there() -> None:
    assert all(hasattr(gfsa, name) for name in gfsa.__all__)
    assert gfsa.__version__.count(".") >= 1
    modules = {"baselines", "filters", "functional", "lens", "models", "operators", "plugs"}
    assert dir(gfsa) == sorted({*gfsa.__all__, *modules})


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


def test_the_experiments_are_named_where_they_are_missing() -> None:
    found = run(LIBRARY_ALONE).splitlines()
    assert [line.partition(" ")[0] for line in found] == ["gfsa.models", "gfsa.baselines"]
    assert all("pip install ./experiments" in line for line in found)


def test_prints_versions_devices_and_kernels():
    shown = runner.invoke(cli.build(), ["info"])
    assert shown.exit_code == 0
    versions = (gfsa.__version__, platform.python_version(), torch.__version__)
    assert all(text in shown.output for text in (*versions, "cpu", "not fused"))


def test_absent_packages_and_kernels_that_cannot_run_are_named(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    assert environment.versions()["no-such-package"] is None
    assert "absent" in runner.invoke(cli.build(), ["info"]).output
    found = {call: answer for call, answer in info.decisions().items() if call.startswith("cpu")}
    assert {answer.backend for answer in found.values()} == {"sdpa"}
    assert all("need an NVIDIA GPU" in str(answer) for answer in found.values())
