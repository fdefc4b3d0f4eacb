"""Ranks that are forked from an interactive process, such as a notebook's, which is none of them itself.

What enters is a Trainer's method, before it has done anything. Each rank is a copy of the process, the user's objects
and all; it runs the method and ends. What came of it is brought back to the objects that the user holds: the weights
(see `weights`), and what the Trainer and its callbacks know (see `results`). What a rank raises is raised here, with
its traceback there. However a run ends, none of its ranks outlives it.
"""

from __future__ import annotations

import csv
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

# Private; read at lightning 2.6.6. A test fails when they move.
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

# Private; read at torch 2.13.0. A test fails when it moves.
from torch.multiprocessing import _prctl_pr_set_pdeathsig
from typing_extensions import override

from lightning_moe_ep.checkpoint.saving import save_file
from lightning_moe_ep.launch import results, weights
from lightning_moe_ep.mesh import forget_groups
from lightning_moe_ep.trees import tensors_of

POLL = 0.5
"""Seconds between looks at what ranks tell of failures."""

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed, and all when the user interrupts."""


def is_interactive() -> bool:
    """Whether this process is a notebook's, or Python's prompt, so that it cannot be started a second time."""
    return _IS_INTERACTIVE


class RankError(RuntimeError):
    """A rank of a forked run failed."""


class ForkLauncher(_MultiProcessingLauncher):
    """Runs a Trainer's methods on ranks that are forked for each, and ended after it."""

    def __init__(self, strategy: ModelParallelStrategy, *, save_whole: Callable[[Path], None]) -> None:
        """
        Args:
            strategy: whose ranks they are; all of one node.
            save_whole: called by every rank: save the plain model's weights as one file.
        """
        super().__init__(strategy, start_method="fork")
        self._save_whole = save_whole
        self.is_rank = False
        """Whether this process is one of the ranks."""
        self.has_failed = False
        """Whether callbacks are being told of a failure, here as on the ranks."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        if self.is_rank:
            return function(*args, **kwargs)
        module = trainer.lightning_module
        _check_fork(module)
        # What a method does first where it runs, which the user expects to find.
        self._strategy.connect(module)
        module.trainer = trainer
        trainer._callback_connector._attach_model_callbacks()
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger | CSVLogger):
                _ = logger.version  # counted now: later each rank would, and this process not at all
        kept = _free_place(Path(trainer.log_dir or trainer.default_root_dir) / "trained_weights.ckpt")
        with tempfile.TemporaryDirectory(prefix="lightning-moe-ep-") as folder:
            run = _Run(Path(folder), kept, find_free_network_port(), weights.is_built(module))
            try:
                self._wait_for(run, function, trainer, args, kwargs)
            except BaseException:
                self.has_failed = True
                if trainer.state.fn == TrainerFn.FITTING:
                    rank_zero_warn(
                        "The fit did not end. What it had trained went with its ranks: the module has the weights from"
                        " before it. Go on from a checkpoint (ckpt_path), if one was saved"
                    )
                raise
            finally:
                _WRITTEN.update(trainer.loggers)
            found = results.read(run.results)
            results.restore(trainer, found)
            data = [value for value in (*args, *kwargs.values()) if isinstance(value, L.LightningDataModule)]
            trainer.datamodule = data[0] if data else trainer.datamodule
            if run.weights.exists():
                weights.take_back(module, self._strategy, run.weights, otherwise=found.checkpoint or kept)
            elif found.checkpoint is not None:
                limit = f"more than {weights.MOST_BYTES / 2**30:g} GiB are not copied"
                weights.leave(module, found.checkpoint, limit)
        if trainer.state.fn == TrainerFn.PREDICTING:
            rank_zero_info("The predictions stayed on the ranks; have a BasePredictionWriter write them")
        return found.returned

    def save(self, checkpoint: dict[str, Any], path: Path, module: nn.Module) -> None:
        """What a Trainer's `save_checkpoint` does in the user's process: save the weights that were brought back.

        Args:
            checkpoint: Lightning's.
            path: of the file.
            module: the user's.

        Raises:
            RuntimeError: the weights are not here.
        """
        if not weights.is_built(module):
            raise RuntimeError(
                f"the trained weights are not in this process, so there is nothing to save in {path}; have"
                " ModelCheckpoint save during the fit"
            )
        if checkpoint.pop("optimizer_states", None) is not None:
            rank_zero_warn(
                f"{path} has weights only: the optimizers' state was with the ranks, which have ended. To go on"
                " training from a checkpoint, have ModelCheckpoint save it during the fit"
            )
        save_file(path, checkpoint, None)

    @override
    def kill(self, signum: Any) -> None:
        for process in self.procs:
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signum)

    # In the user's process.

    def _wait_for(self, run: _Run, function: Callable[..., Any], trainer: L.Trainer, args: Any, kwargs: Any) -> None:
        """Start the ranks, and wait for all.

        Raises:
            BaseException: what the first rank to fail has raised.
            RankError: that cannot be told, or the rank was killed.
        """
        context = mp.get_context("fork")
        world = self._strategy.num_processes
        self.procs = [
            context.Process(target=self._rank, args=(rank, os.getpid(), run, function, trainer, args, kwargs))
            for rank in range(world)
        ]
        try:
            for process in self.procs:
                process.start()
            alive = {process.sentinel: rank for rank, process in enumerate(self.procs)}
            while alive:
                ended = wait(list(alive), timeout=POLL)
                failures = run.failures(world)
                if failures:  # those that died came before those that noticed
                    ended = wait(list(alive), timeout=0)
                for sentinel in ended:
                    rank = alive.pop(sentinel)  # type: ignore[arg-type]
                    self.procs[rank].join()
                    exit_code = self.procs[rank].exitcode
                    if exit_code and rank not in failures and (not failures or _is_killed(exit_code)):
                        self._end(self.procs)
                        raise RankError(f"rank {rank} of {world} {_told(exit_code)}; the others were ended")
                # A rank that has failed may wait for others for long, as its callbacks are told.
                if failures:
                    self._end(self.procs)
                    raise _first(run.failures(world).values())
        except KeyboardInterrupt:
            self.kill(signal.SIGINT)  # a notebook's kernel sends it to its ranks too, others do not
            self._end(self.procs)
            raise
        finally:
            self._end(self.procs, grace=0)
            self.procs = []

    def _end(self, processes: Iterable[Any], *, grace: float = GRACE) -> None:
        """Let them end by themselves for a while, then kill them."""
        started = [process for process in processes if process.pid is not None]
        end = time.monotonic() + grace
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
        for process in started:
            if process.is_alive():
                process.kill()
            process.join()

    # In the ranks.

    def _rank(
        self,
        rank: int,
        parent: int,
        run: _Run,
        function: Callable[..., Any],
        trainer: L.Trainer,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.is_rank = True
        self.procs = []
        signal.signal(signal.SIGINT, _interrupt_once)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl_pr_set_pdeathsig(signal.SIGKILL)  # Linux only: a kernel that is killed takes its ranks with it
        if os.getppid() != parent:
            return
        # The threads of a parallel loop are the parent's too: with more than one, the first such loop waits forever.
        torch.set_num_threads(1)
        forget_groups()
        os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(run.port))
        self._strategy.set_world_ranks()
        try:
            for logger in trainer.loggers:
                _begin(logger, rank)
            self._hand_over(run, trainer, function(*args, **kwargs))
        except BaseException as error:
            run.fail(rank, self._strategy.num_processes, error)
            # As Lightning does where it catches what a method raises, which here is in the user's process.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _interrupt(trainer, error)
            trainer._teardown()
            raise SystemExit(1) from None

    def _hand_over(self, run: _Run, trainer: L.Trainer, returned: Any) -> None:
        """What the user's process needs, in files; every rank calls this."""
        module = trainer.lightning_module
        fitted = trainer.state.fn == TrainerFn.FITTING
        checkpoint = None if fitted or trainer.ckpt_path is None else Path(trainer.ckpt_path)
        if fitted or checkpoint is not None:
            size = sum(value.nbytes for value in tensors_of(module.state_dict()))
            if run.is_built or size <= weights.MOST_BYTES:
                self._save_whole(run.weights)
            elif fitted:
                checkpoint = run.kept
                trainer.save_checkpoint(checkpoint)
        if trainer.is_global_zero:
            results.write(results.collect(trainer, returned, checkpoint), run.results)


@dataclass(frozen=True)
class _Run:
    """What the ranks of a run and the user's process have in common."""

    folder: Path
    """Of files that are gone when the run is over."""
    kept: Path
    """A name for a checkpoint that stays."""
    port: int
    is_built: bool
    """Whether the module was, before."""

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def weights(self) -> Path:
        return self.folder / "weights.ckpt"

    def fail(self, rank: int, world: int, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        cause = RankError(f"on rank {rank} of {world}:\n{text}")
        if isinstance(error, SystemExit):  # of the rank, not of the user's process
            error = RankError(f"rank {rank} of {world} ended by sys.exit({error.code!r})")
        try:
            content = pickle.dumps((time.monotonic(), error, cause))
            pickle.loads(content)
        except Exception:
            told = RankError(f"rank {rank} of {world} failed: {type(error).__name__}: {error}")
            content = pickle.dumps((time.monotonic(), told, cause))
        writing = self.folder / f"writing-{rank}"
        writing.write_bytes(content)
        writing.replace(self._failure(rank))

    def failures(self, world: int) -> dict[int, bytes]:
        """What the ranks that have failed so far have told."""
        return {rank: self._failure(rank).read_bytes() for rank in range(world) if self._failure(rank).exists()}

    def _failure(self, rank: int) -> Path:
        return self.folder / f"failure-{rank}"


def _first(failures: Iterable[bytes]) -> BaseException:
    """What to raise for the failures of ranks: the first one's; the others' may come of it."""
    _, error, cause = min((pickle.loads(failure) for failure in failures), key=lambda failure: failure[0])
    error.__cause__ = cause
    return error


def _is_killed(exit_code: int) -> bool:
    """Whether a process was ended from outside, or by what it did itself; it may abort for the end of another."""
    return exit_code < 0 and exit_code != -signal.SIGABRT


def _told(exit_code: int) -> str:
    """By its exit code, how a process ended that had no time to tell."""
    if exit_code >= 0:
        return f"ended by itself with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    memory = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {name} (exit code {exit_code}){memory}"


def _check_fork(module: nn.Module) -> None:
    """
    Raises:
        RuntimeError: this process has used CUDA, or the module is sharded over its device.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "several ranks are forked from this interactive process, which has used CUDA already (for a tensor, a model"
            " on a GPU, a run on one device): its forks could not. Restart the kernel and leave CUDA to this run, or"
            " run the code as a script"
        )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise RuntimeError(
            f"this {type(module).__name__} was sharded by a run on one device, and cannot go to several ranks; make a"
            " new one, and give the checkpoint of that run as ckpt_path"
        )


def _free_place(path: Path) -> Path:
    """The path, or with a number where something is there."""
    number = 0
    place = path
    while place.exists():
        number += 1
        place = path.with_stem(f"{path.stem}-v{number}")
    return place


_WRITTEN: WeakSet[Logger] = WeakSet()
"""The loggers that ranks have written with."""


_FORGOTTEN: list[Any] = []
"""What must not be closed in a rank: it would write once more what the parent has yet to write."""


def _begin(logger: Logger, rank: int) -> None:
    """In a rank: have a logger go on with what this process, or a rank of another run, has written."""
    if isinstance(logger, TensorBoardLogger):
        _FORGOTTEN.append(logger._experiment)  # its writing thread is the parent's
        logger._experiment = None
    if not isinstance(logger, CSVLogger) or logger not in _WRITTEN or rank != 0:
        return
    file = Path(logger.log_dir, "metrics.csv")
    if file.exists():
        written = file.read_text()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it will be deleted, with which a new writer begins
            writer = logger.experiment
        file.write_text(written)
        writer.metrics_keys = next(csv.reader(written.splitlines()))


def _interrupt_once(signum: int, frame: Any) -> None:
    """A rank ends in an orderly way, however often the user, the kernel and this process's parent ask for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
