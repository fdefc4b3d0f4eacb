"""A pool of ranks that is started once a test session and that tests send functions to.

Starting a rank costs seconds on two cores, sending it a function costs milliseconds. The pool is a world of up to 6
gloo ranks, each started when a test first wants it; a test that wants fewer uses the first of them, as the world of a
fresh default process group: between jobs every rank destroys its default group and makes the next one.

A job that does not end in time fails its test with the stacks of all ranks, and the pool starts anew. Gloo at times
loses a connection while it connects the ranks of a group, on a busy machine; such a job runs once more, on new ranks.
So does one whose rank aborts, which a warning tells: glibc ends a process long after its heap was damaged, at times by
a job before. One that aborts by itself does so again, and fails.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SIZE = 6
COLLECTIVE_TIMEOUT = timedelta(seconds=30)
GRACE = 3.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
NOT_CONNECTED = "Gloo connectFullMesh failed"
"""What gloo says when it could not connect the ranks: nothing of the job's own."""
ABORTED = "died of SIGABRT"
STARTING = 180.0
"""Seconds that ranks have to start and to import what a job needs; they wait for each other only after it."""
READY = "ready"


class RankError(AssertionError):
    """A job failed on a rank, or did not end."""


def _serve(rank: int, pipe: Connection, stacks: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    stack_file = open(stacks, "w")  # noqa: SIM115  (faulthandler needs it open for as long as the rank lives)
    faulthandler.enable(stack_file)
    import torch

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()  # which imports the module of the job's function, for seconds if it is the first
            pipe.send(READY)
            pipe.recv()
        except EOFError:  # the session is over
            return
        function, args, world, store, timeout = job
        faulthandler.dump_traceback_later(timeout, file=stack_file)
        try:
            result = _run(function, args, rank, world, store)
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()


def _run(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, store: str) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(1000 + rank)  # unlike on each rank, unless the job seeds
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
        # DTensor keeps meshes in its caches, and takes one for another of equal shape whose groups are gone.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _let_go_of_groups()


_CACHES: list[Any] = []


def _let_go_of_groups() -> None:
    """Drop all that holds a group of the last job: each keeps threads of gloo, which wake up a hundred times a second.

    Ours keep their meshes, torch's caches keep meshes too, and what a Trainer leaves holds them in circles.
    """
    if "lightning_moe_ep.mesh" in sys.modules:
        sys.modules["lightning_moe_ep.mesh"]._BUILT.clear()
    _CACHES.extend(
        found
        for found in gc.get_objects()
        if type(found) is functools._lru_cache_wrapper and (found.__module__ or "").startswith("torch.distributed")
    )
    for cache in _CACHES:
        cache.cache_clear()
    gc.collect()
    gc.freeze()  # what is left is looked at no more: imported modules, mostly


class RankPool:
    """Runs functions on gloo ranks; see the module."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []
        self._keeps = tempfile.TemporaryDirectory(prefix="rank-pool-", ignore_cleanup_errors=True)
        self._folder = Path(self._keeps.name)
        self._jobs = 0

    def _start(self, world: int) -> None:
        context = mp.get_context("spawn")
        for rank in range(len(self._ranks), world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, str(self._stack_file(rank))), daemon=True)
            process.start()
            self._ranks.append((process, ours))

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}"

    def _stacks(self, rank: int) -> str:
        file = self._stack_file(rank)
        return file.read_text() if file.exists() else "not started yet"

    def run(self, function: Callable[..., Any], *args: Any, world: int = SIZE, timeout: float = 60) -> list[Any]:
        """Call a module-level `function(*args)` on `world` ranks; returns each rank's result, in rank order.

        Raises:
            RankError: with the traceback of each rank that failed, or with all stacks if some did not end.
        """
        try:
            return self._run(function, args, world, timeout)
        except RankError as error:
            if ABORTED in str(error):
                warnings.warn(f"{error}\nThe job ran once more.", stacklevel=2)
            elif NOT_CONNECTED not in str(error):
                raise
        return self._run(function, args, world, timeout)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], world: int, timeout: float) -> list[Any]:
        self._start(world)
        self._jobs += 1
        store = str(self._folder / f"store-{self._jobs}")
        ranks = self._ranks[:world]
        for _, pipe in ranks:
            pipe.send((function, args, world, store, timeout))
        for rank, (_, pipe) in enumerate(ranks):
            try:
                started = pipe.poll(STARTING) and pipe.recv() == READY
            except EOFError:
                started = False
            if not started:
                self.close()
                raise RankError(f"rank {rank} died as it started, or did not start within {STARTING} s")
        for _, pipe in ranks:
            pipe.send(READY)
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
        while waiting:
            failed = any(not ok for ok, _ in answers.values())
            ready = wait(list(waiting), timeout=GRACE if failed else timeout + 5)
            if failed and not ready:  # the others wait for the one that failed
                break
            if not ready:
                self.close()
                stacks = "\n".join(f"--- rank {r}\n{self._stacks(r)}" for r in waiting.values())
                raise RankError(f"rank(s) {sorted(waiting.values())} did not end within {timeout} s\n{stacks}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    died, _ = ranks[rank]
                    died.join(10)
                    how = ABORTED if died.exitcode == -signal.SIGABRT else f"died with exit code {died.exitcode}"
                    self.close()
                    raise RankError(f"rank {rank} {how}\n{self._stacks(rank)}") from None
        failures = [f"--- rank {rank}\n{answer}" for rank, (ok, answer) in sorted(answers.items()) if not ok]
        if failures:
            self.close()  # the others may be stuck, or their groups half used
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []
