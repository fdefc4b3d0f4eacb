"""The strategy of the single process: it takes the steps of a whole world, in which a cp group counts as one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe_ep.context_parallel import gather_sequences, shard_sequences
from lightning_moe_ep.trees import containers_copied


class OneProcess(SingleDeviceStrategy):
    """Has one process take the steps of a world: a batch is a list of all ranks' batches."""

    materializes_meta = True
    """The measured weights come in."""

    cp = 1

    def __init__(self, device: torch.device, *, world_size: int, on_meta: bool) -> None:
        super().__init__(device)
        self.world_size = world_size
        self.on_meta = on_meta
        self.losses: list[list[Tensor]] = [[] for _ in range(world_size)]
        self.batches: list[tuple[Any, ...]] = []
        """What `training_step` was called with, in this optimizer step."""
        self.chosen: list[Tensor] = []
        """The expert ids of the rank whose turn it is."""
        self.chosen_by_rank: list[list[Tensor]] = [[] for _ in range(world_size)]
        self._repeats = False

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init):
            if not self.on_meta:
                yield
                return
            with torch.device("meta"):
                yield

    def shard_sequences(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Sequences are whole here."""
        return shard_sequences(batch, rank=0, size=1)

    def gather_sequences(self, sliced: Tensor, *, length: int) -> Tensor:
        return gather_sequences(sliced, length=length, group=None)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._repeats:
            self._check_it_repeats(*args)
        self.batches.append(args)
        return self.of_rank(0, *args, **kwargs)

    def _check_it_repeats(self, *args: Any) -> None:
        with torch.no_grad():
            one, other = (float(loss_of(self.of_rank(0, *args))) for _ in range(2))
        if not math.isfinite(one):
            raise ValueError(f"the loss of the first batch is {one}: there is nothing to compare")
        if abs(one - other) > 1e-6 * abs(one):
            raise ValueError(
                f"the loss of one batch is {one:.7g} at first and {other:.7g} when it is computed again, with the same"
                " weights: the model, or its loss, draws random numbers in a way that verify cannot take out (it has"
                " set dropout and jitter to 0); take it out by the model's own options"
            )
        self._repeats = True

    def of_rank(self, rank: int, batches: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's `training_step`, with the batch of a rank, and as if on it."""
        self.global_rank = rank
        try:
            # It is called more than once with a batch, out of which it may take things.
            return super().training_step(containers_copied(batches[rank]), *args, **kwargs)
        finally:
            self.global_rank = 0
            self.chosen_by_rank[rank] += self.chosen
            self.chosen.clear()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self._backward(0, closure_loss, optimizer)
        for rank in range(1, self.world_size):
            self._backward(rank, self._scaled(self.of_rank(rank, *self.batches[-1])), optimizer)
        return closure_loss

    def again(self, optimizer: Optimizer) -> None:
        """The gradients of the step, anew."""
        optimizer.zero_grad()
        for arguments in self.batches:
            for rank in range(self.world_size):
                super().backward(self._scaled(self.of_rank(rank, *arguments)) / self.world_size, optimizer)

    def _scaled(self, output: Any) -> Tensor:
        assert self.lightning_module is not None
        return loss_of(output) / self.lightning_module.trainer.accumulate_grad_batches

    def _backward(self, rank: int, loss: Tensor, optimizer: Optimizer | None) -> None:
        self.losses[rank].append(loss.detach())
        super().backward(loss / self.world_size, optimizer)


def loss_of(output: Any) -> Tensor:
    """Out of what a `training_step` returned."""
    return output["loss"] if isinstance(output, Mapping) else output
