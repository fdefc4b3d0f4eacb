"""Before a checkpoint is read: put back what an interrupted save set aside, and see that it is complete."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

# Private; read at lightning 2.6.6. A test fails when it moves.
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_moe_ep.checkpoint import durable
from lightning_moe_ep.checkpoint.agreement import on_every_rank, on_rank_0
from lightning_moe_ep.checkpoint.stored import DamagedError, read_metadata


def look_up(path: Path) -> None:
    """See that there is a checkpoint, and that none of its files is missing; every rank calls this.

    Raises:
        FileNotFoundError: nothing is at `path`; on every rank.
        ValueError: it is a folder, but not complete; on every rank.
    """

    def exists() -> None:
        if not path.exists():
            raise FileNotFoundError(f"the checkpoint {path} does not exist, or not where this rank can see it")

    on_rank_0(lambda: durable.recover(path))
    on_every_rank(exists)
    on_rank_0(lambda: _check(path))


def _check(path: Path) -> None:
    durable.check_complete(path)
    if (path / ".metadata").exists():
        try:
            read_metadata(path)
        except DamagedError as error:
            raise ValueError(str(error)) from None


def recovering(launcher: _Launcher | None) -> _Launcher:
    """A launcher after which `ckpt_path="last"` finds what an interrupted save set aside, the same on all ranks.

    There is no hook of a strategy between the start of `fit` and the moment when the Trainer looks for the last
    checkpoint; what the launcher calls comes in between.

    Args:
        launcher: that of the strategy; None: the ranks are there already.
    """
    result = launcher or _InProcess()
    launch = result.launch

    def recover_and_launch(
        function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if trainer is not None:
                _agree_on_path(trainer)
                given = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
                trainer.strategy.given_checkpoint = given
                _recover_last(trainer, in_folders=given == "last")
                if given == "last":
                    _look_elsewhere(trainer)
            return function(*args, **kwargs)

        return launch(run, *args, trainer=trainer, **kwargs)

    result.launch = recover_and_launch  # type: ignore[method-assign]
    return result


def _recover_last(trainer: L.Trainer, *, in_folders: bool) -> None:
    """By every rank, as there is no process group yet."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):  # its checkpoint is loaded without being asked for
            durable.recover(Path(callback.ckpt_path))
        elif isinstance(callback, ModelCheckpoint) and in_folders:
            durable.recover_all(Path(callback._ModelCheckpoint__resolve_ckpt_dir(trainer)))


def _agree_on_path(trainer: L.Trainer) -> None:
    """Have all ranks resume from the path that rank 0 finds; each looks for itself, and may see another moment."""
    connector = trainer._checkpoint_connector
    if "resume_start" in vars(connector):
        return
    resume_start = connector.resume_start

    def agreed(checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        resume_start(trainer.strategy.broadcast(checkpoint_path), weights_only=weights_only)

    connector.resume_start = agreed


def _look_elsewhere(trainer: L.Trainer) -> None:
    """See that "last" does not pass over the checkpoints of runs before, for want of a fixed folder.

    Raises:
        ValueError: torchrun has restarted the run, which would begin anew; on every rank.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is not None or not trainer.loggers:
            continue
        folder = Path(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
        name = f"{callback.CHECKPOINT_NAME_LAST}*{callback.FILE_EXTENSION}"
        others = [path for path in folder.parent.parent.glob(f"*/{folder.name}/{name}") if path.parent != folder]
        if not others or any(folder.glob(name)):
            continue
        newest = max(others, key=lambda path: path.stat().st_mtime)
        text = (
            f'ckpt_path="last" looks into {folder}, which is new with this run; the newest of earlier runs is {newest}.'
            " Give the run a fixed folder, with a version for the logger"
            ' (TensorBoardLogger("runs/mine", name="", version="")) or ModelCheckpoint(dirpath=...), or give that path'
        )
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            raise ValueError(text)
        rank_zero_warn(text)


class _InProcess(_Launcher):
    """Where the ranks are there already."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Nothing: there are no processes of its own."""
