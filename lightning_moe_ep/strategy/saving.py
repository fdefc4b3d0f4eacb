"""The hooks of a strategy that saves, loads and resumes: each a line or two into `checkpoint/`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe_ep import checkpoint as checkpoints
from lightning_moe_ep.callbacks import averaging_of
from lightning_moe_ep.launch.forked import ForkLauncher
from lightning_moe_ep.mesh import Meshes
from lightning_moe_ep.strategy.launching import LaunchingStrategy


class SavingStrategy(LaunchingStrategy):
    """Saves and resumes at any layout, in folders or in one file, also while training goes on."""

    def __init__(
        self,
        *,
        save_distributed_checkpoint: bool,
        async_save: bool,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._saver = checkpoints.Saver(folders=save_distributed_checkpoint, meanwhile=async_save, timeout=timeout)
        self._resumption = checkpoints.Resumption()
        self.given_checkpoint: str | Path | None = None
        """The `ckpt_path` that the Trainer's method was given, which it has not looked for yet."""

    @property
    def saves_averages(self) -> bool:
        """That checkpoints have what a `ShardedWeightAveraging` has."""
        return True

    @property
    @abstractmethod
    def meshes(self) -> Meshes:
        """The meshes of the run."""

    @override
    def _fork_launcher(self) -> ForkLauncher:
        if self.num_nodes > 1:
            raise ValueError(
                f"num_nodes={self.num_nodes} in an interactive process: its ranks are forked from it, on this node; use"
                " num_nodes=1, or run the code as a script"
            )
        return ForkLauncher(self, save_whole=self._save_whole)

    def _save_whole(self, path: Path) -> None:
        """Save the plain model's weights as one file, whatever the Trainer's checkpoints are."""
        assert self.lightning_module is not None
        self._saver.folders, before = False, self._saver.folders
        try:
            self.lightning_module.trainer.save_checkpoint(path, weights_only=True)
        finally:
            self._saver.folders = before

    @property
    def _forked_from_here(self) -> bool:
        """Whether this is the user's process, where the module is plain and the ranks have ended."""
        return isinstance(self._launcher, ForkLauncher) and not self._launcher.is_rank

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._forked_from_here:
            return self.lightning_module.state_dict()
        averaging = averaging_of(self.lightning_module.trainer)
        return self._saver.model_state(self.lightning_module, averaging.averages() if averaging else {})

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._saver.optimizer_state(self.lightning_module, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        assert self.lightning_module is not None
        if storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # refuses it
        if self._forked_from_here:
            if not self._launcher.has_failed:  # else the ranks have seen to it
                self._launcher.save(checkpoint, Path(filepath), self.lightning_module)
            return
        averaging = averaging_of(self.lightning_module.trainer)
        if averaging and averaging.averages() and "optimizer_states" in checkpoint:
            checkpoint[checkpoints.CURRENT] = self._saver.model_state(self.lightning_module, averaging.trained())
        checkpoint[checkpoints.KEY] = checkpoints.describe(self.lightning_module, self.layout, self.optimizers)
        self._resumption.write(checkpoint, self.lightning_module, self.optimizers, self.meshes.host_group)
        self._saver.save(self.broadcast(filepath), checkpoint, self.meshes.host_group)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self._saver.remove(Path(filepath))

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self._resumption.start(self.lightning_module.trainer)
        self._saver.start()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._saver.step(self.meshes.host_group)

    @override
    def on_train_end(self) -> None:
        self._saver.finish(self.meshes.host_group)

    @override
    def teardown(self) -> None:
        self._saver.close()
        if isinstance(self._launcher, ForkLauncher):
            self._launcher.has_failed = False
        super().teardown()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if averaging := averaging_of(self.lightning_module.trainer):
            averaging.forget()
        checkpoint = checkpoints.load(
            Path(self.broadcast(checkpoint_path)),
            self.lightning_module,
            self.optimizers if fitting else [],
            strict=self.lightning_module.strict_loading,
            weights_only=weights_only,
            training=fitting,
            averages=averaging.make if averaging and fitting else None,
        )
        if fitting:
            self._resumption.read(checkpoint, cp=self.layout.cp)
            # A module may have asked for `estimated_stepping_batches` in `configure_optimizers`: its loader was then
            # set up, and begun, before the position was known. Lightning sets it up again, at the position.
            self.lightning_module.trainer.fit_loop._combined_loader = None
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has filled the model."""
