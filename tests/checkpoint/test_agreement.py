"""What fails on one rank fails on all, in the same words."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from lightning_moe_ep.checkpoint.agreement import on_every_rank, on_rank_0
from tests.pool import RankPool


class OfTheirsError(Exception):
    """Of a kind that other processes may not know."""

    def __reduce__(self) -> str:
        raise pickle.PicklingError("cannot be sent")


def _outcomes() -> list[object]:
    rank = dist.get_rank()

    def told(action: object) -> str:
        with pytest.raises(Exception) as error:
            action()  # type: ignore[operator]
        return f"{type(error.value).__name__}: {error.value}"

    def fail(with_error: Exception, on: tuple[int, ...]) -> int:
        if rank in on:
            raise with_error
        return rank

    return [
        on_rank_0(lambda: f"of rank {rank}"),
        on_every_rank(lambda: rank),
        told(lambda: on_rank_0(lambda: fail(FileNotFoundError(2, "gone"), (0,)))),
        told(lambda: on_every_rank(lambda: fail(ValueError(f"by rank {rank}"), (1, 2)))),
        told(lambda: on_every_rank(lambda: fail(OfTheirsError("text"), (2,)))),
        on_rank_0(lambda: "still together"),
    ]


def test_all_ranks_end_alike(ranks: RankPool) -> None:
    assert (
        ranks.run(_outcomes, world=3)
        == [
            [
                "of rank 0",
                [0, 1, 2],
                "FileNotFoundError: [Errno 2] gone",
                "ValueError: by rank 1",
                "RuntimeError: OfTheirsError: text",
                "still together",
            ]
        ]
        * 3
    )


def test_one_process_without_a_group() -> None:
    assert on_rank_0(lambda: 1) == 1 and on_every_rank(lambda: 2) == [2]
