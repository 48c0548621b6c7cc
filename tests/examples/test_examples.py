"""Every script and notebook of ``examples/`` runs and learns.

``make test`` runs the scripts with few steps in one process. ``make examples`` runs them as a
reader would, each by itself and with its defaults, and the notebooks; so does ``make slow``.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from support.launching import launch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# the arguments that make each short enough for `make test`
QUICK = {
    "diffusion": ["--steps", "30"],
    "lightning_module": ["--steps", "20"],
    "nanogpt": ["--steps", "20"],
    "pyg_gps": ["--epochs", "2"],
    "serve": ["--new-tokens", "8", "--backend", "eager"],
    "timm_finetune": ["--steps", "15"],
    # fewer steps than lie between two lines of their logs
    "trainer": ["--steps", "10"],
    "trl_sft": ["--steps", "4"],
}
LAUNCHED = "accelerate_fsdp2"
LAUNCHER = ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
LAUNCHER += ["--mixed_precision=no", "--dynamo_backend=no"]
NOTEBOOKS = ["does_my_model_oversmooth", "first_look"]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# what a reader waits at most; their own limit is a minute on a machine that does nothing else
LONGEST = 240.0


def check_output(name: str, printed: str) -> None:
    """The last line says what was learned; serving compares tokens itself."""
    if name == "serve":
        assert "the same" in printed
        return
    last = printed.strip().splitlines()[-1]
    moved = re.search(r"filters moved by up to (\d+\.\d+)$", last)
    assert moved, last
    assert float(moved[1]) > 0.01
    losses = re.search(r"loss (\S+) → (\S+);", last)
    if losses:
        assert float(losses[2]) < float(losses[1])


@pytest.mark.usefixtures("accelerate_alone")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_script(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *QUICK[name]])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    check_output(name, capsys.readouterr().out)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    script = EXAMPLES / f"{LAUNCHED}.py"
    printed = launch(LAUNCHER, script, "--steps=4", f"--out={tmp_path}")
    check_output(LAUNCHED, printed)
    assert (tmp_path / "filters" / "filters.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUICK))
def test_script_as_a_reader_runs_it(name: str, tmp_path: Path) -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    check_output(name, done.stdout)
    print(f"{name}: {time.perf_counter() - start:.0f} s")


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def executed(name: str, folder: Path) -> Any:
    """The notebook with fresh outputs; a cell that raises is an error. It runs in ``folder``."""
    notebook = read(name)
    place = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=int(LONGEST), kernel_name="python3", resources=place
    )
    client.execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _tidy(cell.outputs)
    return notebook


def _tidy(outputs: list[Any]) -> list[Any]:
    """What was printed as one text, without warnings; then the pictures."""
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    shown = [o for o in outputs if o.output_type != "stream"]
    text = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
    return [*text, *shown]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # a cell that raises is an error of the client
    found, kept = executed(name, tmp_path), read(name)
    assert [kinds_of(cell) for cell in found.cells] == [kinds_of(cell) for cell in kept.cells], (
        "a web page shows other outputs than a run: cd tests && python -m examples.test_examples"
    )
    assert sum("image/png" in kinds_of(cell) for cell in kept.cells) >= 2


def kinds_of(cell: Any) -> list[str]:
    """What a cell shows: text, pictures."""
    outputs = cell.get("outputs", [])
    return [kind for output in outputs for kind in sorted(output.get("data", {"text": ""}))]


def test_none_is_left_out() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {*QUICK, LAUNCHED}
    assert {p.stem for p in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


def test_nothing_of_this_machine_is_kept_in_a_notebook() -> None:
    for name in NOTEBOOKS:
        text = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
        assert len(text) < 250_000
        for place in (str(ROOT), str(Path.home()), os.sep + "tmp" + os.sep, "site-packages"):
            assert place not in text, place


def main() -> None:
    """Write the outputs of the notebooks into them, so that a web page shows the pictures."""
    for name in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(name, Path(folder))
        nbformat.validate(notebook)
        nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")


if __name__ == "__main__":
    main()
