"""Streams, of which each rank takes its own part: Lightning deals out map-style datasets only.

In goes a stream that is the same everywhere, out come the samples of one rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import datasets
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset, get_worker_info

from lightning_moe_ep.data.alike import SPLIT, digest_of
from lightning_moe_ep.data.host import Host, name_ranks

T = TypeVar("T")


def split_by_rank(
    dataset: Iterable[T], *, rank: int, num_replicas: int
) -> IterableDataset[T] | datasets.IterableDataset:
    """The samples of one rank, out of a stream that is the same on all ranks.

    Every `num_replicas`-th sample is the rank's, and of those each worker of its DataLoader has its own. In
    `train_dataloader()` it is `split_by_rank(dataset, **self.trainer.distributed_sampler_kwargs)`, for which the ranks
    of a cp group, that need the same samples, count as one.

    Args:
        dataset: gives the same samples in the same order on every rank and in every worker, so it shuffles by a seed
            of its own, if at all. A stream of `datasets` is split by files where they can be dealt out evenly.
        rank: this rank's number.
        num_replicas: how many such numbers there are: the ranks, or at cp > 1 the cp groups.

    Raises:
        TypeError: the dataset is not a stream.
        ValueError: rank is not in `[0, num_replicas)`.
    """
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank} is not one of the {num_replicas} ranks, 0 to {num_replicas - 1}")
    if isinstance(dataset, datasets.IterableDataset):
        return split_dataset_by_node(dataset, rank=rank, world_size=num_replicas)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is a map-style dataset, which Lightning's sampler splits by rank; leave"
            " split_by_rank out"
        )
    return _RankSamples(dataset, rank, num_replicas)


class _RankSamples(IterableDataset[T]):
    def __init__(self, dataset: Iterable[T], rank: int, num_replicas: int) -> None:
        self.dataset, self.rank, self.num_replicas = dataset, rank, num_replicas

    def __iter__(self) -> Iterator[T]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return itertools.islice(self.dataset, self.rank + number * self.num_replicas, None, self.num_replicas * workers)


def warn_of_equal_batches(host: Host, batch: list[Any], loader: str) -> None:
    """Warn if ranks begin with the same data; every rank calls this.

    Args:
        host: all ranks.
        batch: the first batch of this rank; empty if it has none.
        loader: such as "train_dataloader".
    """
    digests = host.gather(digest_of(batch))
    first: dict[int | None, int] = {}
    for rank, digest in list(enumerate(digests))[:: host.cp]:
        if digest and digest in first:
            rank_zero_warn(
                f"the {loader}s of {name_ranks([first[digest], rank])} begin with the same batch. Lightning does not"
                f" split streams, nor what has a sampler of its own, by rank: use `{SPLIT}`, or all ranks compute the"
                " same"
            )
            return
        first[digest] = rank
