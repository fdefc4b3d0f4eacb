"""What of Lightning works under the strategy, and what is refused: docs/lightning.md, written from the tests.

`python -m tests.contract` writes it. Each line of the table stands on a test, as a decorator, so that the table says
nothing that no test shows.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).parents[1]
DOCUMENT = REPOSITORY / "docs" / "lightning.md"

AREAS = (
    "Loops",
    "Data",
    "Gradients",
    "Optimizers",
    "Precision",
    "Callbacks",
    "Loggers",
    "Compilation and memory",
    "Launch",
    "Notebooks",
    "Errors",
    "Restarts",
    "Models",
    "Seeds",
)
"""In the order of the table."""

HEAD = """# What of Lightning works

Every line is a test; `python -m tests.contract` writes this file from them. What is refused raises an error as early as
it is known, which says what to do instead.
"""

F = TypeVar("F", bound=Callable[..., Any])


def contract(area: str, what: str, how: str = "works") -> Callable[[F], F]:
    """A line of the table, on the test that shows it; the arguments are literals.

    Args:
        area: one of `AREAS`.
        what: the flag, hook or class of Lightning, as a user knows it.
        how: "works", and with what difference; or "refused:" and what to do instead.
    """
    assert area in AREAS, f"{area!r} is not one of {AREAS}"
    return lambda test: test


@dataclass(frozen=True)
class Row:
    area: str
    what: str
    how: str
    test: str
    """Path and name of the function."""


def rows() -> list[Row]:
    """All lines, read from the sources of the tests."""
    found = []
    for file in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "contract":
                    texts = [ast.literal_eval(argument) for argument in decorator.args]
                    area, what, how = texts if len(texts) == 3 else (*texts, "works")
                    found.append(Row(area, what, how, f"{file.relative_to(REPOSITORY)}::{node.name}"))
    return found


def document(of: list[Row]) -> str:
    """The file's text."""
    parts = [HEAD]
    for area in AREAS:
        lines = [f"| {row.what} | {row.how} |" for row in of if row.area == area]
        if lines:
            parts.append("\n".join([f"## {area}", "", "| | |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document(rows()))
