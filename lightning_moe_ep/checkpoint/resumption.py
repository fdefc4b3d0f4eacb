"""What a training needs beside weights and optimizers to go on as if it had not stopped: data and random numbers.

Both are in the record of a checkpoint: the position in the epoch, as samples over the world, and the states of all
ranks' random number generators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_moe_ep.checkpoint.agreement import on_every_rank
from lightning_moe_ep.checkpoint.optimizers import never_stepped
from lightning_moe_ep.checkpoint.randomness import random_state, restore_random_state
from lightning_moe_ep.checkpoint.record import KEY, NEVER_STEPPED
from lightning_moe_ep.data import count_batches_anew, give_back_open_batch, stands_inside_epoch

_RANDOM, _LOADERS = "random", "loaders"


class Resumption:
    """What was read from a checkpoint, until the training has begun."""

    def __init__(self) -> None:
        self._random: list[dict[str, Any]] | None = None
        self._cp = {"cp": 1, "saved_cp": 1}

    def write(
        self,
        checkpoint: dict[str, Any],
        module: L.LightningModule,
        optimizers: Sequence[Optimizer],
        host_group: dist.ProcessGroup,
    ) -> None:
        """Add to the record of a checkpoint, if it is one to go on from; every rank calls this.

        Args:
            checkpoint: Lightning's, with the record.
            module: what is trained.
            optimizers: which train it.
            host_group: all ranks, for CPU tensors.
        """
        if "optimizer_states" not in checkpoint:
            return
        lists = {number: never_stepped(module, optimizer) for number, optimizer in enumerate(optimizers)}
        checkpoint[KEY][NEVER_STEPPED] = {number: names for number, names in lists.items() if names}
        checkpoint[KEY][_RANDOM] = on_every_rank(random_state, group=host_group)
        # In Lightning's own place a Trainer with another strategy would refuse it.
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        if _are_positions(loop.get("combined_loader", [])):
            positions = checkpoint[KEY][_LOADERS] = loop.pop("combined_loader")
            if give_back_open_batch(module.trainer, positions):
                checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def read(self, checkpoint: dict[str, Any], *, cp: int) -> None:
        """Take it out of a checkpoint, before Lightning reads that, for a run with this cp."""
        record = checkpoint.get(KEY, {})
        self._cp = {"cp": cp, "saved_cp": record.get("layout", {}).get("cp", 1)}
        self._random = record.get(_RANDOM)
        if _LOADERS in record and "loops" in checkpoint:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = record[_LOADERS]

    def restore_random(self) -> None:
        """Let the random numbers go on; called once before the loader of an epoch draws any, once after."""
        if self._random is not None:
            restore_random_state(self._random, dist.get_rank(), dist.get_world_size(), **self._cp)

    def start(self, trainer: L.Trainer) -> None:
        """The training begins; inside of an epoch, it goes on at the same sample with the same random numbers."""
        if stands_inside_epoch(trainer):
            self.restore_random()
        if self._random is not None:
            count_batches_anew(trainer)
        self._random = None


def _are_positions(states: list[Any]) -> bool:
    return bool(states) and all(isinstance(state, dict) and set(state) == {"samples"} for state in states)
