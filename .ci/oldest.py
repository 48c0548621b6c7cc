"""The oldest versions that pyproject.toml declares: ``python .ci/oldest.py EXTRA|dependencies``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
for name in sys.argv[1:]:
    (line,) = re.findall(rf"^{name} = \[(.*)\]$", text, re.MULTILINE)
    print(*(f"{package}=={oldest}" for package, oldest in re.findall(r'"([\w-]+)>=([\d.]+)', line)))
