"""Before a checkpoint is read: put back what an interrupted save set aside, and see that it is complete."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

# Private; read at lightning 2.6.6. A test fails when it moves.
from lightning.pytorch.strategies.launchers.launcher import _Launcher
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
    """A launcher after which `ckpt_path="last"` finds what an interrupted save set aside.

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
                given = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
                trainer.strategy.given_checkpoint = given
                _recover_last(trainer, in_folders=given == "last")
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
