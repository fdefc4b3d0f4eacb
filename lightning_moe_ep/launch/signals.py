"""Ctrl-C and SIGTERM while a rank waits in a collective, where Python does not get to handle them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import lightning.pytorch as L


def stop_at_a_step(trainer: L.Trainer) -> None:
    """Have SIGTERM end a fit between two steps, on all ranks together, without more.

    Lightning (2.6.6) asks rank 0 at each step whether it has had the signal. It also broadcasts inside of the handler,
    where it finds the other ranks in the middle of the step, in another collective: then all wait for ever.
    """
    connector = trainer._signal_connector

    def note(signum: int | signal.Signals, _: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note


@contextmanager
def noticed(arrived: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside, `arrived` is called in a thread when a signal that Python handles has arrived, handled or not yet.

    Does nothing outside of the main thread, or where somebody else waits for signals (a notebook).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)

    def wait() -> None:
        while number := os.read(reading, 1):
            with suppress(ValueError):
                arrived(signal.Signals(number[0]))
        os.close(reading)

    threading.Thread(target=wait, name="rank-signals", daemon=True).start()
    try:
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        os.close(writing)  # ends the thread
