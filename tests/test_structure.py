"""The shape of the package, read from its imports: no room knows one above or beside it."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_moe_ep

NAME = "lightning_moe_ep"
ROOT = Path(lightning_moe_ep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400

FLOORS = {
    "__main__": 8,
    "__init__": 8,
    "cli": 7,
    "tools": 6,
    "strategy": 5,
    "parallelize": 4,
    "planning": 4,
    "launch": 4,
    "precision": 3,
    "initialization": 2,
    "checkpoint": 3,
    "context_parallel": 3,
    "mesh": 2,
    "lora": 2,
    "optimizers": 2,
    "towers": 2,
    "units": 2,
    "activation_checkpointing": 1,
    "transformers_models": 1,
    "callbacks": 2,
    "causal_lm": 4,
    "kernels": 2,
    "layout": 1,
    "shards": 1,
    "experts": 1,
    "dispatch": 1,
    "fsdp": 1,
    "gradients": 1,
    "balance": 0,
    "fake_tensors": 0,
    "data": 1,
    "remember": 0,
    "other_lightning": 0,
    "faults": 0,
    "rows": 0,
    "trees": 0,
}
"""A room may import from itself and from rooms of lower floors."""


def module_of(file: Path) -> str:
    parts = [NAME, *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(file: Path) -> Iterator[tuple[str, str | None]]:
    """Each `(module, name)` that the file imports, anywhere in it; the name is None for `import module`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)


def own_imports(file: Path) -> set[str]:
    """The modules of the package that the file imports."""
    found = set()
    for module, name in imports(file):
        if module.split(".")[0] == NAME:
            submodule = f"{module}.{name}"
            found.add(submodule if submodule in MODULES else module)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_room_imports_upward_or_sideways(module: str) -> None:
    room = room_of(module)
    assert room in FLOORS, f"give the room {room} a floor"
    for imported in own_imports(MODULES[module]):
        other = room_of(imported)
        assert other == room or FLOORS[other] < FLOORS[room], (
            f"{module} (floor {FLOORS[room]}) imports {imported} (floor {FLOORS[other]})"
        )


def circle_in(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for imported in sorted(graph[module]):
            if circle := visit(imported, [*path, module]):
                return circle
        done.add(module)
        return None

    return next((circle for module in graph if (circle := visit(module, []))), None)


def test_no_import_circle() -> None:
    assert circle_in({module: own_imports(file) for module, file in MODULES.items()}) is None
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("module", MODULES)
def test_files_are_short(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


def test_no_module_is_named_utils() -> None:
    assert not [module for module in MODULES if re.search(r"\b(utils?|helpers?|common|misc)\b", module)]


def private_names(file: Path) -> Iterator[tuple[str, str]]:
    """`(module, name)` of what the file imports from private places of torch and lightning."""
    for module, name in imports(file):
        parts = [*module.split("."), *([name] if name else [])]
        if parts[0] in ("torch", "lightning") and any(re.match(r"_[a-zA-Z]", part) for part in parts):
            yield module, name or ""


PRIVATE = {module: sorted(private_names(file)) for module, file in MODULES.items() if any(private_names(file))}


def test_private_names_are_imported_in_one_file_each() -> None:
    where = defaultdict(set)
    for module, names in PRIVATE.items():
        for private, _ in names:
            where[private].add(module)
    assert where, "none found: does this test still read what it should?"
    assert not {private: modules for private, modules in where.items() if len(modules) > 1}


@pytest.mark.parametrize("module", PRIVATE)
def test_private_names_exist_and_say_when_they_were_read(module: str) -> None:
    for private, name in PRIVATE[module]:
        assert not name or hasattr(importlib.import_module(private), name), f"{private}.{name} has moved"
        library = private.split(".")[0]
        assert re.search(rf"# Private; read at {library} \d+\.\d+", MODULES[module].read_text())
