"""The hooks of a strategy whose ranks start and end together: each a line or two into `launch/`."""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.accelerators import MPSAccelerator, XLAAccelerator
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from lightning_moe_ep import checkpoint as checkpoints
from lightning_moe_ep.launch import restarts
from lightning_moe_ep.launch.children import ScriptLauncher
from lightning_moe_ep.launch.forked import ForkLauncher, is_interactive
from lightning_moe_ep.launch.guard import Guard


class LaunchingStrategy(ModelParallelStrategy):
    """Starts the ranks, and ends all of them when one fails."""

    def __init__(
        self, *, save_distributed_checkpoint: bool, process_group_backend: str | None, timeout: timedelta | None
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._guard = Guard()

    @override
    def _configure_launcher(self) -> None:
        # In the Trainer's constructor: what cannot work is refused before any process starts.
        name = type(self).__name__
        if self._layer_sync is not None:
            raise ValueError(
                f"{name} does not synchronize batch norms between ranks: leave out sync_batchnorm and LayerSync"
                " plugins, and give the model norms that do not depend on the batch (LayerNorm, RMSNorm, GroupNorm)"
            )
        if isinstance(self.accelerator, MPSAccelerator | XLAAccelerator):
            raise ValueError(
                f"{name} does not run on {type(self.accelerator).__name__}, which has no collectives of"
                " torch.distributed for DTensors: use accelerator='gpu', or 'cpu'"
            )
        environment = self.cluster_environment
        assert environment is not None
        world = self.num_nodes * self.num_processes
        launcher: ScriptLauncher | ForkLauncher | None = None
        if world > 1 and not environment.creates_processes_externally:
            script = ScriptLauncher(environment, self.num_processes, self.num_nodes)
            launcher = self._fork_launcher() if is_interactive() else script
        self._launcher = checkpoints.recovering(launcher)
        if world > 1 and not isinstance(launcher, ForkLauncher):  # which looks after its ranks itself
            self._guard.watch(self._launcher, global_rank=self.global_rank, local_rank=self.local_rank)

    @abstractmethod
    def _fork_launcher(self) -> ForkLauncher:
        """What starts the ranks of an interactive process."""

    @override
    def _setup_distributed(self) -> None:
        if restarts.is_needed() and not dist.is_initialized():
            backend = self._get_process_group_backend()
            restarts.init_process_group(backend, timeout=self._timeout, device=self.root_device)
        super()._setup_distributed()
        if self.world_size > 1:
            assert self.cluster_environment is not None
            self._guard.connect(host=self.cluster_environment.main_address, num_nodes=self.num_nodes)

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._guard.torn_down()
