"""The engines: one for each folder here that has an ``engine.toml``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Engine:
    """Where an engine's tests are, and what docs/engines.md says of it."""

    folder: Path
    title: str
    package: str
    """The distribution whose version is reported."""
    start: str
    """How a user starts, in Markdown."""
    page: str
    """The page about it, relative to the folder ``docs``."""
    remove: tuple[str, ...] = ()
    """Distributions that its requirements bring and that break it."""
    tests: tuple[str, ...] = (".",)
    """Where its tests are, relative to its folder."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def definition(self) -> tuple[Path, Path]:
        """The files on which its environment depends."""
        return self.folder / "requirements.txt", self.folder / "engine.toml"

    @property
    def findings(self) -> Path:
        return self.folder / "findings.json"


def _read(path: Path) -> Engine:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return Engine(path.parent, **{**content, **lists})


ENGINES = {
    path.parent.name: _read(path) for path in sorted(Path(__file__).parent.glob("*/engine.toml"))
}
