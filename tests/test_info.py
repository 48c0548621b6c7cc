"""``gfsa info``: what is here and what can run."""

import platform

import torch
from typer.testing import CliRunner

import gfsa
from gfsa import info
from gfsa.cli import build


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
