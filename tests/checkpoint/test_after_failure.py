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
                after_failure._asked += 1
                time.sleep(3 * patience)
            reasons.append("absent" if rank == absent else ask(4, [world]))
        dist.barrier(host)
        reasons.append(ask(4, [world, host]))
    return reasons


def test_all_save_or_none(ranks: RankPool) -> None:
    first, second, third = ranks.run(_reasons, 1.0, world=3)
    differ = "the ranks were stopped at different points of a step"
    assert first[:3] == second[:3] == third[:3] == [None, differ, differ]
    assert first[3] == second[3] == "rank(s) [2] did not come to save within 1 s" and third[3] == "absent"
    assert first[4] == "absent" and second[4] == third[4] and "had no word from rank 0 within 2 s" in str(second[4])
    assert first[5] is second[5] is third[5] is None
