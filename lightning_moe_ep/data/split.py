"""Streams, of which each rank takes its own part: Lightning deals out map-style datasets only.

In goes a stream that is the same everywhere, out come the samples of one rank.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lightning_moe_ep.data.host import Host, name_ranks
from lightning_moe_ep.trees import leaves_of

T = TypeVar("T")


def split_by_rank(dataset: Iterable[T], *, rank: int, world_size: int) -> IterableDataset[T] | datasets.IterableDataset:
    """The samples of one rank, out of a stream that is the same on all ranks.

    Every `world_size`-th sample is the rank's, and of those each worker of its DataLoader has its own. Call it in
    `train_dataloader()` with `self.trainer.global_rank` and `self.trainer.world_size`.

    Args:
        dataset: gives the same samples in the same order on every rank and in every worker, so it shuffles by a seed
            of its own, if at all. A stream of `datasets` is split by files where they can be dealt out evenly.
        rank: this rank, out of the world.
        world_size: the number of all ranks.

    Raises:
        TypeError: the dataset is not a stream.
        ValueError: rank is not in `[0, world_size)`.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of the {world_size} ranks, 0 to {world_size - 1}")
    if isinstance(dataset, datasets.IterableDataset):
        return split_dataset_by_node(dataset, rank=rank, world_size=world_size)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is a map-style dataset, which Lightning's sampler splits by rank; leave"
            " split_by_rank out"
        )
    return _RankSamples(dataset, rank, world_size)


class _RankSamples(IterableDataset[T]):
    def __init__(self, dataset: Iterable[T], rank: int, world_size: int) -> None:
        self.dataset, self.rank, self.world_size = dataset, rank, world_size

    def __iter__(self) -> Iterator[T]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return itertools.islice(self.dataset, self.rank + number * self.world_size, None, self.world_size * workers)


def warn_of_equal_batches(host: Host, batch: list[Any], loader: str) -> None:
    """Warn if ranks begin with the same data; every rank calls this.

    Args:
        host: all ranks.
        batch: the first batch of this rank; empty if it has none.
        loader: such as "train_dataloader".
    """
    digests = host.gather(_digest(batch))
    first: dict[int | None, int] = {}
    for rank, digest in enumerate(digests):
        if digest and digest in first:
            rank_zero_warn(
                f"the {loader}s of {name_ranks([first[digest], rank])} begin with the same batch. Lightning does not"
                " split streams, nor what has a sampler of its own, by rank: use"
                " `split_by_rank(dataset, rank=self.trainer.global_rank, world_size=self.trainer.world_size)`, or all"
                " ranks compute the same"
            )
            return
        first[digest] = rank


def _digest(tree: Any) -> int:
    """Tells batches apart by their tensors, arrays, numbers and strings; 0 if there are none."""
    digest = 0
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            data = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        elif hasattr(leaf, "tobytes"):  # numpy's
            data = leaf.tobytes()
        elif isinstance(leaf, int | float | str):
            data = repr(leaf).encode()
        else:
            continue
        digest = zlib.crc32(data, digest)
    return digest
