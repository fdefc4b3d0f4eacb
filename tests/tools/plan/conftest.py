"""Processes of the plan's tests are copies of the one that tests, which has imported all that they need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lightning_moe_ep.tools.plan import apart


def _serve_in_a_copy(folder: str) -> int:
    process = os.fork()
    if not process:
        try:
            apart.serve(folder)
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="package", autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starting Python and importing torch takes longer than these tests; `test_exact` shows that it works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "_serve_elsewhere", _serve_in_a_copy)
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is without `processes`."""
    monkeypatch.setattr(apart, "_serve_elsewhere", SERVE_ELSEWHERE)


SERVE_ELSEWHERE = apart._serve_elsewhere
