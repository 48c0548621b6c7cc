"""The command line as a user meets it."""

import importlib.metadata
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


def test_version():
    assert runner.invoke(cli.build(), ["--version"]).output.strip() == gfsa.__version__


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_one_line_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = str(stopped.value)
    assert "pip install 'gfsa[cli]'" in message
    assert "\n" not in message


def test_another_missing_module_is_not_hidden(monkeypatch):
    def load_broken():
        from gfsa.no_such_module import command

        return command

    monkeypatch.setitem(cli.COMMANDS, "broken", load_broken)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main()


def test_help_loads_nothing_heavy():
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from gfsa.cli import build; build();"
            "print([m for m in ('matplotlib', 'sklearn', 'transformers', 'timm')"
            " if m in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.strip() == "[]"


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
