"""The commands whose output the README shows print what it shows."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.cli.processes import REPOSITORY, run_python

SHOWN = dict(
    re.findall(r"```\n\$ lightning-moe-ep (\S[^\n]*)\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
)


def test_both_are_there() -> None:
    assert [command.split()[0] for command in SHOWN] == ["plan", "verify"]


@pytest.mark.more
@pytest.mark.parametrize("command", SHOWN)
def test_prints_what_is_shown(command: str) -> None:
    """Line by line but for seconds, and for the errors of `verify`, which are round-off."""
    (printed,) = run_python(["-m", "lightning_moe_ep", *shlex.split(command)], cwd=REPOSITORY)
    lines = [_without_numbers(line) for line in printed.splitlines()]
    for line in SHOWN[command].splitlines():
        assert line == "..." or _without_numbers(line) in lines, f"{line}\nis not in\n{printed}"


def _without_numbers(line: str) -> str:
    if match := re.match(r"  \d\.\de[-+]\d\d  (.{30})", line):
        return match[1].split("  ")[0]
    return re.sub(r", \d+ s$", "", line)
