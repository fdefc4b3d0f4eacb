"""Every program in examples/ runs as it is and learns what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.processes import REPOSITORY, run_python
from tests.matrix import mostly_more

RESULTS = {
    "own_model.py": (r"^mean squared error (\d\.\d{4}) ", 0.05),
    "own_dispatcher.py": (r"^mean squared error (\d\.\d{4}) ", 0.05),
    "own_experts.py": (r"^mean squared error (\d\.\d{4}) ", 0.05),
}
"""By program: where its result is in what it prints, and what it has to be below."""


def test_every_example_is_known() -> None:
    assert {path.name for path in (REPOSITORY / "examples").glob("*.py")} == RESULTS.keys()


@pytest.mark.parametrize("name", mostly_more(RESULTS, "own_model.py"))
def test_example(name: str, tmp_path: Path) -> None:
    pattern, limit = RESULTS[name]
    (printed,) = run_python([str(REPOSITORY / "examples" / name)], cwd=tmp_path)
    (result,) = re.findall(pattern, printed, flags=re.MULTILINE)
    assert float(result) < limit, printed
    assert list(tmp_path.iterdir()) == []
