"""What a type checker of the user's makes of the public functions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

# as transformers declares them
TRANSFORMERS = """
from os import PathLike
from typing import TypeVar

Specific = TypeVar("Specific", bound="PreTrainedModel")

class PreTrainedModel:
    @classmethod
    def from_pretrained(
        cls: type[Specific], name: str | PathLike[str] | None, *args, force_download: bool = ...
    ) -> Specific: ...

class BertModel(PreTrainedModel): ...
class GeneratingModel(PreTrainedModel): ...

class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *args, **kwargs) -> GeneratingModel: ...
"""
PROGRAM = """
import transformers
from gfsa.plugs.saving.pretrained import from_pretrained

reveal_type(from_pretrained(transformers.BertModel, "folder"))
reveal_type(from_pretrained(transformers.AutoModelForCausalLM, "folder"))
from_pretrained("BertModel", "folder")
"""


def test_from_pretrained_gives_what_the_class_gives(tmp_path: Path) -> None:
    stubs, program = tmp_path / "transformers.pyi", tmp_path / "program.py"
    stubs.write_text(TRANSFORMERS)
    program.write_text(PROGRAM)
    from gfsa.plugs.saving import pretrained

    # of everything else, torch included, nothing is read: that would take half a minute
    options = ["--follow-imports=skip", "--cache-dir", str(tmp_path / "cache"), "--config-file="]
    files = [str(program), str(stubs), pretrained.__file__]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    shown = [line for line in ran.stdout.splitlines() if line.startswith("program.py")]
    assert re.findall(r'Revealed type is "(.*)"', "\n".join(shown)) == [
        "transformers.BertModel",
        "transformers.GeneratingModel",
    ]
    assert "program.py:7: error" in "\n".join(shown)
