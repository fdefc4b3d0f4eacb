"""When one rank fails, all ranks end within seconds, and the user sees what that rank failed with.

Around each `fit`, `validate`, `test` and `predict` of a rank stands a `Guard`:

* The rank that fails first prints its traceback, before anything else of the failure is seen, and the others hear of it
  over the line (`line.py`). A rank that dies without a word (killed, out of memory, `sys.exit`) is noticed by the
  system's closing its connection, and by the process that started it, which knows the exit code (`children.py`).
* Most of the others are waiting for it in a collective. Some come out of it with an error when its connections close
  (gloo), others never would (NCCL). Each has `GRACE` seconds to end by itself, its Trainer's teardown included; an
  error that it meets there becomes a `RankFailedError` that names the first. Then it prints where it stands, and the
  process ends: nothing from outside can end a wait in a collective.
* The rank that failed has as long for its teardown; a callback that saves on exceptions would wait for ranks that are
  not there.
* Errors that all ranks raise alike (a wrong option, Ctrl-C, SIGTERM) are left as they are, printed once, and no rank is
  hurried. A rank that Ctrl-C or SIGTERM finds in a wait that Python cannot leave counts as failed after a while.
* A process does not outlive the one that started it, nor do those that it started, if its Trainer failed.

A rank that hangs makes the others fail in a collective after the strategy's `timeout`; it is then the one that prints
where it stands.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import lightning
import lightning.pytorch as L
import torch
import torch.distributed as dist

# Private; read at lightning 2.6.6. A test fails when it moves.
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_moe_ep.checkpoint.agreement import on_every_rank, on_rank_0
from lightning_moe_ep.launch import children, signals
from lightning_moe_ep.launch.line import Hub, Line, Report, how_it_ended, own_addresses

GRACE = 7.0
"""Seconds that a rank has to end by itself once one has failed."""
PATIENCE = {signal.SIGINT: 1.0, signal.SIGTERM: 20.0}
"""Seconds after a signal in which a rank has to leave its loop; after SIGTERM most managers of jobs wait for 30."""
NEWS = 3.0
"""Seconds for which a rank whose collective failed waits to hear that another failed first."""

_TOLD = "_lightning_moe_ep_told"
"""The attribute of an exception with what is left to print of it."""
_COLLECTIVE = re.compile(r"gloo|nccl|store|connection|socket|broken pipe|process group|timed out", re.IGNORECASE)
"""In what errors of collectives say."""


STACK = 12
"""Frames that are printed of a rank that does not end."""
_LINE = 400
"""Characters of an error's text that the other ranks print."""
_THIS = Path(__file__)
_LIBRARIES = [_THIS.parents[1], *(Path(str(library.__file__)).parent for library in (torch, lightning, threading))]
"""Where the frames are that are not the user's."""


class RankFailedError(RuntimeError):
    """Another rank failed first; raised on those that could not go on without it."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """The one that failed first."""


class Launcher(Protocol):
    """What a strategy's launcher has."""

    launch: Callable[..., Any]


class Guard:
    """Watches over the loops of one Trainer; see the module."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._rank = 0
        self._thread = threading.main_thread().ident
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._runs = False
        """Inside a loop, or its teardown."""
        self._fails = False
        """An exception has left the loop."""
        self._first: Report | None = None
        self._knows_first = threading.Event()
        self._where = ""
        self._all_alike = False
        self._grace_at_exit = (children.LAST_WORDS, False)
        """Seconds that this process waits at its exit for those that it started, and whether it then kills them."""
        self._timer: threading.Timer | None = None

    def watch(self, launcher: Launcher, *, global_rank: int, local_rank: int) -> None:
        """Stand around what a launcher runs.

        Args:
            launcher: that of the strategy, for a world of more than one rank.
            global_rank: this rank.
            local_rank: its number on its node.
        """
        self._rank = global_rank
        launch = launcher.launch

        def guarded_launch(
            function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any
        ) -> Any:
            @functools.wraps(function)  # what `function` is called with is looked up by name
            def run(*args: Any, **kwargs: Any) -> Any:
                processes = launcher.procs if isinstance(launcher, children.ScriptLauncher) else []
                self._observe(processes, parent_rank=global_rank - local_rank)
                if trainer is not None:
                    signals.stop_at_a_step(trainer)
                with signals.noticed(self._signalled):
                    return self._run(lambda: function(*args, **kwargs))

            return launch(run, *args, trainer=trainer, **kwargs)

        launcher.launch = guarded_launch

    def connect(self, *, host: str, num_nodes: int) -> None:
        """Connect the ranks, once they have a process group; every rank calls this.

        Args:
            host: where the ranks meet; rank 0 may be on another node of theirs.
            num_nodes: if there is one, the network is not needed.
        """
        if not self._runs or self._line is not None:
            return
        self._rank = dist.get_rank()

        def open_hub() -> tuple[list[str], int, str]:
            hosts = ["127.0.0.1"] if num_nodes == 1 else own_addresses(host)
            hub = Hub(dist.get_world_size(), host="127.0.0.1" if num_nodes == 1 else "")
            return hosts, hub.port, hub.token

        def open_line() -> None:
            self._line = Line(
                self._rank, hosts=hosts, port=port, token=token, on_first=self._on_first, on_same=self._on_same
            )

        try:
            hosts, port, token = on_rank_0(open_hub)
            on_every_rank(open_line)
        except OSError as error:
            line, self._line = self._line, None
            if line is not None:
                line.leave()
            rank_zero_warn(f"if one rank fails, the others may wait for it until the timeout: {error}")

    def torn_down(self) -> None:
        """The Trainer is torn down; if that was after an error, this rank is done."""
        if self._fails:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._runs = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            line, self._line = self._line, None
        if line is not None:
            line.leave()

    def _run(self, function: Callable[[], Any]) -> Any:
        global _latest
        _latest = self
        self._thread = threading.get_ident()
        with self._lock:
            self._first, self._where, self._line, self._all_alike = None, "", None, False
            self._knows_first.clear()
            self._runs, self._fails = True, False
            self._grace_at_exit = (children.LAST_WORDS, False)
        for report in _gone:
            self._alarm(report)
        try:
            result = function()
        except _TunerExitException:  # no failure: how Lightning's tuner ends a fit
            self._leave()
            raise
        except BaseException as error:
            raised = self._failed(error)
            if raised is error:
                raise
            raise raised from error
        self._leave()
        if self._first is not None:
            raise self._mark(RankFailedError(self._ended_because(), self._first.rank))
        return result

    # This rank fails.

    def _failed(self, error: BaseException) -> BaseException:
        """Report an error of this rank; returns what to raise."""
        self._fails = True
        _shorten_at_exit()
        line = self._line
        if line is None:  # the others do not know this one yet
            self._grace_at_exit = (children.ENDING, True)
            return error
        self._where = self._where or _place(traceback.extract_tb(error.__traceback__))
        of_collective = isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error))
        # At the exit of this process most waits of others end; not one that it has waited for itself.
        self._grace_at_exit = (GRACE + 1, True) if of_collective else (0.0, False)
        if of_collective:
            self._knows_first.wait(NEWS)  # most of these come of another's failure
        report = _report(self._rank, error)
        if self._first is None or self._first.kind == report.kind:
            line.failed(report)
            self._knows_first.wait(NEWS)
        first = self._first
        if first is None:
            return error
        if first.rank == self._rank and not first.died:
            return self._mark(error, f"ended by {report.error}; its traceback is above")
        if first.kind == report.kind and not first.died:
            return self._mark(error, f"ended by the same error as rank {first.rank}, whose traceback is above")
        if of_collective:
            return self._mark(RankFailedError(self._ended_because(), first.rank))
        return error

    def _signalled(self, signum: signal.Signals) -> None:
        """In a thread: a signal has arrived."""
        if signum in PATIENCE:
            timer = threading.Timer(PATIENCE[signum], self._does_not_leave, args=(signum,))
            timer.daemon = True
            timer.start()

    def _does_not_leave(self, signum: signal.Signals) -> None:
        if self._fails or not self._runs:
            return
        report = Report(self._rank, f"{signum.name} found it in a wait that it could not leave", kind=f"{self._rank}")
        if self._line is not None:
            self._line.failed(report)
        else:
            self._alarm(report)

    def _ended_because(self) -> str:
        assert self._first is not None
        return f"rank {self._rank} ended because rank {self._first.rank} failed first: {self._first.error}" + (
            f"; rank {self._rank} was in {self._where}" if self._where else ""
        )

    def _mark(self, error: BaseException, text: str | None = None) -> BaseException:
        setattr(error, _TOLD, f"[rank{self._rank}]: {text or error}")
        return error

    # Another rank fails.

    def _on_first(self, report: Report) -> None:
        """In a thread: the first failure of all is known."""
        self._alarm(report, prints=self._rank == (0 if report.died else report.rank))

    def _on_same(self) -> None:
        """In a thread: all ranks have failed in the same way."""
        with self._lock:
            self._all_alike = True
            if self._timer is not None:
                self._timer.cancel()

    def _alarm(self, report: Report, *, prints: bool = True) -> None:
        with self._lock:
            if not self._runs or self._first is not None:
                return
            self._first = report
            frame = self._frame()
            if frame is not None and (report.died or report.rank != self._rank):
                self._where = self._where or _place(traceback.extract_stack(frame))
            if not self._all_alike:
                self._timer = threading.Timer(GRACE, self._end)
                self._timer.daemon = True
                self._timer.start()
        if prints and report.died:
            _tell(self._rank, f"rank {report.rank} failed first: {report.error}")
        elif prints and report.traceback:
            _tell(self._rank, f"failed first\n{report.traceback.rstrip()}")
        self._knows_first.set()

    def _end(self) -> None:
        """In a thread: end this process, which did not do so by itself."""
        with self._lock:
            if not self._runs or self._first is None:
                return
            frame = self._frame()
            stack = "".join(traceback.format_stack(frame, limit=STACK)) if frame else ""
            if self._first.rank == self._rank and not self._first.died:
                why = f"rank {self._rank} did not end within {GRACE:.0f} s of its failure"
            else:
                why = self._ended_because()
            _tell(self._rank, f"{why}\nIt stands at (most recent call last):\n{stack.rstrip()}" if stack else why)
            for worker in multiprocessing.active_children():
                worker.kill()
            children.end(self._processes, after=1.0)
            os._exit(1)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread) if self._thread is not None else None

    # Processes that start or are started.

    def _observe(self, processes: list[Any], *, parent_rank: int) -> None:
        """Notice when processes of this node end; their observers run as long as this process."""
        if processes and processes is not self._processes:
            self._processes = processes
            children.end_together(processes, first_rank=parent_rank + 1, grace=_grace_at_exit)
            children.observe(processes, lambda number, code: self._child_ended(parent_rank + 1 + number, code))
        if (parent := children.started_by()) is not None:
            children.observe_parent(parent, lambda: self._parent_ended(parent_rank))

    def _child_ended(self, rank: int, code: int) -> None:
        guard, report = _latest or self, Report(rank, how_it_ended(code), died=True)
        _gone.append(report)
        line = guard._line
        if line is not None:
            line.exited(rank, code)
        elif guard._runs or code:
            guard._runs = True  # also when it failed after the loops, as Lightning's observer does
            guard._alarm(report)

    def _parent_ended(self, rank: int) -> None:
        guard, report = _latest or self, Report(rank, how_it_ended(None), died=True)
        _gone.append(report)
        if guard._line is None:  # else the line tells
            guard._alarm(report)


_latest: Guard | None = None
"""Of this process's guards, the one whose loop runs, or ran last."""
_gone: list[Report] = []
"""The processes of this node that have ended: a loop that begins now would wait for them."""


def _grace_at_exit() -> tuple[float, bool]:
    return (children.ENDING, False) if _latest is None else _latest._grace_at_exit


def _report(rank: int, error: BaseException) -> Report:
    name, text = type(error).__name__, str(error)
    kind = f"{name}: {re.sub(r'[0-9]+', '0', text)}"  # what ranks differ in: their numbers, their devices
    if isinstance(error, KeyboardInterrupt | SystemExit | SIGTERMException):
        return Report(rank, f"{name} {text}".rstrip(), kind=kind)
    line = " ".join(text.split())
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None and Path(inner.tb_frame.f_code.co_filename) == _THIS:
        inner = inner.tb_next
    printed = "".join(traceback.format_exception(type(error), error, inner))
    short = line if len(line) <= _LINE else f"{line[:_LINE]} ..."
    return Report(rank, f"{name}: {short}" if short else name, traceback=printed, kind=kind)


def _place(stack: traceback.StackSummary) -> str:
    """The innermost function, and the innermost one of the user's that called it."""

    def named(frame: traceback.FrameSummary) -> str:
        return f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"

    if not stack:
        return ""
    own = [
        frame
        for frame in stack
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES) and frame.filename[0] != "<"
    ]
    return named(stack[-1]) + (f", called from {named(own[-1])}" if own and own[-1] is not stack[-1] else "")


def _tell(rank: int, text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write("".join(f"[rank{rank}]: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def _shorten_at_exit() -> None:
    """Have Python print one line of the exceptions that have been told of, when they end the process."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told = getattr(error, _TOLD, None)
        if told is None:
            before(kind, error, trace)
        else:
            sys.stderr.write(f"{told}\n")

    sys.excepthook = hook
