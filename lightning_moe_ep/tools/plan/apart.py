"""Running something in a process of its own, as one rank of a world that is not there.

The process group that a caller has is not disturbed, and one of torch's fake ones, whose collectives do nothing, is
never made beside a real one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")

_CALL, _ANSWER = "call", "answer"


class ApartError(RuntimeError):
    """What was run in a process of its own failed there."""


def run_apart(world: int, rank: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` as `rank` of `world` ranks whose collectives do nothing.

    Args:
        world: how many ranks there are to be.
        rank: which of them.
        function: of a module that can be imported, as it is sent to another process; so are its arguments and what it
            returns.

    Raises:
        ApartError: it failed; with what it said.
    """
    # Not by multiprocessing: it would run the caller's script once more, and refuses daemons, which ranks may be.
    with tempfile.TemporaryDirectory(prefix="lightning-moe-ep-") as folder:
        (Path(folder) / _CALL).write_bytes(pickle.dumps((world, rank, function, args, kwargs)))
        status = _serve_elsewhere(folder)
        answer = Path(folder) / _ANSWER
        if not answer.exists():
            raise ApartError(
                f"the process that was to stand for rank {rank} of {world} ended with exit status {status}"
                f"{', killed: it may have had too little memory' if status < 0 else ''}"
            )
        succeeded, result = pickle.loads(answer.read_bytes())
    if not succeeded:
        told, stack = result
        error = ApartError(told)
        error.add_note(stack)
        raise error
    return result


def _serve_elsewhere(folder: str) -> int:
    """Have a new process `serve`; returns its exit status."""
    own = [sys.executable, "-c", f"from {__name__} import serve; serve({folder!r})"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    return subprocess.run(own, env=environment, check=False).returncode


def serve(folder: str) -> None:
    """In that process: make the call that `folder` holds, and leave the answer there."""
    # Private; read at torch 2.13.0. A test fails when it moves.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        world, rank, function, args, kwargs = pickle.loads((Path(folder) / _CALL).read_bytes())
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        answer = True, function(*args, **kwargs)
    except Exception as error:
        answer = False, (f"{type(error).__name__}: {error}", traceback.format_exc())
    unfinished = Path(folder) / f"{_ANSWER}.unfinished"
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.rename(Path(folder) / _ANSWER)
