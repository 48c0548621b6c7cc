"""Imports point one way, from a user to what it uses; adapters alone import frameworks.

operators and kernels ← filters ← functional, plugs ← adapters ← engines, lens ← cli, info, serve ←
experiments, and benchmarks may import all of them. The registry of plugs imports an adapter when
its framework has been imported, and not before. The library reaches models and baselines of the
experiments by the names ``gfsa.models`` and ``gfsa.baselines`` alone.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gfsa

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "src", ROOT / "experiments" / "src", ROOT / "benchmarks" / "src"]

CORE = {"_version", "kernels", "operators", "filters", "plugs"}
EVERYTHING = {"gfsa", "functional", "environment", "adapters", "lens", *CORE}
# parts of the experiments that need nothing of the rest
OF_EXPERIMENTS = {"gfsa_experiments.baselines", "gfsa_experiments.models"}
# what each package (or module of the library) may import of ours, besides itself; "gfsa" is the
# library's __init__
MAY_IMPORT = {
    "_version": set(),
    "operators": {"_version", "kernels"},
    "kernels": {"_version", "operators"},
    "filters": {"operators"},
    "functional": {"kernels", "operators", "filters"},
    "plugs": CORE,
    "adapters": CORE,
    "lens": {*CORE, "adapters"},
    "engines": {*CORE, "adapters"},
    "titan": CORE,
    "environment": {"gfsa"},
    "gfsa": {*EVERYTHING, *OF_EXPERIMENTS} - {"environment"},
    "info": EVERYTHING,
    "tune": CORE,
    "cli": {*EVERYTHING, "info", "tune"},
    "__main__": {"cli"},
    "gfsa_experiments.models": CORE,
    "gfsa_experiments.baselines": {*CORE, "gfsa_experiments.models"},
    "gfsa_experiments": {*EVERYTHING, "info", *OF_EXPERIMENTS},
    "gfsa_benchmarks": {*EVERYTHING, "info", "gfsa_experiments", *OF_EXPERIMENTS},
}

# modules that import a framework when they are imported; others import these inside functions
FRAMEWORK_MODULES = {
    "gfsa.engines.megatron": {"megatron"},
    "gfsa.engines.vllm.layers": {"vllm"},
    "gfsa.engines.vllm.config": {"vllm"},
    "gfsa.engines.vllm.models": {"vllm"},
    "gfsa.info": {"typer"},
    "gfsa.lens.command": {"typer"},
    "gfsa.tune": {"typer"},
    "gfsa.lens.figures": {"matplotlib"},
    "gfsa.adapters.diffusers": {"diffusers"},
    "gfsa.adapters.timm": {"timm"},
    "gfsa.adapters.transformers.adapter": {"transformers"},
    "gfsa.adapters.transformers.masks": {"transformers"},
    "gfsa.adapters.transformers.functions": {"transformers"},
    "gfsa.adapters.transformers.cache": {"transformers"},
    "gfsa.titan": {"safetensors", "spmd_types", "torchtitan"},
}

# imports a module by its name because the name is an argument of the user, a public name (gfsa),
# a command (gfsa.cli) or the adapter of a library (gfsa.plugs.registry)
BY_NAME = {
    "gfsa",
    "gfsa.cli",
    "gfsa.lens.sources",
    "gfsa.plugs.registry",
    "gfsa_experiments.tasks",
    "gfsa_experiments.tasks.graph.data",
}


@dataclass(frozen=True)
class Import:
    """One name that a module imports."""

    module: str
    """The module that imports."""
    target: str
    """What it imports, as far as it is a module."""
    line: int
    when: str
    """``"import"``: with the module; ``"call"``: in a function; ``"typing"``: never."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    found = {}
    for source in SOURCES:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(module: str) -> Iterator[Import]:
    def walk(node: ast.AST, when: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = when
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = "call"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "typing"
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, child.lineno, when)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{module}:{child.lineno} is a relative import"
                for alias in child.names:
                    inside = f"{child.module}.{alias.name}"
                    target = inside if inside in MODULES else str(child.module)
                    yield Import(module, target, child.lineno, when)
            yield from walk(child, inner)

    yield from walk(ast.parse(MODULES[module].read_text(encoding="utf-8")), "import")


IMPORTS = [found for module in MODULES for found in imports_of(module)]


def package_of(module: str) -> str:
    """The part of the library, or the distribution, that a module belongs to."""
    own = ".".join(module.split(".")[:2])
    if own in OF_EXPERIMENTS:
        return own
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] or top if top == "gfsa" else top


def finds_adapters(found: Import) -> bool:
    return found.module == "gfsa.plugs.registry" and found.when == "call"


def test_every_package_has_its_place() -> None:
    assert {package_of(module) for module in MODULES} == set(MAY_IMPORT)


def test_no_back_edge() -> None:
    ours = [found for found in IMPORTS if found.target in MODULES]
    assert len(ours) > 500
    back = [
        str(found)
        for found in ours
        if package_of(found.target) not in MAY_IMPORT[package_of(found.module)]
        and package_of(found.target) != package_of(found.module)
        and not (finds_adapters(found) and package_of(found.target) == "adapters")
    ]
    assert not back, "\n".join(back)


def test_no_cycle_of_modules() -> None:
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        # from gfsa import …: the names of the library, which import nothing of its users
        if found.target in MODULES and found.target != "gfsa" and found.when != "typing":
            edges[found.module].add(found.target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(edges[module] - {module}):
                visit(target, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    importing = re.compile(r"\b(import_module|__import__|EntryPoint)\(f?(.*)")
    for module in set(MODULES) - set(BY_NAME):
        text = MODULES[module].read_text(encoding="utf-8")
        if calls := importing.findall(text):
            strings = re.findall(r"""["'](gfsa\w*(?:\.\w+)+(?::\w+)?)["']""", text)
            assert not strings, (module, strings)
            assert not [given for _, given in calls if given.startswith('f"')], module


def test_frameworks_are_imported_by_their_adapter_or_command_only() -> None:
    free = {"torch", "triton", "gfsa", *sys.stdlib_module_names}
    library = EVERYTHING | {"info", "tune", "cli", "engines", "titan"}
    loaded: dict[str, set[str]] = {}
    for found in IMPORTS:
        top = found.target.partition(".")[0]
        if package_of(found.module) in library and found.when == "import":
            assert found.target not in FRAMEWORK_MODULES or found.module in FRAMEWORK_MODULES, found
            if top not in free:
                loaded.setdefault(found.module, set()).add(top)
    assert loaded == FRAMEWORK_MODULES


def test_every_file_names_the_same_version() -> None:
    path = ROOT / ".ci" / "check_distributions.py"
    checks = runpy.run_path(str(path))
    assert checks["version_of_tree"]() == gfsa.__version__
    assert checks["problems_of_texts"](gfsa.__version__) == []
