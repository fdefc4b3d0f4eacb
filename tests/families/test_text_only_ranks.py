"""Multimodal models where some ranks have images and others have none: nothing hangs, and gradients are right."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.families.multimodal import TOWERS, multimodal_batch, multimodal_loss, multimodal_model
from tests.families.sweep import compare
from tests.matrix import mostly_in_the_sweep
from tests.pool import RankPool


def _compare(family: str, with_images: tuple[int, ...]) -> list[str]:
    rank = dist.get_rank()
    batch = multimodal_batch(family, rank in with_images, seed=rank)
    return compare(lambda: multimodal_model(family), lambda model: multimodal_loss(model, batch), ep=2)


CASES = {"first": ((0,), 2), "second": ((1,), 2), "none": ((), 2), "all": ((0, 1), 2), "one of four": ((2,), 4)}


@pytest.mark.parametrize("case", mostly_in_the_sweep(CASES, "first", "one of four"))
@pytest.mark.parametrize("family", TOWERS)
def test_ranks_without_images(ranks: RankPool, family: str, case: str) -> None:
    with_images, world = CASES[case]
    assert ranks.run(_compare, family, with_images, world=world)[0] == []
