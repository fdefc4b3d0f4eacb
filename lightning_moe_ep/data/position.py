"""Where in an epoch training is, so that a run that stopped inside one goes on with the samples that it has not seen.

The position is a number of samples over the whole world. It means the same for another number of ranks, another batch
size or another accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import lightning.pytorch as L
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_moe_ep.data.around import LoaderAround


class RemainingSamples:
    """A distributed sampler that can begin inside of an epoch.

    Args:
        sampler: gives the order of an epoch; its `epoch` may be set at any time.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler
        self.start = 0
        """Samples over the world that the next epoch leaves out at its beginning."""

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        if not start:
            return iter(self.sampler)
        given = self.sampler
        order = DistributedSampler(
            given.dataset, num_replicas=1, rank=0, shuffle=given.shuffle, seed=given.seed, drop_last=given.drop_last
        )
        order.set_epoch(given.epoch)
        whole = list(order)
        remaining, ranks = whole[start:], given.num_replicas
        if given.drop_last:
            remaining = remaining[: len(remaining) // ranks * ranks]
        else:
            missing = -len(remaining) % ranks
            remaining += (whole * (missing // len(whole) + 1))[:missing]  # as the sampler fills up a whole epoch
        return iter(remaining[given.rank :: ranks])


class ResumableLoader(LoaderAround):
    """A loader that knows its position and can start from one.

    Args:
        loader: a DataLoader that `can_resume`.
        inside_epoch: whether, at the moment when an iterator is made, training stands inside of an epoch.
    """

    def __init__(self, loader: DataLoader[Any], *, inside_epoch: Callable[[], bool]) -> None:
        sampler = loader.batch_sampler.sampler
        if not isinstance(sampler, RemainingSamples):
            sampler = loader.batch_sampler.sampler = RemainingSamples(sampler)
        super().__init__(loader, _sampler=sampler, _inside_epoch=inside_epoch, _given=0, _position=0)

    @property
    def samples_per_batch(self) -> int:
        """Over the whole world."""
        return self._loader.batch_size * self._sampler.sampler.num_replicas

    @property
    def batches_left(self) -> int:
        """Batches of each rank from the position to the end of the epoch."""
        sampler, batches = self._sampler.sampler, self._loader.batch_sampler
        left = max(0, len(sampler.dataset) - self._position)
        for size, drops in ((sampler.num_replicas, sampler.drop_last), (self._loader.batch_size, batches.drop_last)):
            left = left // size if drops else -(-left // size)
        return left

    def __iter__(self) -> Iterator[Any]:
        start = self._given if self._inside_epoch() else 0
        self.__dict__.update(_given=0, _position=start)
        self._sampler.start = start
        return self._counted(iter(self._loader))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.__dict__["_position"] += self.samples_per_batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The samples over the world, since the epoch began, of the batches that were taken."""
        return {"samples": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next epoch, if it is one that was begun, after those samples."""
        self.__dict__["_given"] = state["samples"]


def resumable(loader: object, trainer: L.Trainer) -> object:
    """The training loader, in a `ResumableLoader` if it `can_resume`."""
    if not can_resume(loader):
        return loader
    return ResumableLoader(cast(DataLoader[Any], loader), inside_epoch=lambda: stands_inside_epoch(trainer))


def can_resume(loader: object) -> bool:
    """Whether the order of the samples of `loader` is that of a distributed sampler, and nothing else."""
    return (
        isinstance(loader, DataLoader)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler) is DistributedSampler
    )


def stands_inside_epoch(trainer: L.Trainer) -> bool:
    """Whether a fit that goes on from a checkpoint does so inside of an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    # Saved as a batch ended, a checkpoint counts it as processed, but not as completed.
    return progress.current.processed > 0 and not progress.is_last_batch


def give_back_open_batch(trainer: L.Trainer, positions: list[dict[str, int]]) -> bool:
    """Take the batch that is in training out of the loaders' positions, as it is trained again after a restart.

    Args:
        trainer: saves, after an error for example.
        positions: of its loaders; changed in place.

    Returns:
        Whether there is such a batch.
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    combined = trainer.fit_loop._combined_loader
    given: list[Any] = combined.flattened if combined is not None else []
    loaders = [loader for loader in given if hasattr(loader, "samples_per_batch")]
    if current.ready == current.processed or len(loaders) != len(positions):
        return False
    for loader, position in zip(loaders, positions, strict=True):
        open_samples = (current.ready - current.processed) * loader.samples_per_batch
        position["samples"] = max(0, position["samples"] - open_samples)
    return True


def count_batches_anew(trainer: L.Trainer) -> None:
    """Have the epoch's progress, which counts batches, mean the same samples with the loaders that there are now.

    Args:
        trainer: goes on from a checkpoint; its loaders have their positions.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    combined = trainer.fit_loop._combined_loader
    first: Any = combined.flattened[0] if combined is not None else None
    if not progress.current.processed or not hasattr(first, "samples_per_batch"):
        return
    done = trainer.num_training_batches
    if not progress.is_last_batch:
        # Counted from the end: the loop waits for as many batches as come, and knows which is the last of the epoch.
        done = min(done, len(first) - first.batches_left)
    if math.isinf(done):
        return
    current = progress.current
    open_batches = current.processed - current.completed
    current.ready = current.started = current.processed = int(done)
    current.completed = int(done) - open_batches
