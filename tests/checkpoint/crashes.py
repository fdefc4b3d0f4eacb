"""Processes that are to die, forked from one without threads."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

DIED = 9
"""The exit status of a process that was made to die."""

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate"}
"""Audit events of what changes the file system, beside `open` for writing."""


def at_each_step(
    folder: Path, arrange: Callable[[], None], act: Callable[[], None], check: Callable[[int], None]
) -> int:
    """Let processes die before the first, second, ... change that `act` makes in a folder, until one survives.

    For a process without threads.

    Args:
        folder: only changes in it count.
        arrange: makes what is there before.
        act: is called in a process of its own.
        check: looks at what a process left that died before its n-th change.

    Returns:
        How many died.
    """
    for number in itertools.count(1):
        arrange()
        status = in_child(partial(_act, folder, act, dies_at=number))
        if not status:
            return number - 1
        assert status == DIED
        check(number)
    raise AssertionError


def in_child(act: Callable[[], None]) -> int:
    """Call it in a forked process; the exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _act(folder: Path, act: Callable[[], None], *, dies_at: int) -> None:
    from lightning_moe_ep.checkpoint import durable

    changes = 0

    def count() -> None:
        nonlocal changes
        changes += 1
        if changes == dies_at:
            os._exit(DIED)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and _writes(args)):
            # Paths may be relative to an open folder (shutil.rmtree); other folders are not written to then.
            name = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
            if not os.path.isabs(name) or Path(name).is_relative_to(folder):
                count()

    exchange = durable._exchange  # a system call that Python does not see

    def counted_exchange(one: Path, other: Path) -> bool:
        count()
        return exchange(one, other)

    durable._exchange = counted_exchange
    sys.addaudithook(hook)
    act()


def _writes(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    return bool(mode and set(mode) & set("wxa+")) or bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
