"""Every ``gfsa train`` of the documentation is accepted; those on a reader's own data run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.runs.row import read_rows
from gfsa_experiments.runs.run import Run
from gfsa_experiments.tasks import RECIPES
from support.hub import HubPart, fake_parts
from support.own_data import rings, write_everything
from support.snippets import commands_of
from support.tiny_texts import sentence
from support.train_command import train

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# they say where, not what
_PLACES = ("--data-dir", "--results", "--out", "--jobs", "--device")


def runs_of(words: list[str], folder: Path) -> list[Run]:
    words = list(words)
    for flag in _PLACES:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    plan = folder / "plan.txt"
    plan.write_text(shlex.join(words))
    return runs_of_plan(plan)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_are_accepted(page: Path, tmp_path: Path) -> None:
    for words in commands_of(page.read_text(encoding="utf-8")):
        if words[0] not in ("--list", "--plan"):
            assert runs_of(words, tmp_path), words


RECIPE_PAGES = Path(__file__).parents[2] / "docs" / "recipes"
HEADING = "\n## Your own data\n"
# settings that make a recipe's run a matter of a second; they replace those of the page
TINY: dict[str, dict[str, str]] = {
    "text": {"model": "./tiny-bert", "max_length": "16"},
    "code": {"model": "./tiny-roberta", "max_length": "16", "pad_to_multiple": "8", "epochs": ""},
    "image": {"depth": "1", "image_size": "32", "patch_size": "16", "workers": "0", "ema": "0"},
    "graph": {"depth": "1", "width": "16", "heads": "2"},
    "speech": {"width": "16", "heads": "2", "hidden": "32", "depth": "1", "decode": "greedy"},
    "pretrain": {
        "vocab_size": "300",
        "block": "16",
        "depth": "1",
        "width": "16",
        "heads": "2",
        "head_dim": "8",
        "mlp": "16",
        "precision": "fp32",
        "lr": "1e-2",
        "size": "",
    },
}
SCRATCH = {"depth": "1", "width": "16", "heads": "2", "vocab_size": "300", "lr": "1e-2"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_everything(tmp_path_factory.mktemp("own"))


def own_commands(page: Path) -> list[list[str]]:
    _, found, rest = page.read_text(encoding="utf-8").partition(HEADING)
    assert found, f"{page.name} has no section on the reader's own data"
    return commands_of(rest.partition("\n## ")[0])


def made_small(words: list[str]) -> list[str]:
    """A command of a page with a small model, one step, and the first of its methods."""
    recipe, *rest = words
    settings: dict[str, str] = {}
    while "--set" in rest:
        at = rest.index("--set")
        name, _, value = rest[at + 1].partition("=")
        settings[name] = value
        del rest[at : at + 2]
    small = dict(TINY.get(recipe, {}))
    if recipe == "causal_lm":
        small = {"block": "16"}
        small |= SCRATCH if settings.get("model") == "scratch" else {"model": "./tiny-gpt2"}
    if settings.get("model") == "gps":
        small["encoding_width"] = "4"
    settings |= small | {"max_steps": "2", "batch_size": "4", "epochs": "", "tensorboard": "false"}
    settings.pop("filter_lr", None)
    if "--method" in rest:
        rest[rest.index("--method") + 1] = "plain"
    pairs = [f"--set={name}={value}" for name, value in settings.items() if value]
    return [recipe, *rest, *pairs]


def distinct_commands() -> list[str]:
    """The commands of all pages."""
    pages = sorted(RECIPE_PAGES.glob("*.md"))
    return list(dict.fromkeys(shlex.join(words) for page in pages for words in own_commands(page)))


@pytest.mark.parametrize("command", distinct_commands())
def test_a_command_on_own_data_runs(
    command: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what is not on this disk: a data set of the hub and one that PyG would download
    texts = [sentence(number, 9) for number in range(90)]
    fake_parts(monkeypatch, {"train": HubPart(content=texts)})
    if "TUDataset" in command:
        import torch_geometric.datasets

        monkeypatch.setattr(torch_geometric.datasets, "TUDataset", lambda root, name: rings())
    monkeypatch.setenv("GFSA_CACHE", str(tmp_path / "cache"))
    # the command appends the working directory
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(data)
    code, output = train(tmp_path, *made_small(shlex.split(command)))
    assert code == 0, output
    (table,) = (tmp_path / "results").glob("*.csv")
    (row,) = read_rows(table)
    (splits,) = (tmp_path / "runs").rglob("splits.json")
    own = json.loads(splits.read_text())
    assert own["name"] in row.task.split()[0]
    assert set(own["splits"]) == {"train", "valid", "test"}
    assert f"data {own['name']}: " in output


def test_every_recipe_has_a_page_with_commands_or_a_link_to_them() -> None:
    pages = {page.stem: page for page in RECIPE_PAGES.glob("*.md")}
    assert set(pages) == set(RECIPES)
    for page in pages.values():
        assert own_commands(page) or ".md#your-own-data)" in page.read_text(encoding="utf-8"), page
