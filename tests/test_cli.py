"""The command line as a user meets it."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gfsa
from gfsa import cli

runner = CliRunner()


def test_help_names_every_command():
    shown = runner.invoke(cli.build(), ["--help"])
    assert shown.exit_code == 0
    for name in cli.COMMANDS:
        assert name in shown.output


def test_flags_do_not_look_as_if_they_took_a_value():
    shown = runner.invoke(cli.build(), ["diagnose", "--help"], env={"COLUMNS": "200"})
    (line,) = [line for line in shown.output.splitlines() if " --trace " in line]
    assert "bool" not in line.lower()


def test_version():
    assert runner.invoke(cli.build(), ["--version"]).output.strip() == gfsa.__version__


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_one_line_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = str(stopped.value)
    assert "pip install typer rich" in message
    assert "\n" not in message


def test_another_missing_module_is_not_hidden(monkeypatch):
    def load_broken():
        from gfsa.no_such_module import command

        return command

    monkeypatch.setitem(cli.COMMANDS, "broken", load_broken)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main()


def test_serve_names_the_packages_that_its_server_lacks(monkeypatch):
    serve = pytest.importorskip("transformers.cli.serve")
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    shown = runner.invoke(cli.build(), ["serve", "folder"])
    assert shown.exit_code == 2
    assert "gfsa serve: Missing dependencies for serving" in shown.output
    assert isinstance(shown.exception, SystemExit)


# runs `gfsa ARGUMENTS` as its script does, then prints what it imported and its processor time
AS_A_SCRIPT = """
import atexit, sys, time
from gfsa.cli import main
heavy = ("torch", "numpy", "matplotlib", "sklearn", "transformers", "timm")
atexit.register(lambda: print([m for m in heavy if m in sys.modules], time.process_time()))
sys.argv = ["gfsa", *sys.argv[1:]]
main()
"""


def run_script(*arguments: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", AS_A_SCRIPT, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_a_framework(flag):
    assert run_script(flag).splitlines()[-1].startswith("[] ")


def test_a_shell_completes_commands_and_their_options():
    asked = {"_GFSA_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert run_script(**asked, COMP_WORDS="gfsa inf").split()[0] == "info"
    asked = {"_GFSA_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert run_script(**asked, COMP_WORDS="gfsa diagnose --unt").split()[0] == "--untrained"


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
