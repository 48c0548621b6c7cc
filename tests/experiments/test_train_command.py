"""``gfsa train`` as it is typed, and what it says while it trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gfsa_experiments.commands.train import runs_of_plan
from gfsa_experiments.engine.config import TrainConfig, from_text, parse, settings_of
from gfsa_experiments.runs.row import Row, append_rows, read_rows
from gfsa_experiments.runs.sweep import Request, numbers_of
from gfsa_experiments.tasks import RECIPES
from support.toy_recipe import ToyTask
from support.train_command import train

TOY = "support.toy_recipe"


def test_methods_orders_and_seeds_are_all_run(tmp_path: Path) -> None:
    words = [TOY, "--method", "plain,gfsa", "--K", "2-3", "--seeds", "0,1", "--set", "epochs=1"]
    code, output = train(tmp_path, *words)
    assert code == 0
    assert "6 of 6 runs done" in output
    rows = read_rows(tmp_path / "results" / "toy.csv")
    # plain has no K: it is run once for each seed
    assert sorted((r.method, r.options, r.seed) for r in rows) == [
        ("gfsa", "", 0),
        ("gfsa", "", 1),
        ("gfsa", "K=2", 0),
        ("gfsa", "K=2", 1),
        ("plain", "", 0),
        ("plain", "", 1),
    ]
    code, output = train(tmp_path, *words, "--resume")
    assert code == 0
    assert output.count("finished before") == 6
    assert len(read_rows(tmp_path / "results" / "toy.csv")) == 6


@pytest.mark.parametrize("gains", [[], ["--set", "gain_lr=0.1"]])
def test_filters_with_a_fast_rate_are_compared_with_fast_gains(
    tmp_path: Path, gains: list[str]
) -> None:
    """Said once for all seeds, and before the data is looked for, which is not there."""
    data = ["--seeds", "0,1", "--data-dir", str(tmp_path)]
    words = ["--method", "gfsa", "--set", "filter_lr=0.1", *gains]
    code, output = train(tmp_path, "pretrain", *data, *words)
    assert code == 1
    assert "there is no techdocs" in output
    assert output.count("filter_lr=0.1 without gain_lr: filters learn fast") == (not gains)


def test_failures_do_not_take_the_others_along_and_a_shared_one_is_printed_once(
    tmp_path: Path,
) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text(
        f"# two lines\n{TOY} --method plain --set explode_at=3 --seeds 0-2\n\n"
        f"{TOY} --method gfsa  # fine\n"
    )
    code, output = train(tmp_path, "--plan", str(plan))
    assert code == 1
    assert "1 of 4 runs done" in output
    assert output.count("training has diverged") == 1
    assert "2 more runs for the reason of" in " ".join(output.split())
    rows = read_rows(tmp_path / "results" / "toy.csv")
    assert [math.isnan(row.test) for row in rows] == [row.method == "plain" for row in rows]
    assert len(rows) == 4


def test_a_killed_process_does_not_take_the_others_along(tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text(f"common --method plain\n{TOY} --set die=true\n{TOY} --set epochs=1\n")
    code, output = train(tmp_path, "--plan", str(plan), "--jobs", "2")
    assert code == 1
    assert "was killed" in output
    (row,) = read_rows(tmp_path / "results" / "toy.csv")
    assert row.settings == "epochs=1.0"


def test_a_damaged_table_is_found_before_training(tmp_path: Path) -> None:
    table = tmp_path / "results" / "toy.csv"
    words = [TOY, "--set", "epochs=1", "--seeds"]
    assert train(tmp_path, *words, "0")[0] == 0
    whole = table.read_bytes()
    # the system went down while a row was written
    table.write_bytes(whole[:-30] + whole.splitlines(keepends=True)[1])
    for more in ([], ["--missing"]):
        code, output = train(tmp_path, *words, "1", *more)
        assert code == 2
        assert "line 2: expected" in output
    assert not list((tmp_path / "runs").rglob("seed-1"))
    table.write_bytes(b"\xff\xfe")
    code, output = train(tmp_path, *words, "1")
    assert code == 2
    assert "toy.csv, after line 0: not CSV" in " ".join(output.replace("│", " ").split())


def test_a_row_that_cannot_be_added_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "results" / "toy.csv"

    def full_once(path: Path, rows: list[Row]) -> None:
        if rows[0].seed == 0:
            raise OSError("No space left on device")
        append_rows(path, rows)

    monkeypatch.setattr("gfsa_experiments.runs.sweep.append_rows", full_once)
    words = [TOY, "--set", "epochs=1", "--seeds", "0,1"]
    code, output = train(tmp_path, *words)
    assert code == 1
    assert "1 of 2 runs done" in output
    assert "row.json, --resume adds it: No space left" in " ".join(output.split())
    assert [row.seed for row in read_rows(table)] == [1]
    monkeypatch.undo()
    assert train(tmp_path, *words, "--resume")[0] == 0
    assert sorted(row.seed for row in read_rows(table)) == [0, 1]


@pytest.mark.parametrize(("interrupted_in", "told"), [(3, 0), (5, 4)])
def test_an_interrupted_run_is_said_to_go_on_where_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted_in: int, told: int
) -> None:
    """A run of one epoch, whose first checkpoint is written at its first evaluation."""
    words = [TOY, "--set", "epochs=1", "--set", "eval_every=0.67"]
    loss, calls = ToyTask.loss, iter(range(1, 100))

    def interrupted(self: ToyTask, model: Any, batch: Any) -> Any:
        if next(calls) == interrupted_in:
            raise KeyboardInterrupt
        return loss(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ToyTask, "loss", interrupted)
        code, output = train(tmp_path, *words)
    assert code == 130
    assert "interrupted; the same command with --resume goes on" in output
    code, output = train(tmp_path, *words, "--resume")
    assert code == 0
    assert (f"resumed after step {told}" if told else "begins with step 1") in output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "there is no recipe 'nothing'"),
        (["no.where"], "there is no module 'no' with a recipe"),
        (["support.tiny"], "support.tiny has no RECIPE"),
        ([TOY, "--method", "magic"], "there is no method 'magic'"),
        ([TOY, "--set", "epoch=3"], "did you mean epochs"),
        ([TOY, "--set", "epochs=many"], "epochs must be of type float"),
        ([TOY, "--set", "epochs"], "key=value"),
        ([TOY, "--set", "precision=int8"], "fp32, tf32, bf16, got"),
        ([TOY, "--set", "K=4"], "has such an option"),
        ([TOY, "--method", "degree1", "--K", "4"], "has such an option"),
        ([TOY, "--set", "seed=3"], "--seeds"),
        ([TOY, "--seeds", "a-b"], "0-4"),
        ([TOY, "--seeds", "0-2,9-7"], "--seeds takes numbers such as"),
        ([TOY, "--method", "gfsa", "--K", "1"], "K must be an integer of at least 2"),
        (
            [TOY, "--method", "gfsa", "--set", "learn="],
            "learn lists the coefficients that a filter learns",
        ),
        ([TOY, "--set", "epochs=1", "--set", "max_steps=3"], "both say when to stop"),
        ([TOY, "--set", "schedule=constant", "--set", "min_lr=0.1"], "min_lr (schedule=constant"),
        (["pretrain", "--method", "layerscale"], "cannot be applied to"),
        ([TOY, "--seeds", "0-999999999"], "at most 10000 numbers"),
        ([TOY, "--set", "epochs=1e308"], "epochs must lie in (0, 1000000000.0], got 1e+308"),
        ([], "--list"),
        ([TOY, "--plan", "x.txt"], f"leave {TOY} out"),
        (["--plan", "/nowhere/x.txt"], "No such file"),
        ([TOY, "--set", "batch_size=0"], "batch_size must lie in [1, inf), got 0"),
        ([TOY, "--set", "clip=nan"], "clip must lie in [0, inf), got nan"),
        ([TOY, "--set", "min_lr=inf"], "min_lr must lie in [0, inf), got inf"),
        ([TOY, "--each", "lr=1,2", "--each", "lr=3"], "lr given twice"),
        ([TOY, "--each", "lr=1,2", "--set", "lr=3"], "lr given twice"),
        ([TOY, "--set", "lr=1", "--set", "lr=1"], "lr given twice"),
        ([TOY, "--method", "gfsa", "--K", "2", "--set", "K=4"], "K given twice"),
        (["--plan", "x.txt", "--seeds", "0-4"], "--seeds would have no effect with --plan"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, words: list[str], told: str) -> None:
    code, output = train(tmp_path, *words)
    assert code == 2
    assert told in " ".join(output.replace("│", " ").split())


def test_the_list_names_every_recipe_and_method(tmp_path: Path) -> None:
    code, output = train(tmp_path, "--list")
    assert code == 0
    for name in (*RECIPES, "contranorm", "degree1"):
        assert name in output


def test_runs_side_by_side_give_the_numbers_of_runs_alone(tmp_path: Path) -> None:
    code, _ = train(tmp_path, TOY, "--seeds", "0-1", "--set", "epochs=1")
    assert code == 0
    alone = {row.seed: row.test for row in read_rows(tmp_path / "results" / "toy.csv")}
    from gfsa_experiments.runs.sweep import carry_out_all

    request = Request(TOY, seeds="0-1", setting=["epochs=1"])
    runs = request.runs(out=tmp_path / "beside", device="cpu", jobs=2)
    finished = list(carry_out_all(runs, jobs=2))
    assert {f.run.config.seed: f.row.test for f in finished if f.row} == alone


def test_text_becomes_typed_values() -> None:
    assert parse("x", "none", int | None) is None
    assert parse("x", "3", int | None) == 3
    assert parse("x", "a, b", tuple[str, ...]) == ("a", "b")
    assert parse("x", "yes", bool) is True
    assert numbers_of("--K", "2-4,7") == (2, 3, 4, 7)
    changed = from_text(TrainConfig, {"lr": "1e-3", "workers": "2"})
    assert settings_of(changed) == "lr=0.001"


def test_a_plan_shares_and_varies_settings(tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    plan.write_text(
        f"common --seeds 1 --set epochs=1\n{TOY} --method gfsa --each lr=1e-3,1e-2 --each K=2,4\n"
        f"common --method plain\n{TOY} --set epochs=3\n"
    )
    runs = runs_of_plan(plan, out=tmp_path)
    assert [(r.config.seed, r.config.epochs, r.config.lr, r.options.K) for r in runs] == [
        (1, 1, 1e-3, 2),
        (1, 1, 1e-3, 4),
        (1, 1, 1e-2, 2),
        (1, 1, 1e-2, 4),
        (0, 3, 1e-2, 3),
    ]


def test_missing_leaves_out_what_results_have(tmp_path: Path) -> None:
    words = [TOY, "--seeds", "0", "--set", "epochs=1"]
    assert train(tmp_path, *words)[0] == 0
    # on another machine: the results are there, the runs are not
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    words[2] = "0-1"
    code, output = train(tmp_path, *words, "--missing")
    assert code == 0
    assert "1 of 1 runs done" in output
    assert [row.seed for row in read_rows(tmp_path / "results" / "toy.csv")] == [0, 1]
    code, output = train(tmp_path, *words, "--missing")
    assert code == 0
    assert "has all of these runs" in output


def test_a_plan_says_which_line_is_wrong(tmp_path: Path) -> None:
    plan = tmp_path / "plan.txt"
    for line, message in (
        ("--sets epochs=1", "No such option: --sets"),
        ("--set", "--set.* requires an argument"),
        ("--seeds a-b", "--seeds takes numbers"),
        ("twice", "unexpected extra argument"),
        ("--jobs 2 --data-dir here", "a line of a plan takes .* --each; .* --jobs, --data-dir"),
        ("--help", "No such option: --help"),
    ):
        plan.write_text(f"{TOY}\n{TOY} {line}\n")
        with pytest.raises(ValueError, match=rf"plan\.txt:2: .*{message}"):
            runs_of_plan(plan)
    plan.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no runs"):
        runs_of_plan(plan)
    plan.write_bytes(bytes([200, 201]))
    with pytest.raises(ValueError, match=r"plan\.txt is not text in UTF-8"):
        runs_of_plan(plan)


@pytest.mark.parametrize(
    ("taken", "content", "message"),
    [
        ("runs", "", "runs is a file, not a folder"),
        ("results", "", "results is a file, not a folder"),
        ("results/toy.csv", "a,b\n1,2\n", "other columns"),
    ],
)
def test_what_is_in_the_place_of_results_is_found_before_training(
    tmp_path: Path, taken: str, content: str, message: str
) -> None:
    place = tmp_path / taken
    place.parent.mkdir(exist_ok=True)
    place.write_text(content)
    code, output = train(tmp_path, TOY)
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [place]
