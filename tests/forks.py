"""Processes that start soon: forked from one that has imported what they need.

That one has no threads. A process that forks beside other threads hands on the locks that these hold, and nobody in the
copy gives them back: so what tests fork, they fork here.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.checkpoint.runs", "tests.launch.ranks", "tests.tools.plan.runs"])


def start(function: Callable[..., Any], *args: Any) -> tuple[BaseProcess, Connection]:
    """Begin a module-level `function(*args)` in a process of its own; what it returns comes through the pipe."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def forked(function: Callable[..., Any], *args: Any, timeout: float = 100) -> Any:
    """What a module-level `function(*args)` returns in a process of its own."""
    process, pipe = start(function, *args)
    try:
        assert pipe.poll(timeout), f"did not end within {timeout} s"
        ok, result = pipe.recv()
    finally:
        process.kill()
        process.join()
    assert ok, result
    return result


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)
