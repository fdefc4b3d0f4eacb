"""A line between the ranks beside the training's own groups: over it they learn at once that one has failed or died.

Every rank holds a connection to a hub, a thread of rank 0. A rank that fails sends a report; the hub takes the first
one it gets, lets that rank print it, and then sends it to all. A rank that dies sends nothing, but the system closes
its connection: no clock has to run out, so a rank that is only slow is never taken for dead. What the connections
carry is JSON, a line a message.

A connection costs a file descriptor on rank 0; nothing is sent while nothing happens.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

PRINTING = 1.0
"""Seconds that the first rank has to print its report before the others hear of it."""
EXIT_CODE = 1.5
"""Seconds for which the hub waits for the exit code of a rank whose connection broke."""
CONNECTING = 20.0
"""Seconds that a rank has to connect."""


@dataclass(frozen=True)
class Report:
    """How a rank ended."""

    rank: int
    error: str
    """In one line."""
    traceback: str = ""
    """Of an exception, to be printed; empty for a rank that died, or if there is nothing to look for in it."""
    kind: str = ""
    """Equal for errors that are the same on several ranks."""
    died: bool = False
    """Whether the process ended without a word."""


def how_it_ended(code: int | None) -> str:
    """In words, from `Popen.returncode`."""
    if code is None:
        return "its process ended, or its host is not there any more"
    if code >= 0:
        return f"its process ended with exit code {code}"
    import signal

    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    memory = ", perhaps by the system for want of memory" if name == "SIGKILL" else ""
    return f"its process was killed by {name} (exit code {code}){memory}"


def own_addresses(met_at: str) -> list[str]:
    """At which addresses and names others may find this host, the likeliest first.

    Args:
        met_at: the host at which the ranks meet, which may be another or this one.
    """
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((met_at, 9))  # sends nothing, but chooses the interface
        found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*found, met_at, socket.getfqdn(), socket.gethostname()]))


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_forked() -> None:
    for open_socket in list(_SOCKETS):
        open_socket.close()


# The workers of a DataLoader live on for a while when their rank has died, and would keep its connection open.
os.register_at_fork(after_in_child=_close_in_forked)


class _Lines:
    """A connection that carries JSON, one message a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""
        self._lock = threading.Lock()
        _SOCKETS.add(connection)

    def send(self, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # a broken connection is seen by the one who reads it
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has arrived; None if the connection is broken. Waits if nothing has."""
        try:
            arrived = self.socket.recv(1 << 16)
        except OSError:
            arrived = b""
        if not arrived:
            return None
        *lines, self._received = (self._received + arrived).split(b"\n")
        try:
            return [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:  # not one of ours
            return None

    def finish(self) -> None:
        """Send no more; what has been sent arrives."""
        with self._lock, suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


class Hub:
    """Rank 0's thread that hears all ranks; ends when all have left."""

    def __init__(self, world: int, *, host: str) -> None:
        """
        Args:
            world: how many ranks there are.
            host: what to listen on; empty: every interface.
        """
        self.token = secrets.token_hex(16)
        """What a connection has to begin with."""
        self._world = world
        self._server = socket.create_server((host, 0), backlog=max(128, world))
        _SOCKETS.add(self._server)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._ranks: dict[int, _Lines] = {}
        self._gone: set[int] = set()
        """Ranks that have left, and those that are lost."""
        self._lost: dict[int, float] = {}
        """Ranks whose connection broke, and until when their exit code is waited for."""
        self._codes: dict[int, int] = {}
        """Of processes that have ended."""
        self._first: Report | None = None
        self._kinds: dict[int, str] = {}
        self._told = False
        self._told_at_the_latest = 0.0
        threading.Thread(target=self._serve, name="rank-hub", daemon=True).start()

    def _serve(self) -> None:
        while len(self._gone) < self._world:
            for key, _ in self._selector.select(timeout=0.1 if self._lost or self._is_printing else None):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            for rank in [rank for rank, until in self._lost.items() if now > until]:
                self._has_died(rank)
            if self._is_printing and now > self._told_at_the_latest:
                self._tell_all()
        self._selector.close()
        self._server.close()
        for lines in self._ranks.values():
            lines.socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # no file descriptor is left; the rank will say that it could not connect
            time.sleep(0.1)
            return
        self._selector.register(connection, selectors.EVENT_READ, _Lines(connection))

    @property
    def _is_printing(self) -> bool:
        return self._first is not None and not self._told

    def _read(self, lines: _Lines) -> None:
        messages = lines.receive()
        rank = next((rank for rank, known in self._ranks.items() if known is lines), None)
        if messages is None:
            self._selector.unregister(lines.socket)
            if rank is not None and rank not in self._gone:
                self._gone.add(rank)
                if rank in self._codes:
                    self._has_died(rank)
                else:
                    self._lost[rank] = time.monotonic() + EXIT_CODE
            if rank is None:
                lines.socket.close()
            return
        for message in messages:
            if rank is None:
                if message.get("token") != self.token:
                    self._selector.unregister(lines.socket)
                    lines.socket.close()
                    return
                rank = int(message["rank"])
                self._ranks[rank] = lines
                lines.send({"welcome": rank})
            elif "left" in message:
                self._gone.add(rank)
                if rank == 0:  # this process may end now
                    for other in sorted(self._ranks, reverse=True):
                        self._ranks[other].send({"hub": "may go"})
            elif "exited" in message:
                # What it sent last may not have been read yet: that it has left. It is dead if nothing more comes.
                self._codes[message["exited"]] = message["code"]
                if message["exited"] in self._lost:
                    self._has_died(message["exited"])
            elif "printed" in message:
                self._tell_all()
            else:
                self._has_failed(Report(**message["failed"]))

    def _has_died(self, rank: int) -> None:
        self._lost.pop(rank, None)
        if self._first is None or self._first.rank != rank:
            self._has_failed(Report(rank, how_it_ended(self._codes.get(rank)), died=True))
        else:
            self._tell_all()

    def _has_failed(self, report: Report) -> None:
        self._kinds.setdefault(report.rank, "" if report.died else report.kind)
        if self._first is None:
            self._first = report
            self._told_at_the_latest = time.monotonic() + PRINTING
            # Rank 0 prints for one that cannot.
            if (lines := self._ranks.get(0 if report.died else report.rank)) is not None:
                lines.send({"first": asdict(report)})
        if len(self._kinds) == self._world and len(set(self._kinds.values())) == 1 and not report.died:
            for lines in self._ranks.values():
                lines.send({"all": True})

    def _tell_all(self) -> None:
        if self._told or self._first is None:
            return
        self._told = True
        printed_by = 0 if self._first.died else self._first.rank
        for rank, lines in self._ranks.items():
            if rank != printed_by:
                lines.send({"first": asdict(self._first)})


class Line:
    """A rank's connection to the hub, read by a thread of its own."""

    def __init__(
        self,
        rank: int,
        *,
        hosts: list[str],
        port: int,
        token: str,
        on_first: Callable[[Report], None],
        on_same: Callable[[], None],
    ) -> None:
        """
        Args:
            rank: this one.
            hosts: names and addresses of the hub's host; it is found at one of them.
            port: that of the hub.
            token: that of the hub.
            on_first: is called with the first failure of all, by the thread; once, and first of all on the rank that
                prints it.
            on_same: is called when all ranks have reported the same error.

        Raises:
            ConnectionError: the hub cannot be reached.
        """
        self._rank = rank
        self._on_first, self._on_same = on_first, on_same
        self._lines = self._reach(hosts, port, token)
        self._has_left = False
        self._hub_may_go = threading.Event()
        threading.Thread(target=self._listen, name="rank-line", daemon=True).start()

    def _reach(self, hosts: list[str], port: int, token: str) -> _Lines:
        errors = []
        for host in hosts:
            try:
                connection = socket.create_connection((host, port), timeout=CONNECTING)
            except OSError as error:
                errors.append(f"{host}:{port}: {error}")
                continue
            lines = _Lines(connection)
            lines.send({"token": token, "rank": self._rank})
            # Not before the hub knows this rank: else its death could go unseen.
            if lines.receive():
                connection.settimeout(None)
                return lines
            connection.close()
            errors.append(f"{host}:{port}: no answer")
        raise ConnectionError(f"rank {self._rank} cannot reach rank 0 ({'; '.join(errors)})")

    def _listen(self) -> None:
        knows = False
        while (messages := self._lines.receive()) is not None:
            for message in messages:
                if "hub" in message:
                    self._hub_may_go.set()
                if self._has_left:
                    continue
                if "first" in message and not knows:
                    knows = True
                    self._on_first(Report(**message["first"]))
                    self._lines.send({"printed": True})
                elif "all" in message:
                    self._on_same()
        if not knows and not self._has_left and not self._hub_may_go.is_set():
            self._on_first(Report(0, how_it_ended(None), died=True))
        self._lines.socket.close()

    def failed(self, report: Report) -> None:
        """Report that this rank has failed."""
        self._lines.send({"failed": asdict(report)})

    def exited(self, rank: int, code: int) -> None:
        """Report how the process of another rank has ended; nothing if that rank has left before."""
        self._lines.send({"exited": rank, "code": code})

    def leave(self) -> None:
        """What happens to the others does not concern this rank any more."""
        self._has_left = True
        self._lines.send({"left": True})
        if self._rank == 0:
            self._hub_may_go.wait(PRINTING)
        self._lines.finish()
