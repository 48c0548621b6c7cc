"""Run in a process that cannot import gfsa: exported programs alone, against what they should give.

python tests/scale/workers/exported.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

for missing in ("gfsa", "transformers"):
    # an import of it fails as if it were not installed
    sys.modules[missing] = None  # type: ignore[assignment]

import torch  # noqa: E402

for file in sorted(Path(sys.argv[1]).glob("*.pt2")):
    program = torch.export.load(file).module()
    for inputs, expected in torch.load(file.with_suffix(".pt")):
        torch.testing.assert_close(program(**inputs), expected, rtol=0, atol=1e-6)
    print(file.stem)
