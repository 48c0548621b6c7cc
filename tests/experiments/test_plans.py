"""From text to runs: what is checked before any data is read, and the plans behind our results."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.results.families import read_families
from gfsa_experiments.runs.methods import METHODS, Method, MethodConfig, check_fit, check_options
from gfsa_experiments.runs.row import Row, read_rows
from gfsa_experiments.runs.run import Key, Run
from gfsa_experiments.runs.sweep import Request, numbers_of

TOY = "support.toy_recipe"
RESULTS = Path(__file__).parents[2] / "results"
PLANS = sorted((RESULTS / "plans").glob("*.txt"))
TABLES = [
    path
    for path in sorted([*RESULTS.glob("*.csv"), *(RESULTS / "times").glob("*.csv")])
    if path.name != "bench.csv"
]


def runs_of(
    recipe: str, settings: str = "", *methods: str, orders: tuple[int, ...] = ()
) -> list[Run]:
    pairs = tuple(tuple(one.split("=", 1)) for one in settings.split())
    return Request(recipe, methods or ("plain",), orders=orders, settings=pairs).runs()  # type: ignore[arg-type]


# the results that are there


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_every_plan_of_ours_is_runs(plan: Path) -> None:
    assert runs_of_plan(plan)


def test_what_is_left_adds_up() -> None:
    """The table of the plans' page: its files are there, its last line is the sum of the others."""
    page = (RESULTS / "plans/README.md").read_text(encoding="utf-8")
    lines = page.partition("new runs | GPU s |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cell[0] for cell in cells] == [*map(str, range(1, len(cells))), ""]
    for file in re.findall(r"\]\(([^)]+)\)", "".join(lines)):
        assert (RESULTS / "plans" / file).exists(), file
    for at in (3, 4):
        *parts, total = (
            sum(int(number.replace(",", "")) for number in cell[at].split("+")) for cell in cells
        )
        assert sum(parts) == total


def test_there_are_plans_and_tables() -> None:
    assert len(PLANS) >= 9
    assert len(TABLES) >= 9


@pytest.mark.parametrize("table", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_command_of_every_row_is_still_its_run(table: Path, tmp_path: Path) -> None:
    # seeds make no difference here
    rows = {re.sub(r"--seeds \d+", "", row.command): row for row in read_rows(table)}
    for row in rows.values():
        (run,) = runs_of_command(row.command, tmp_path)
        assert run.key() == key_of(row)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_row_is_a_run_of_a_plan_or_a_family(table: Path) -> None:
    suffix = "-time" if table.parent.name == "times" else ""
    plan = RESULTS / "plans" / f"{table.stem}{suffix}.txt"
    # a table may have the runs of a family alone
    planned = {run.key() for run in runs_of_plan(plan)} if plan.exists() else set()
    planned |= keys_of_families()
    assert {key_of(row) for row in read_rows(table)} <= planned


@cache
def keys_of_families() -> set[Key]:
    """Read once: every family builds its runs."""
    return {key for family in read_families(RESULTS) for key in family.keys}


def runs_of_command(command: str, folder: Path) -> list[Run]:
    plan = folder / "plan.txt"
    plan.write_text(command.removeprefix("gfsa train "))
    return runs_of_plan(plan)


def key_of(row: Row) -> Key:
    return Key(row.recipe, row.task, row.method, row.options, row.settings, row.seed)


# when to stop


def test_epochs_that_are_given_count(tmp_path: Path) -> None:
    """LRA counts steps unless it is told otherwise."""
    (usual,) = runs_of("lra")
    assert (usual.config.max_steps, usual.key().settings) == (5000, "")
    (given,) = runs_of("lra", "epochs=3")
    assert (given.config.epochs, given.config.max_steps) == (3, 0)
    assert given.key().settings == "epochs=3.0 max_steps=0"
    # five are the default of all recipes, but not what LRA does
    (five,) = runs_of("lra", "epochs=5")
    assert five.config.max_steps == 0
    assert five.folder != usual.folder
    for run in (usual, given, five):
        assert [again.key() for again in runs_of_command(run.command, tmp_path)] == [run.key()]


@pytest.mark.parametrize("recipe", ["lra", "glue", "graph", TOY])
def test_two_ways_to_stop_are_one_too_many(recipe: str) -> None:
    with pytest.raises(ValueError, match="epochs=2 and max_steps=7 both say when to stop"):
        runs_of(recipe, "epochs=2 max_steps=7")
    (steps,) = runs_of(recipe, "max_steps=7")
    assert steps.config.max_steps == 7
    (epochs,) = runs_of(recipe, "epochs=2 max_steps=0")
    assert (epochs.config.epochs, epochs.config.max_steps) == (2, 0)


# seeds and orders


@pytest.mark.parametrize("text", ["0-2,9-7", "9-7", "0,,1", "", "1-", "-1", "0-2,"])
def test_a_part_without_numbers_is_no_list_of_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=f"--seeds takes numbers such as .*, got '{text}'"):
        numbers_of("--seeds", text)


def test_numbers_are_each_taken_once() -> None:
    assert numbers_of("--seeds", "0-2,7,1-3") == (0, 1, 2, 7, 3)


# options of methods


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("gfsa", "K=1", "K must be an integer of at least 2"),
        ("gfsa", "w0=nan", "w0 must be finite"),
        ("gfsa", "lr_multiplier=-1", "lr_multiplier must be a positive number"),
        ("gfsa", "filter_lr=-1", "filter_lr must be at least 0, got -1"),
        ("gfsa", "learn=w0,w0", "at most once"),
        ("gfsa", "learn=", "learn lists the coefficients that a filter learns"),
        ("gfsa-even", "learn=", "learn lists the coefficients that a filter learns"),
        ("pagerank", "alpha=7", "alpha is a probability"),
        ("pagerank", "hops=0", "hops must be an integer of at least 1"),
        ("polynomial", "degree=-1", "degree must be an integer of at least 0"),
        # ContraNorm calls it scale
        ("contranorm", "strength=nan", "cannot take strength=nan: scale must be a finite number"),
    ],
)
def test_options_that_no_model_takes_are_found_at_once(
    method: str, options: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        runs_of(TOY, options, method)


def test_orders_are_options_too() -> None:
    with pytest.raises(ValueError, match="method gfsa cannot take K=1: K must be"):
        runs_of(TOY, "", "plain", "gfsa", orders=(1, 2))


def test_every_method_passes_with_its_defaults_and_draws_no_number() -> None:
    state = torch.random.get_rng_state()
    for name in METHODS:
        check_options(name, MethodConfig())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_one_combination_has_no_use_for_may_be_meant_for_another() -> None:
    request = Request(
        "lra", settings=(("projected", "64"),), each=(("attention", "softmax,linformer"),)
    )
    softmax, linformer = request.runs()
    assert (softmax.config.projected, linformer.config.projected) == (256, 64)
    # the row of one that does not use it is that of a run that was not given it
    assert softmax.key() == Request("lra", settings=(("attention", "softmax"),)).runs()[0].key()
    runs = Request("lra", ("gfsa",), orders=(2, 4), each=(("learn", "w0,wK"),)).runs()
    assert [(run.options.learn, run.options.K) for run in runs] == [
        (("w0",), 3),
        (("wK",), 2),
        (("wK",), 4),
    ]
    for each in (("attention", "softmax,efficient"), ("depth", "1,2")):
        with pytest.raises(ValueError, match=r"projected \(only attention=linformer"):
            Request("lra", settings=(("projected", "64"),), each=(each,)).runs()


def test_without_its_term_the_order_is_nobodys_option() -> None:
    for settings, orders in (
        ("learn=w0,w1 K=4", ()),
        ("learn=w0 power=exact", ()),
        ("learn=w1", (2,)),
    ):
        with pytest.raises(ValueError, match=r"(K|power) \(none .* such an option with learn=w"):
            runs_of(TOY, settings, "gfsa", orders=orders)
    # for a method that has the term it is one; the other is run once
    runs = runs_of(TOY, "learn=w0", "gfsa", "gfsa-published", orders=(2, 4))
    assert [(run.method, run.options.K) for run in runs] == [
        ("gfsa", 3),
        ("gfsa-published", 2),
        ("gfsa-published", 4),
    ]


# where to run


def test_a_device_that_is_none_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'gpu'"):
        Request(TOY).runs(device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        Request(TOY, each=(("lr", "1,2"),)).runs(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Request(TOY).runs(device="cuda")


# models


@pytest.mark.parametrize("method", ["gfsa", "polynomial", "attnscale"])
def test_a_map_that_is_not_square_takes_no_filter(method: str) -> None:
    with pytest.raises(ValueError, match="cannot be applied to listops linformer") as caught:
        runs_of("lra", "attention=linformer", "plain", method)
    # two layers are enough to see why
    assert "blocks.1" in str(caught.value)
    assert "blocks.2" not in str(caught.value)
    assert len(runs_of("lra", "attention=linformer", "plain")) == 1
    assert len(runs_of("lra", "attention=efficient", "plain", "gfsa")) == 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("model=resnet18", "cannot be applied to folder resnet18: found no self-attention"),
        ("model=convit_tiny", "cannot be applied to folder convit_tiny: .*no adapter knows GPSA"),
        ("model=deit_huge", "timm has no model 'deit_huge'; short names here: deit_tiny"),
        ("model=resnet18 dataset=cifar10", "timm cannot build resnet18 with .*image_size=32"),
        ("model=swinv2_tiny_window8_256 image_size=224", "timm cannot build .* image_size=224"),
        ("model=levit_128s image_size=250", "cannot take images of image_size=250 .* own is 224"),
        ("model=efficientvit_b0", "timm cannot build efficientvit_b0 with drop_path=0.1"),
    ],
)
def test_models_that_cannot_be_are_found_before_the_first_run(settings: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){told}"):
        runs_of("image", settings, "plain", "gfsa")


def test_other_models_of_timms_have_their_own_size() -> None:
    (run,) = runs_of("image", "model=swinv2_tiny_window8_256", "gfsa")
    assert run.config.size == 256  # type: ignore[attr-defined]
    (run,) = runs_of("image", "model=resnet18", "plain")
    assert run.config.size == 224  # type: ignore[attr-defined]


def test_without_timm_nothing_is_said_about_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr("gfsa_experiments.tasks.image.recipe.find_spec", lambda name: None)
    assert len(runs_of("image", "model=deit_huge", "plain", "gfsa")) == 2


def test_looking_at_a_model_draws_no_number() -> None:
    state = torch.random.get_rng_state()
    runs_of("image", "model=deit_tiny depth=1", "gfsa")
    runs_of("lra", "", "gfsa")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_method_that_needs_numbers_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(model: nn.Module, options: MethodConfig) -> int:
        return int(next(model.parameters()).sum().item())

    monkeypatch.setitem(METHODS, "looking", Method("looking", "looks at weights", looks))
    with torch.device("meta"):
        check_fit("looking", MethodConfig(), nn.Linear(2, 2), "a line")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("num_heads=7", "dim 512 must be a multiple of num_heads 7"),
        ("dropout=1.5", "dropout must lie in"),
        ("attention=efficient attention_dropout=0.1", "never builds the map"),
    ],
)
def test_sizes_that_do_not_fit_are_found_at_once(settings: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        runs_of("lra", settings)


def test_a_command_has_blanks_and_quotes(tmp_path: Path) -> None:
    (run,) = Request("glue", settings=(("model", "my models/bert"),)).runs()
    assert shlex.split(run.command)[-1] == "model=my models/bert"
    assert runs_of_command(run.command, tmp_path)[0].key() == run.key()
