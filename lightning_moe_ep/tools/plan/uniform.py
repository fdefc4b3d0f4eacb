"""Dispatchers that do all that the real ones do but look at the routing: every expert is chosen equally often.

What a plan needs, as tokens without data choose nothing. Rows and pairs that do not divide are rounded up.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ep.dispatch import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, OverlappedDispatcher
from lightning_moe_ep.dispatch.all_to_all import Chunk
from lightning_moe_ep.dispatch.auto import distinct_remote_ranks
from lightning_moe_ep.dispatch.base import Experts
from lightning_moe_ep.dispatch.collectives import Splits
from lightning_moe_ep.dispatch.local import run_experts
from lightning_moe_ep.rows import RowGroups


class UniformAllGather(AllGatherDispatcher):
    @override
    def _plan(self, top_k_index: Tensor) -> tuple[int, RowGroups, Tensor]:
        pairs = top_k_index.numel()  # of all ranks' tokens, those of this rank's experts
        return 0, uniform_groups(pairs, self.expert_group.num_local), _positions(pairs)


class UniformAllToAll(AllToAllDispatcher):
    @override
    def _plan(self, top_k_index: Tensor) -> list[Chunk]:
        num_chunks = self.num_chunks(len(top_k_index))
        bounds = [len(top_k_index) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        top_k = top_k_index.shape[1]
        return [self._chunk(first, last - first, top_k) for first, last in pairwise(bounds)]

    def _chunk(self, first_token: int, num_tokens: int, top_k: int) -> Chunk:
        group = self.expert_group
        ep = group.size
        ranks = distinct_remote_ranks(ep=ep, num_experts=group.num_experts, top_k=top_k)
        rows = _to_others(group.group.rank(), ep, -(-num_tokens * ranks // max(1, ep - 1)))
        pairs = _to_others(group.group.rank(), ep, -(-num_tokens * top_k // ep))
        num_rows, num_pairs, own = sum(rows.send), sum(pairs.send), -(-num_tokens * top_k // ep)
        return Chunk(
            first_token=first_token,
            num_tokens=num_tokens,
            rows=rows,
            pairs=pairs,
            groups=uniform_groups(num_pairs + own, group.num_local),
            sent_tokens=_positions(num_rows),
            sent_pairs=_positions(num_pairs),
            headers=_positions(num_pairs).short(),
            own_pairs=_positions(own),
            own_experts=_positions(own).short(),
            own_rows=_positions(own),
        )


class UniformOverlapped(UniformAllToAll, OverlappedDispatcher):
    pass


UNIFORM: dict[str, type[Dispatcher]] = {
    "all_gather": UniformAllGather,
    "all_to_all": UniformAllToAll,
    "overlapped": UniformOverlapped,
}
"""By the names of the dispatchers that they stand for."""


def uniform_here(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts, *, num_experts: int
) -> Tensor:
    """`dispatch_here`, where this rank has all experts."""
    pair = _positions(top_k_index.numel())
    weights = top_k_weights.flatten().index_select(0, pair)
    groups = uniform_groups(len(pair), num_experts)
    row = pair // top_k_index.shape[1]
    return run_experts(experts, hidden, groups, row_of_pair=row, weight_of_pair=weights).to(hidden.dtype)


def uniform_groups(pairs: int, num_experts: int) -> RowGroups:
    """Pairs spread evenly over experts."""
    counts = [pairs // num_experts + (number < pairs % num_experts) for number in range(num_experts)]
    return RowGroups.of(torch.tensor(counts), counts)


def _positions(number: int) -> Tensor:
    return torch.arange(number)


def _to_others(me: int, ep: int, each: float) -> Splits:
    counts = [0 if rank == me else int(each) for rank in range(ep)]
    return Splits(send=counts, receive=counts)
