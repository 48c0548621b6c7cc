"""``gfsa demo`` and its task, the source of Python's own library."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gfsa
from gfsa.cli import build
from gfsa_experiments.tasks.pretrain.data import SOURCE, part_of, read_source
from gfsa_experiments.tasks.pretrain.model import ByteDecoder
from gfsa_experiments.tasks.pretrain.recipe import LanguageTask, StdlibConfig


def decoder(block: int = 16) -> ByteDecoder:
    torch.manual_seed(0)
    return ByteDecoder(depth=2, width=16, heads=2, block=block, init_std=0.2)


def test_modules_are_in_one_part_each_and_parts_are_large_enough() -> None:
    parts = read_source(SOURCE)
    sizes = {name: len(text) for name, text in parts.items()}
    assert sizes["train"] > 1_000_000
    assert min(sizes["valid"], sizes["test"]) > 100_000
    modules = [path.stem for path in SOURCE.glob("*.py")]
    assert {part_of(name) for name in modules} == set(parts)
    # the beginning of a module is in the part that its name says, and in no other
    for name in ("ast", "pickle", "socket", "tarfile", "argparse", "inspect"):
        text = (SOURCE / f"{name}.py").read_bytes()
        assert [part for part, found in parts.items() if text in found] == [part_of(name)]


def test_a_python_without_its_source_says_so(tmp_path: Path) -> None:
    (tmp_path / "ast.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match="expected the source of Python's standard library"):
        read_source(tmp_path)


@pytest.mark.parametrize("K", [None, 3])
def test_later_bytes_change_no_earlier_prediction(K: int | None) -> None:
    model = decoder()
    ids = torch.randint(0, 256, (2, 16))
    plain = model(ids)
    gfsa.plug(model, K=K)
    # a fresh filter is ordinary attention
    torch.testing.assert_close(model(ids), plain)
    with torch.no_grad():
        for graph_filter in gfsa.filters_of(model).values():
            graph_filter.theta += 0.3
    before = model(ids)
    assert not torch.allclose(before, plain, atol=1e-3)
    changed = ids.clone()
    changed[:, 10] = (ids[:, 10] + 1) % 256
    after = model(changed)
    torch.testing.assert_close(after[:, :10], before[:, :10])
    assert not torch.allclose(after[:, 10:], before[:, 10:], atol=1e-3)


def test_only_distances_between_bytes_count() -> None:
    """Rotated queries and keys: in a text that repeats itself every position sees the same."""
    model = decoder()
    attention = model.blocks[0].attention
    q, k, _ = attention.heads(torch.ones(1, 16, 16))
    scores = (q @ k.mT)[0, 0]
    for distance in range(4):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)


def test_bits_per_byte_is_the_loss_in_bits() -> None:
    config = StdlibConfig(depth=1, width=16, heads=2, block=16, eval_rows=4, test_rows=4)
    config.check()
    task = LanguageTask(config, Path())
    assert [len(task.splits[name]) for name in ("valid", "test")] == [4, 4]
    with torch.no_grad():
        task.model.embed.weight.zero_()
    task.model.requires_grad_(False)
    batch = task.first_examples(4)
    # every byte has the same probability, so each costs 8 bits
    score = task.score([task.predict(task.model, batch)])
    assert score["bits_per_byte"] == pytest.approx(8)
    assert float(task.loss(task.model, batch)) == pytest.approx(math.log(256))


runner = CliRunner()


def test_a_file_in_the_place_of_its_folder_is_refused(tmp_path):
    (tmp_path / "demo").touch()
    shown = runner.invoke(build(), ["demo", "--quick", "--out", str(tmp_path / "demo" / "inside")])
    assert shown.exit_code == 2
    assert "a file, not a folder" in " ".join(shown.output.replace("│", " ").split())


def test_quick_demo_compares_at_equal_steps_and_at_equal_time(tmp_path):
    shown = runner.invoke(build(), ["demo", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "demo.json").read_text())
    steps, time, cost = numbers["findings"]
    assert steps.startswith("At equal steps, exclusive + depth ends ")
    assert time.startswith("At equal time, exclusive + depth ends ")
    # no seed that the settings were chosen with
    assert {run["seed"] for run in numbers["runs"]} == {100, 101}
    ends = {run["method"]: run["curve"][-1][0] for run in numbers["runs"]}
    assert (ends["plain"], ends["exclusive + depth"]) == (20, 20)
    # plain trains for as long as the filtered model took, to a step
    ratio = float(cost.split("took ")[1].split(" ")[0])
    assert ends["plain for the same time"] == pytest.approx(20 * ratio, abs=1)
