"""Every program in examples/ runs as it is and learns what it says, and so does the notebook."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.processes import REPOSITORY, run_python

RESULTS = {
    "own_model.py": (r"^mean squared error (\d\.\d{4}) ", 0.05),
    "own_dispatcher.py": (r"^mean squared error (\d\.\d{4}) ", 0.05),
    "own_experts.py": (r"^mean squared error (\d\.\d{4}) ", 0.05),
    "routing_collapse.py": (r"^balanced: 0 of 64 experts dead, the busiest does (\d\.\d) times", 2.5),
}
"""By program: where its result is in what it prints, and what it has to be below."""


def test_every_example_is_known() -> None:
    assert {path.name for path in (REPOSITORY / "examples").glob("*.py")} == RESULTS.keys()


@pytest.mark.more
@pytest.mark.parametrize("name", RESULTS)
def test_example(name: str, tmp_path: Path) -> None:
    pattern, limit = RESULTS[name]
    (printed,) = run_python([str(REPOSITORY / "examples" / name)], cwd=tmp_path)
    (result,) = re.findall(pattern, printed, flags=re.MULTILINE)
    assert float(result) < limit, printed
    assert list(tmp_path.iterdir()) == []
    if name == "routing_collapse.py":
        ((dead, busiest),) = re.findall(r"^left alone: (\d+) of 64 .* does (\d\.\d) times", printed, flags=re.MULTILINE)
        assert int(dead) > 16 and float(busiest) > 4 and "alert: 1" in printed, printed


@pytest.mark.more
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(REPOSITORY / "examples" / "notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "clear the outputs"
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    (first,) = re.findall(r"^after 150 steps: (\d\.\d{3}) nats", printed, flags=re.MULTILINE)
    ((second, before),) = re.findall(
        r"^after 225 steps: (\d\.\d{3}) .*before (\d\.\d{3})$", printed, flags=re.MULTILINE
    )
    assert float(second) < float(first) == float(before) < 2.5, printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
