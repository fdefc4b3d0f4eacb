"""Which cases of a matrix `make test` runs; `make sweep` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_in_the_sweep(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values for `parametrize`, all but those `kept` marked for the sweep."""
    return [value if value in kept else _in_the_sweep(value) for value in values]


def _in_the_sweep(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.sweep)
