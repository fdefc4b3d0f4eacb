"""Each rank and each worker has its own part of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import datasets
import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_moe_ep import split_by_rank


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Counting(), datasets.Dataset.from_dict({"n": range(11)}).to_iterable_dataset()])
def test_each_sample_is_one_ranks(stream: IterableDataset[int], workers: int) -> None:
    parts = [
        [int(item["n"] if isinstance(item, dict) else item) for item in loader]
        for loader in (
            DataLoader(split_by_rank(stream, rank=rank, num_replicas=3), batch_size=None, num_workers=workers)
            for rank in range(3)
        )
    ]
    assert [len(part) for part in parts] == [4, 4, 3]
    assert sorted(number for part in parts for number in part) == list(range(11))


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(TypeError, match="list is a map-style dataset, which Lightning's sampler splits by rank"):
        split_by_rank([1, 2], rank=0, num_replicas=2)
    with pytest.raises(ValueError, match="rank=2 is not one of the 2 ranks, 0 to 1"):
        split_by_rank(Counting(), rank=2, num_replicas=2)
