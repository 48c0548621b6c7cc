"""The notebooks of ``examples/``, executed; ``python -m support.notebooks`` writes their outputs.

Outputs are kept in the files, so that a web page shows the pictures. What differs from machine to
machine (warnings, times, versions) is not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST = 240
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def executed(name: str, folder: Path) -> Any:
    """The notebook with fresh outputs; a cell that raises is an error. It runs in ``folder``."""
    notebook = read(name)
    place = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=LONGEST, kernel_name="python3", resources=place
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


def main() -> None:
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path.stem, Path(folder))
        nbformat.validate(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
