"""Whether ranks save after an exception: all or none, whatever became of the others."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lightning_moe_ep.checkpoint import after_failure
from tests.pool import RankPool


def _reasons(patience: float) -> list[str | None]:
    """On a rank of 3: what stands against a save: nothing; other steps; other collectives; no rank 2; no rank 0."""
    rank = dist.get_rank()
    world = dist.group.WORLD
    host = dist.new_group()
    ask = after_failure.why_not_to_save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(after_failure, "PATIENCE", patience)
        reasons = [ask(4, [world, host]), ask(3 if rank == 1 else 4, [world])]
        # Gloo counts a collective when it begins, also one that the others never enter.
        works = [dist.all_reduce(torch.ones(1), group=host, async_op=True)] if rank == 1 else []
        reasons.append(ask(4, [world, host]))
        works += [dist.all_reduce(torch.ones(1), group=host, async_op=True)] if rank != 1 else []
        for work in works:
            work.wait()
        for absent in (2, 0):
            dist.barrier(host)
            if rank == absent:
                time.sleep(3 * patience)
            reasons.append("absent" if rank == absent else ask(5 + absent, [world]))
        dist.barrier(host)
        reasons += [ask(4, [world, host]), ask(4, [world, host])]  # two callbacks
    return reasons


@pytest.mark.more
def test_all_save_or_none(ranks: RankPool) -> None:
    first, second, third = ranks.run(_reasons, 1.0, world=3)
    elsewhere = "rank(s) [1] did not come to save within 1 s, or stand at another point of the step"
    told = "rank 1 had no word from rank 0 within 2 s"
    assert first[:3] == third[:3] == [None, elsewhere, elsewhere] and second[:3] == [None, told, told]
    assert first[3] == second[3] == elsewhere.replace("[1]", "[2]") and third[3] == "absent"
    assert first[4] == "absent" and second[4] == third[4] and "had no word from rank 0 within 2 s" in str(second[4])
    assert first[5:] == second[5:] == third[5:] == [None, None]
