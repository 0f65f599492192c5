"""Imports point one way: launcher -> runtime -> workers -> models -> ops. Read, not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOOR = {"ops": 0, "models": 1, "workers": 2, "runtime": 3, "launcher": 4}
DECIDING = ("launcher", "runtime")
TORCH_FREE = {
    "workers": {"config", "protocol", "channel", "orders", "probes", "timeline", "timings"},
    "models": {
        *("config", "config_reader", "registry", "partition", "headers", "gguf"),
        *("overlay", "shapes"),
    },
    "ops": set[str](),
}
"""All that launcher and runtime may know of the rooms that compute."""
MODULE_NAME = re.compile(r"unisono(\.[a-z_][a-z_0-9]*)+(:\w+)?")


class Use(NamedTuple):
    """One module that a file names: `where` is file and line, `imported` False for a string."""

    importer: str
    target: str
    where: str
    imported: bool


def test_every_import_points_down():
    assert list(faults(ROOT)) == []


def test_no_module_imports_itself_through_others():
    assert cycle(ROOT) == []


def test_init_files_of_rooms_are_empty():
    """Then importing `unisono.workers.protocol` drags nothing in."""
    inits = [path for room in FLOOR for path in (ROOT / room).rglob("__init__.py")]
    assert len(inits) >= len(FLOOR)
    assert [str(path) for path in inits if path.read_text().strip()] == []


def test_modules_named_in_strings_exist():
    """Registries and process tables name modules in strings, which no type checker reads."""
    named = [use for use in uses(ROOT) if not use.imported]
    assert [f"{use.where}: {use.target}" for use in named if not _exists(ROOT, use.target)] == []


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("ops/a.py", "from unisono.models.config import X", "ops may not import models"),
        ("models/a.py", "import unisono.workers.device", "models may not import workers"),
        (
            "workers/a.py",
            "def f():\n  from unisono.runtime import engine",
            "may not import runtime",
        ),
        ("runtime/a.py", "from unisono.workers.worker import W", "unisono.workers.worker"),
        ("runtime/a.py", "from unisono.workers import worker", "unisono.workers.worker"),
        ("launcher/a.py", "import unisono.ops.linear", "unisono.ops.linear"),
        ("launcher/a.py", "from unisono.models.layers import linear", "unisono.models.layers"),
        ("models/a.py", "import ops.linear", "bare import of ops"),
        ("models/a.py", "from ops import linear", "bare import of ops"),
        ("models/a.py", "from .config import X", "relative import"),
        ("models/a.py", "import tests.tiny", "bare import of tests"),
        ("ops/a.py", "from unisono import LLM", "unisono.LLM"),
        ("ops/a.py", "import unisono", "the public package"),
        ("models/a.py", 'NAME = "unisono.workers.entry:main"', "models may not name workers"),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else str(value),
)
def test_wrong_imports_are_found(tmp_path, file, source, fault):
    _checkout(tmp_path, {file: source})
    assert [fault in found for found in faults(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("launcher/a.py", "import unisono\nfrom unisono.runtime import engine"),
        ("models/a.py", "from unisono import __version__"),
        ("runtime/a.py", "from unisono.workers import config, protocol"),
        ("runtime/a.py", 'ENTRY = "unisono.workers.entry"'),
        ("workers/a.py", "import torch\nfrom unisono.ops.linear import linear"),
        ("ops/a.py", "from unisono.ops import reference"),
        ("ops/a.py", '"""Speaks of unisono.launcher.cli in a sentence."""'),
    ],
)
def test_right_imports_pass(tmp_path, file, source):
    _checkout(tmp_path, {file: source})
    assert list(faults(tmp_path)) == []


def test_cycles_are_found(tmp_path):
    _checkout(
        tmp_path,
        {
            "ops/a.py": "from unisono.ops.b import B",
            "ops/b.py": "def f():\n    from unisono.ops import a",
            "ops/c.py": "import unisono.ops.a",
        },
    )
    assert set(cycle(tmp_path)) == {"unisono.ops.a", "unisono.ops.b"}


def faults(root: Path) -> Iterator[str]:
    """Every import and module-naming string under `root` that breaks the order."""
    for use in uses(root):
        fault = _fault_of(use)
        if fault:
            yield f"{use.where}: {fault}"


def cycle(root: Path) -> list[str]:
    """The modules of one import cycle; empty if there is none. Local imports count."""
    graph: dict[str, set[str]] = {}
    for use in uses(root):
        if use.imported and use.target != use.importer:
            graph.setdefault(use.importer, set()).add(use.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def uses(root: Path) -> Iterator[Use]:
    for room in FLOOR:
        for path in sorted((root / room).rglob("*.py")):
            relative = path.relative_to(root)
            importer = ".".join(("unisono", *relative.with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text(), str(path))):
                for target, imported in _targets(root, node):
                    yield Use(importer, target, f"{relative}:{node.lineno}", imported)


def _targets(root: Path, node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Modules that one node names; `from package import module` names the module."""
    match node:
        case ast.Import():
            yield from ((alias.name, True) for alias in node.names)
        case ast.ImportFrom(level=0, module=str(module)):
            for alias in node.names:
                deeper = f"{module}.{alias.name}"
                is_module = module in _PACKAGES or _exists(root, deeper)
                yield (deeper if is_module else module), True
        case ast.ImportFrom():
            yield "." * node.level + (node.module or ""), True
        case ast.Constant(value=str(text)) if MODULE_NAME.fullmatch(text):
            yield text.partition(":")[0], False


_PACKAGES = {"unisono", *(f"unisono.{room}" for room in FLOOR)}


def _fault_of(use: Use) -> str:
    room = use.importer.split(".")[1]
    top, *rest = use.target.split(".")
    if not top:
        return f"relative import {use.target}"
    if top in FLOOR or top in ("tests", "scripts"):
        return f"bare import of {top}"
    if top != "unisono" or rest == ["__version__"]:
        return ""
    if not rest:
        return "" if room == "launcher" else f"{room} may not import the public package"
    if rest[0] not in FLOOR:
        return f"{use.target} is not a module of a room"
    if FLOOR[rest[0]] > FLOOR[room]:
        return f"{room} may not {'import' if use.imported else 'name'} {rest[0]}"
    allowed = TORCH_FREE.get(rest[0])
    known = rest[1:2] and rest[1] in (allowed or ())
    if use.imported and room in DECIDING and allowed is not None and not known:
        return f"{room} may not import {use.target}: of {rest[0]} only {sorted(allowed)}"
    return ""


def _exists(root: Path, module: str) -> bool:
    path = root.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _checkout(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
