"""Saves that go on while training does, and what has to wait for them: removals and links of other checkpoints.

One thread a rank does all of it in order, over a process group of its own. At most one save is on its way; whether it
is, and that it failed, all ranks find out together, at the steps and when they wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_moe_ep.checkpoint import durable
from lightning_moe_ep.checkpoint.after_failure import why_not_to_save
from lightning_moe_ep.checkpoint.agreement import on_every_rank, on_rank_0
from lightning_moe_ep.checkpoint.saving import FolderSave, save_file
from lightning_moe_ep.checkpoint.training import full_model_state, full_optimizer_state


class Saver:
    """What a strategy saves with; every rank calls its methods, in the same order, but for `remove`."""

    def __init__(self, *, folders: bool, meanwhile: bool, timeout: timedelta | None) -> None:
        """
        Args:
            folders: whether checkpoints are folders that all ranks write, or files.
            meanwhile: whether a training goes on while a folder is written.
            timeout: how long the ranks then wait for each other; None: torch's default.

        Raises:
            ValueError: a training is to go on while files are written.
        """
        if meanwhile and not folders:
            raise ValueError("async_save=True writes folders: it needs save_distributed_checkpoint=True")
        self.folders = folders
        self._meanwhile = meanwhile
        self._is_training = False
        self._timeout = timeout
        self._path: Path | None = None
        self._running: list[Future[None]] = []
        """The save on its way, and on rank 0 what comes after it; empty on all ranks or on none."""
        self._thread: ThreadPoolExecutor | None = None
        self._stager: DefaultStager | None = None
        self._group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        """The world's group, and this thread's."""

    def adopt(self, trainer: L.Trainer, groups: Callable[[], Sequence[dist.ProcessGroup]]) -> None:
        """Let a Trainer's ModelCheckpoints link in one step, and know of what is on its way and who is still there.

        Args:
            trainer: its checkpoint callbacks are changed.
            groups: what the ranks communicate over in training.

        Raises:
            ValueError: a CheckpointIO plugin was given.
        """
        if type(io := trainer.strategy.checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"MoEEPStrategy writes and reads checkpoints itself, not through {type(io).__name__}; leave that plugin"
                " out (to save while training goes on: MoEEPStrategy(async_save=True))"
            )
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                # lightning 2.6: it removes `last.ckpt` before it makes the new link, to what may not be there yet.
                callback._link_checkpoint = self._link
                callback.file_exists = partial(self._exists, callback)
            if isinstance(callback, ModelCheckpoint | OnExceptionCheckpoint):
                callback.on_exception = partial(_on_exception, callback, groups)

    def start(self) -> None:
        """From now on, `step` is called at every step, until `finish`."""
        self._is_training = True
        if self._meanwhile:
            # Now, and not at the first save: ranks that make a group wait long for one that has died.
            self._own_group()

    def finish(self, host_group: dist.ProcessGroup) -> None:
        """The training is over: wait for its last save.

        Raises:
            RuntimeError: it failed; on every rank.
        """
        self._is_training = False
        self.wait(host_group)

    def model_state(self, module: nn.Module, instead: Mapping[str, Tensor]) -> dict[str, Any]:
        """What a checkpoint has of the model.

        Args:
            module: the model.
            instead: tensors, sharded as the model's, that take the place of those of the same name.
        """
        if not self.folders:
            return full_model_state(module, instead)
        options = self._options
        state = get_model_state_dict(module, options=options)
        assert instead.keys() <= state.keys(), f"no such names: {sorted(instead.keys() - state.keys())[:3]}"
        return {**state, **{name: value.cpu() if options.cpu_offload else value for name, value in instead.items()}}

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint has of an optimizer of the model."""
        if self.folders:
            return get_optimizer_state_dict(module, optimizer, options=self._options)
        return full_optimizer_state(module, optimizer)

    def save(self, place: str | Path, checkpoint: dict[str, Any], host_group: dist.ProcessGroup) -> None:
        """Save; if a training is to go on meanwhile, what is saved is copied before this returns.

        Args:
            place: where, the same on every rank; what is there is replaced.
            checkpoint: Lightning's, with this object's `state_dict` and `optimizer_states`.
            host_group: all ranks, for CPU tensors.

        Raises:
            ValueError: `place` is not in the local file system.
            OSError: there is no space for it.
            RuntimeError: it, or the save before it, failed; or the ranks do not see one file system.
        """
        if "://" in str(place):
            raise ValueError(f"a checkpoint cannot be saved to {place}: only to paths that the file system has")
        path = Path(place)
        self.wait(host_group)
        if not self.folders:
            save_file(path, checkpoint, host_group)
            return
        folder = FolderSave(path, checkpoint, host_group)
        if not self._copies:
            folder.write(host_group)
            return
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        folder.state = self._copied(folder.state)
        self._path = path
        self._running = [self._thread.submit(folder.write, self._own_group())]

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, once the save that is on its way has succeeded; only rank 0 calls this."""
        self._after_save(lambda: _discard(path))

    def step(self, host_group: dist.ProcessGroup) -> None:
        """See what became of the save on its way; ranks exchange two numbers, or nothing if there is none.

        Raises:
            RuntimeError: it failed; on every rank.
        """
        if not self._running:
            return
        failures = [error for future in self._running if future.done() and (error := future.exception())]
        state = torch.tensor([not all(future.done() for future in self._running), bool(failures)], dtype=torch.int)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=host_group)
        is_running, has_failed = state.tolist()
        if has_failed:
            self._running = []
            told = on_every_rank(lambda: str(failures[0]) if failures else "", group=host_group)
            raise RuntimeError(next(text for text in told if text))
        if not is_running:
            self._running = []

    def wait(self, host_group: dist.ProcessGroup) -> None:
        """Wait until no save is on its way.

        Raises:
            RuntimeError: it failed; on every rank.
        """
        wait(self._running)
        self.step(host_group)

    def close(self) -> None:
        """Wait without the other ranks, which may be gone, and free what the copies were in."""
        self._is_training = False
        wait(self._running)
        for error in [error for future in self._running if (error := future.exception())][:1]:
            rank_zero_warn(str(error))
        self._running = []
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    @property
    def _copies(self) -> bool:
        return self._meanwhile and self._is_training

    @property
    def _options(self) -> StateDictOptions:
        return StateDictOptions(cpu_offload=not self._copies)  # else the one copy there is to be is made later

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._stager is None:
            # Kept, so that pinned memory is made once.
            on_gpu = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,
                )
            )
        copied = self._stager.stage(state)
        assert isinstance(copied, dict)
        return copied

    def _own_group(self) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        if self._group is None or self._group[0] is not world:
            self._group = (world, dist.new_group(backend="gloo", timeout=self._timeout))
        return self._group[1]

    def _after_save(self, action: Callable[[], None]) -> None:
        if not self._running:
            action()
            return
        save = self._running[0]
        assert self._thread is not None
        self._running.append(self._thread.submit(lambda: None if save.exception() else action()))

    def _link(self, trainer: L.Trainer, filepath: str, linkpath: str) -> None:
        """In place of ModelCheckpoint's."""
        target, path = Path(os.path.abspath(filepath)), Path(os.path.abspath(linkpath))

        def link() -> None:
            if target != path:
                durable.link(target, path)

        if not self._running:
            on_rank_0(link)
        elif dist.get_rank() == 0:
            self._after_save(link)

    def _exists(self, callback: ModelCheckpoint, filepath: str, trainer: L.Trainer) -> bool:
        """In place of ModelCheckpoint's: a name that the save on its way will take is taken."""
        on_its_way = bool(self._running) and self._path == Path(filepath)
        exists = trainer.is_global_zero and (on_its_way or os.path.lexists(filepath))
        return trainer.strategy.reduce_boolean_decision(exists, all=False)


def _on_exception(
    callback: ModelCheckpoint | OnExceptionCheckpoint,
    groups: Callable[[], Sequence[dist.ProcessGroup]],
    trainer: L.Trainer,
    module: L.LightningModule,
    exception: BaseException,
) -> None:
    """In place of the callback's: saves if all ranks are there; what goes wrong does not hide the exception."""
    if isinstance(callback, ModelCheckpoint) and not callback._should_save_on_exception(trainer):
        return
    try:
        reason = why_not_to_save(trainer.global_step, groups()) if dist.is_initialized() else "no training was set up"
        if reason is None:
            type(callback).on_exception(callback, trainer, module, exception)
    except Exception as error:
        reason = str(error)
    if reason is not None:
        rank_zero_warn(f"After the {type(exception).__name__}, {type(callback).__name__} has not saved: {reason}")


def _discard(path: Path) -> None:
    try:
        durable.discard(path)
    except OSError as error:  # no reason to end a training, least of all on rank 0 alone
        rank_zero_warn(f"the checkpoint {path} could not be removed: {error}")
