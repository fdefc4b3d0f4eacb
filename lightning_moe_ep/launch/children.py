"""The processes that a script starts for the other ranks of its node, and the parent that they must not outlive."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L

# Private; read at lightning 2.6.6. A test fails when they move.
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_moe_ep.launch.line import how_it_ended

POLL = 0.2
"""Seconds between two looks at the processes."""
ENDING = 3.0
"""Seconds that processes have to end by themselves before they are killed."""
LAST_WORDS = 20.0
"""Seconds that the first process waits at an ordinary exit to hear how the others end; most end at the same time."""
PARENT = "LIGHTNING_MOE_EP_PARENT"
"""The environment variable that tells a rank which process started it."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's, which runs the script once for each rank, but with another observer.

    Lightning's looks every five seconds and kills all processes, the user's first, without a word.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT]
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: int | signal.Signals) -> None:
        if signum == signal.SIGKILL:  # Ctrl-C has reached them, too
            end(self.procs)
        else:
            super().kill(signum)


def end(processes: list[subprocess.Popen[Any]], *, after: float = ENDING) -> None:
    """Wait until the processes have ended, and kill those that have not after some seconds."""
    wait_for(processes, after)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for(processes: list[subprocess.Popen[Any]], seconds: float) -> None:
    """Until they have ended, or for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def end_together(
    processes: list[subprocess.Popen[Any]], *, first_rank: int, grace: Callable[[], tuple[float, bool]]
) -> None:
    """At this process's exit, wait a little for the others: what they say last is read, and failures are of all.

    Args:
        processes: of the other ranks of this node.
        first_rank: of the first of them.
        grace: asked then: seconds to wait, and whether they are then killed.
    """

    def wait() -> None:
        seconds, kills = grace()
        wait_for(processes, seconds)
        if kills:
            end(processes, after=0.0)
        if kills or not seconds:  # this process has failed, and says so
            return
        codes = {first_rank + number: process.returncode for number, process in enumerate(processes)}
        if failed := {rank: code for rank, code in codes.items() if code}:
            sys.stdout.flush()
            for rank, code in failed.items():
                sys.stderr.write(f"[rank0]: rank {rank} failed at its end: {how_it_ended(code)}\n")
            sys.stderr.flush()
            os._exit(1)

    atexit.register(wait)


def observe(processes: list[subprocess.Popen[Any]], ended: Callable[[int, int], None]) -> None:
    """Call `ended(number, code)` in a thread when a process has ended, by its number in the list."""

    def look() -> None:
        running = dict(enumerate(processes))
        while running:
            for number, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[number]
                    ended(number, code)
            time.sleep(POLL)

    threading.Thread(target=look, name="rank-children", daemon=True).start()


def started_by() -> int | None:
    """The process that started this one as a rank; None if that was not a script's launcher, or if asked again."""
    parent = os.environ.pop(PARENT, None)  # not for the processes that this one starts
    return None if parent is None else int(parent)


def observe_parent(parent: int, ended: Callable[[], None]) -> None:
    """Call `ended()` in a thread once the parent has ended."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        ended()

    threading.Thread(target=look, name="rank-parent", daemon=True).start()
