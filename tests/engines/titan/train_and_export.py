"""Train a tiny Llama with filters by torchtitan and export it: ``train_and_export.py FOLDER``.

``FOLDER`` becomes a transformers folder, for ``gfsa.from_pretrained`` or a server.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import runs
import tiny


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        assets = Path(scratch) / "assets"
        tiny.write_assets(assets, "llama")
        checkpoint = runs.seed(Path(scratch) / "seed", assets)
        shutil.copytree(runs.export(Path(scratch) / "export", assets, checkpoint), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
