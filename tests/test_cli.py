"""The command line as a user meets it."""

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
