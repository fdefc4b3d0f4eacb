"""What the ranks tell each other about their data, over the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Host:
    """All ranks; every rank calls each method. Alone, a rank exchanges nothing.

    Args:
        group: all ranks, for CPU tensors.
        cp: how many consecutive ranks have the same batches, of which each computes its slice.
    """

    def __init__(self, group: dist.ProcessGroup, *, cp: int = 1) -> None:
        self._group = group
        self.rank, self.size, self.cp = group.rank(), group.size(), cp

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """The sums over the ranks of equally many numbers of each; one message."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers)
        dist.all_reduce(sums, group=self._group)
        return sums.tolist()

    def gather(self, value: T) -> list[T]:
        """What each rank gave, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def send(self, value: T, source: int) -> T:
        """What rank `source` gave."""
        sent = [value if self.rank == source else None]
        dist.broadcast_object_list(sent, src=source, group=self._group)
        return sent[0]  # type: ignore[return-value]


def name_ranks(ranks: Sequence[int]) -> str:
    """For a message: `rank 1`, `ranks 1, 2, 5`; of more than eight, the first ones and how many there are."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def raise_together(host: Host, error: Exception | None, loader: str) -> None:
    """Raise on every rank, as at least one of them has an error.

    Args:
        host: all ranks.
        error: this rank's own, which is raised as it is.
        loader: such as "train_dataloader".

    Raises:
        RuntimeError: on ranks without an error; names the first rank that has one.
    """
    texts = host.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise RuntimeError(f"the {loader} of rank {rank} failed, so this rank ends as well: {text}")
