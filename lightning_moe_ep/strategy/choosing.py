"""Which ep `MoEEPStrategy(ep="auto")` takes: the plan's where enough is known, else the largest within a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_moe_ep.context_parallel import slice_length
from lightning_moe_ep.experts import find_experts
from lightning_moe_ep.layout import largest_ep
from lightning_moe_ep.planning.auto import choose_ep
from lightning_moe_ep.planning.machine import this_machine


class ChoosingStrategy(ModelParallelStrategy):
    """Chooses ep once the model is known; the same on all ranks."""

    replicate: int
    cp: int
    parallelize_options: dict[str, Any]
    reduce_every_micro_batch: bool

    def _choose_ep(self, module: L.LightningModule, precision: str) -> int:
        """The ep, and a line in the log that says why."""
        counts = {found.name: found.num_experts for found in find_experts(module)}
        ep, why = self._planned(module, precision) or (
            largest_ep(
                self.world_size,
                replicate=self.replicate,
                devices_per_node=self.num_processes,
                num_experts=counts,
            ),
            "the largest within a node",
        )
        tell = rank_zero_info if ep > 1 else rank_zero_warn
        tell(f"ep='auto': {ep} rank(s) share one set of experts, out of {self.world_size}, {why}; E is {counts}")
        return ep

    def _planned(self, module: L.LightningModule, precision: str) -> tuple[int, str] | None:
        """What the plan finds best; None: it lacks facts. One rank's answer is everyone's."""
        machine = this_machine(self.root_device, precision)
        if machine.memory is None:  # on no rank, as all have devices of one type
            return None
        memory = torch.tensor(machine.memory, device=self.root_device)
        dist.all_reduce(memory, op=dist.ReduceOp.MIN)
        answer: tuple[int, str] | None = None
        if self.is_global_zero:
            options = {**self.parallelize_options, "reduce_every_micro_batch": self.reduce_every_micro_batch}
            try:
                choice = choose_ep(
                    module,
                    world=self.world_size,
                    replicate=self.replicate,
                    devices_per_node=self.num_processes,
                    tokens=_tokens(module, self.cp),
                    micro_batches=module.trainer.accumulate_grad_batches,
                    precision=precision,
                    machine=replace(machine, memory=int(memory)),
                    options=options,
                )
                answer = None if choice is None else (choice.ep, choice.why)
            except Exception as error:  # a model that cannot be copied, or whose shapes cannot be told
                rank_zero_info(f"ep='auto' is not planned: {type(error).__name__}: {error}")
        return self.broadcast(answer)


def _tokens(module: L.LightningModule, cp: int) -> int | None:
    """Of a micro-batch on one rank, where the data module says so."""
    data = getattr(module.trainer, "datamodule", None)
    length, sequences = getattr(data, "block_size", None), getattr(data, "batch_size", None)
    return slice_length(length, cp) * sequences if isinstance(length, int) and isinstance(sequences, int) else None
