"""Processes of the plan's tests are forked from one that has imported all that they need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_moe_ep.tools.plan import apart
from tests.forks import forked


def _serve_in_a_fork(folder: str) -> int:
    forked(apart.serve, folder, timeout=240)
    return 0


@pytest.fixture(scope="package", autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starting Python and importing torch takes longer than these tests; `test_exact` shows that it works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "_serve_elsewhere", _serve_in_a_fork)
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is without `processes`."""
    monkeypatch.setattr(apart, "_serve_elsewhere", SERVE_ELSEWHERE)


SERVE_ELSEWHERE = apart._serve_elsewhere
