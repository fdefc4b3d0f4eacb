"""Which cases of a matrix `make test` runs; `make sweep` runs the other families, `make more` all other cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_in_the_sweep(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values for `parametrize`, by families: all but those `kept` are marked for `make sweep`."""
    return [value if value in kept else _marked(value, pytest.mark.sweep) for value in values]


def mostly_more(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values for `parametrize`, by anything else: all but those `kept` are marked for `make more`."""
    return [value if value in kept else _marked(value, pytest.mark.more) for value in values]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=mark)
