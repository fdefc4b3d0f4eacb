"""An epoch that is begun at a position: the samples that are left, each once, in the order of the whole epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_moe_ep.data.position import RemainingSamples, ResumableLoader, can_resume


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loaders(
    length: int,
    world: int,
    batch_size: int,
    inside: bool = True,
    epoch: int = 3,
    sampler_drops: bool = False,
    **options: Any,
) -> list[ResumableLoader]:
    result = []
    for rank in range(world):
        data = Numbers(length)
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=5, drop_last=sampler_drops)
        loader = DataLoader(data, batch_size=batch_size, sampler=sampler, **options)
        result.append(ResumableLoader(loader, inside_epoch=lambda: inside))
        result[-1].sampler.set_epoch(epoch)
    return result


def in_order(of_ranks: list[ResumableLoader]) -> list[int]:
    """The samples of all ranks, as the steps take them."""
    batches = [list(loader) for loader in of_ranks]
    return [
        sample
        for step in zip(*batches, strict=True)
        for place in zip(*(batch.tolist() for batch in step), strict=True)
        for sample in place
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("world", "batch_size"), [(1, 12), (2, 6), (3, 4), (4, 3)])
def test_other_ranks_go_on_where_the_first_stopped(world: int, batch_size: int, workers: int) -> None:
    whole = in_order(loaders(96, 4, 3))
    assert sorted(whole) == list(range(96))
    before = loaders(96, 4, 3)
    for loader in before:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
    (state,) = {tuple(loader.state_dict().items()) for loader in before}
    assert dict(state) == {"samples": 36}
    after = loaders(96, world, batch_size, num_workers=workers)
    for loader in after:
        loader.load_state_dict(dict(state))
    assert in_order(after) == whole[36:]
    assert {loader.state_dict()["samples"] for loader in after} == {96}
    assert in_order(after) == whole, "the next epoch is a whole one"


def test_what_does_not_divide_is_filled_up_as_the_sampler_does() -> None:
    (alone,) = loaders(10, 1, 1)
    order = in_order([alone])
    after = loaders(10, 4, 1)
    for loader in after:
        loader.load_state_dict({"samples": 4})
    assert in_order(after) == [*order[4:], *order[:2]]


def test_a_new_epoch_is_a_whole_one() -> None:
    (loader,) = loaders(8, 1, 2, inside=False)
    loader.load_state_dict({"samples": 4})
    assert len(in_order([loader])) == 8


def test_the_length_is_that_of_a_whole_epoch() -> None:
    (loader,) = loaders(8, 1, 2)
    loader.load_state_dict({"samples": 4})
    assert len(loader) == 4
    assert len(list(loader)) == 2


def test_what_is_around_it_twice_counts_once() -> None:
    (loader,) = loaders(8, 1, 2)
    again = ResumableLoader(loader._loader, inside_epoch=lambda: True)
    again.load_state_dict({"samples": 6})
    assert len(in_order([again])) == 2


def test_which_loaders_can_resume() -> None:
    data = Numbers(8)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    assert can_resume(DataLoader(data, sampler=sampler))
    assert not can_resume(DataLoader(data, sampler=SequentialSampler(data)))
    assert not can_resume(DataLoader(data, sampler=sampler, batch_size=None))
    assert not can_resume([torch.zeros(1)])


def test_dropping_the_last() -> None:
    sampler = DistributedSampler(Numbers(11), num_replicas=2, rank=1, shuffle=False, drop_last=True)
    remaining = RemainingSamples(sampler)
    remaining.start = 4
    assert list(remaining) == [5, 7, 9]
    assert list(remaining) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize(("drops", "sampler_drops"), [(False, False), (True, False), (False, True)])
def test_batches_left(world: int, batch_size: int, drops: bool, sampler_drops: bool) -> None:
    for start in (0, 4, 9, 22, 23, 30):
        for loader in loaders(23, world, batch_size, sampler_drops=sampler_drops, drop_last=drops):
            loader.load_state_dict({"samples": start})
            batches = iter(loader)
            assert loader.batches_left == len(list(batches))
