"""The figures of docs/choosing_a_layout.md are those that `plan` gives."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from lightning_moe_ep import Layout
from lightning_moe_ep.cli.plan import run_plan
from lightning_moe_ep.tools.plan import planner
from lightning_moe_ep.tools.plan.layouts import Candidate
from tests.cli.processes import REPOSITORY

PAGE = (REPOSITORY / "docs" / "choosing_a_layout.md").read_text()
COMMANDS = dict(re.findall(r"^(\w+): lightning-moe-ep plan (.*)$", PAGE, re.MULTILINE))
"""What is typed for the models of the table, by the letter that stands for it."""

ROW = re.compile(r"^\| (\w) \| (\d+) \| ([\d,]+) \| `([^`]+)` \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", re.MULTILINE)
ROWS = ROW.findall(PAGE)


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 8 and {row[0] for row in ROWS} == {*COMMANDS}
    worlds, lengths = ([int(row[place].replace(",", "")) for row in ROWS] for place in (1, 2))
    assert max(worlds) >= 512 > 8 >= min(worlds) and max(lengths) >= 2**20 > 4096 >= min(lengths)


@pytest.mark.sweep
@pytest.mark.parametrize("row", [ROWS[1], ROWS[7]])  # two models, one of them with cp
def test_rows(row: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's layout alone, as `plan` has it among all others."""
    letter, world, length, sizes, peak, fastest, slowest = row
    length = length.replace(",", "")
    candidate = candidate_of(int(world), sizes)
    monkeypatch.setattr(planner, "candidates", lambda *_, cp: [candidate] if cp == candidate.layout.cp else [])
    monkeypatch.setattr(planner, "_confirm", lambda *_: None)
    batch = ["--world", world, "--length", length, "--tokens", length, "--cp", str(candidate.layout.cp)]
    monkeypatch.chdir(REPOSITORY)
    run_plan([*shlex.split(COMMANDS[letter]), *batch, "--json"])
    (told,) = json.loads(capsys.readouterr().out)["layouts"]
    assert told["too_large"] is None
    assert f"{told['memory']['peak'] / 2**30:.1f}" == peak
    memory = told["memory"]
    kept = (memory["parameters"] + memory["gradients"] + memory["optimizer"]) / 2**30
    if (letter, int(world) // candidate.layout.replicate) in (("A", 8), ("B", 64), ("C", 256)):
        assert re.search(rf"\b{kept:.1f}\b", PAGE.split("| model |")[0])
    assert (f"{told['seconds']['fastest']:.3g}", f"{told['seconds']['slowest']:.3g}") == (fastest, slowest)


def candidate_of(world: int, written: str) -> Candidate:
    """The candidate that the table has as arguments of the strategy, whose defaults it leaves out."""
    options: dict[str, Any] = eval(f"dict({written})")
    layout = Layout.for_world(world, ep=options["ep"], replicate=options.get("replicate", 1), cp=options.get("cp", 1))
    return Candidate(
        layout,
        dispatcher=options.get("dispatcher", "-"),
        reshard=options.get("reshard_after_forward", True),
        activation_checkpointing=options.get("activation_checkpointing", "none"),
    )
