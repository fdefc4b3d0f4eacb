"""The line between ranks, in one process: who hears of what, and what is no failure."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_moe_ep.launch import line as lines
from lightning_moe_ep.launch.line import Hub, Line, Report, how_it_ended
from tests.forks import CONTEXT

SILENCE = 0.3


class Rank:
    def __init__(self, rank: int, hub: Hub | SimpleNamespace) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.line = Line(
            rank,
            hosts=["127.0.0.1"],
            port=hub.port,
            token=hub.token,
            on_first=self.heard.put,
            on_same=lambda: self.heard.put("same"),
        )

    def hears(self) -> Any:
        return self.heard.get(timeout=20)

    def die(self) -> None:
        """As the system closes the connection of a process that ends."""
        self.line._has_left = True  # it is not there to hear
        self.line._lines.socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    hub = Hub(3, host="127.0.0.1")
    made = [Rank(rank, hub) for rank in range(3)]
    yield made
    for rank in made:
        rank.line.leave()


def silent(ranks: list[Rank]) -> bool:
    try:
        for rank in ranks:
            rank.heard.get(timeout=SILENCE / len(ranks))
    except queue.Empty:
        return all(rank.heard.empty() for rank in ranks)
    return False


def test_the_first_failure_is_the_same_for_all(ranks: list[Rank]) -> None:
    first, second = Report(1, "ValueError: one", kind="a"), Report(2, "KeyError: two", kind="b")
    ranks[1].line.failed(first)
    assert ranks[1].hears() == first  # and prints it before the others hear of it
    ranks[2].line.failed(second)
    assert ranks[0].hears() == ranks[2].hears() == first
    assert silent(ranks)


def test_others_hear_of_it_once_it_is_printed(ranks: list[Rank]) -> None:
    prints = queue.Queue[None]()
    ranks[2].line._on_first = lambda report: prints.get(timeout=20)
    ranks[2].line.failed(Report(2, "slow"))
    assert silent(ranks)
    prints.put(None)
    assert ranks[0].hears() == ranks[1].hears() == Report(2, "slow")


def test_a_rank_that_dies_while_it_prints(ranks: list[Rank]) -> None:
    ranks[2].line._on_first = lambda report: ranks[2].die()
    ranks[2].line.failed(Report(2, "dies"))
    assert ranks[0].hears() == ranks[1].hears() == Report(2, "dies")


def test_all_fail_alike(ranks: list[Rank]) -> None:
    for number, rank in enumerate(ranks):
        rank.line.failed(Report(number, f"ValueError: on {number}", kind="ValueError: on 0"))
    for rank in ranks:
        heard = {rank.hears(), rank.hears()}
        assert "same" in heard and len({report.rank for report in heard - {"same"}}) == 1


def test_a_death_is_told_with_its_exit_code(ranks: list[Rank]) -> None:
    ranks[1].die()
    ranks[0].line.exited(1, -9)
    report = Report(1, how_it_ended(-9), died=True)
    assert "killed by SIGKILL (exit code -9)" in report.error
    assert ranks[0].hears() == ranks[2].hears() == report


def test_a_death_without_an_exit_code(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "EXIT_CODE", 0.05)
    ranks[2].die()
    assert ranks[0].hears() == ranks[1].hears() == Report(2, how_it_ended(None), died=True)


def test_rank_0_dies(ranks: list[Rank]) -> None:
    hub_side = ranks[1].line._lines.socket
    hub_side.shutdown(socket.SHUT_RD)  # as if the hub's process had ended
    assert ranks[1].hears() == Report(0, how_it_ended(None), died=True)


def test_leaving_is_no_death(ranks: list[Rank]) -> None:
    ranks[1].line.leave()
    ranks[2].line.leave()
    ranks[0].line.exited(1, 1)
    ranks[0].line.exited(2, 0)
    assert silent(ranks)


def test_a_process_may_end_before_its_leave_is_read(ranks: list[Rank]) -> None:
    ranks[0].line.exited(1, 0)
    assert silent(ranks)
    ranks[1].line.leave()
    assert silent(ranks)


def test_rank_0_may_end_before_the_others(ranks: list[Rank]) -> None:
    ranks[0].line.leave()
    assert ranks[1].line._hub_may_go.wait(20) and ranks[2].line._hub_may_go.wait(20)
    ranks[1].line._lines.socket.shutdown(socket.SHUT_RD)  # as if the hub's process had ended
    assert silent(ranks)


def test_strangers_are_not_heard(ranks: list[Rank]) -> None:
    address = ranks[0].line._lines.socket.getpeername()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"token": "0", "rank": 1}\n', b"[1]\n", b'{"failed": {}}\n', b""):
        with socket.create_connection(address, timeout=20) as stranger:
            stranger.sendall(text)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    ranks[0].line.failed(Report(0, "true"))
    assert ranks[1].hears() == Report(0, "true")


def _dies(port: int, token: str, pipe: Connection) -> None:
    """A rank that leaves a worker behind, which lives until the pipe is closed."""
    Rank(1, SimpleNamespace(port=port, token=token))
    if os.fork() == 0:
        pipe.poll(60)
    os._exit(9)


def test_a_worker_of_a_dead_rank_does_not_hold_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "EXIT_CODE", 0.05)
    hub = Hub(2, host="127.0.0.1")
    first = Rank(0, hub)
    ours, theirs = CONTEXT.Pipe()
    dies = CONTEXT.Process(target=_dies, args=(hub.port, hub.token, theirs))
    dies.start()
    theirs.close()
    try:
        dies.join(60)
        assert dies.exitcode == 9
        assert first.hears() == Report(1, how_it_ended(None), died=True)
    finally:
        ours.close()
        first.line.leave()


def test_how_it_ended() -> None:
    assert how_it_ended(3) == "its process ended with exit code 3"
    assert how_it_ended(-6) == "its process was killed by SIGABRT (exit code -6)"
    assert how_it_ended(-63).startswith("its process was killed by ")
    assert "ended" in how_it_ended(None)
