"""The paragraph about probes follows their rows: what excludes 0 is said, and what does not."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from gfsa_experiments.results.pretraining.collect import RUN
from gfsa_experiments.results.pretraining.study import Study, read_study
from gfsa_experiments.results.pretraining.where import WORDS, longest_probed, where
from gfsa_experiments.tasks.pretrain.recipe import PretrainConfig
from support.pretraining_runs import probe_lines, runs

RESULTS = Path(__file__).parents[2] / "results"
NONE = pd.DataFrame()
NOISE = (0.01, -0.01, 0.0, 0.005)


def study(more: float, sink: float = 1.0) -> Study:
    """GFSA's losses differ from plain's by ``more`` and noise; its sinks are ``sink`` times."""
    table = runs({"15M": (10,)}, lambda x: -0.1, range(4))
    lines = []
    for run in table.to_dict("records"):
        filtered = run["arm"] == "GFSA"
        own = {name: run[name] for name in RUN}
        change = more + NOISE[run["seed"]] if filtered else 0.0
        for line in probe_lines(run["arm"], run["seed"], change):
            if filtered and line["probe"] == "sink":
                noisy = sink + NOISE[run["seed"]]
                line["values"] = " ".join(str(noisy * float(v)) for v in line["values"].split())
            lines.append({**line, **own})
    return Study(table, NONE, pd.DataFrame(lines), NONE, NONE, [])


def test_what_differs_is_said_with_its_size() -> None:
    said = where(study(-0.3, 0.5))
    assert "probes after 10.0 tokens per parameter" in said
    assert "GFSA: loss of tokens from 128 on −0.29" in said
    assert "attention on the first token 0.200 → 0.100" in said
    assert "Copying from earlier in the row differs: GFSA, repeated random tokens −0.29" in said


def test_what_does_not_differ_is_not_said_to() -> None:
    said = where(study(0.0))
    assert "GFSA: none." in said
    assert "(repeated random tokens and recalled pairs) is not shown to differ" in said
    assert "tokens from 128 on" in said.partition("Not shown to differ, either: ")[2]


def test_without_an_interval_nothing_is_said() -> None:
    found = study(-0.3)
    one = found.probes[found.probes.seed == 0]
    assert where(Study(found.runs, NONE, one, NONE, NONE, [])) == ""
    assert where(Study(found.runs, NONE, NONE, NONE, NONE, [])) == ""


def test_our_paragraph_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measure of the probes that excludes 0 for a filter is in it, and no other."""
    monkeypatch.setattr(PretrainConfig, "sketch", lambda config: None)
    ours = read_study(RESULTS)
    said, found = where(ours), longest_probed(ours)
    assert found is not None
    assert said in (RESULTS / "pretraining-details.md").read_text("utf-8")
    for arm, name in (("degree 1", "Degree 1: "), ("GFSA", "GFSA: ")):
        own = said.partition(name)[2].split(". ")[0]
        for measure in found.measures:
            words = WORDS.get(measure.name, measure.name.removeprefix("loss, "))
            if "time" not in words:
                assert (words in own) == measure.differences[arm].interval.excludes_zero, words
