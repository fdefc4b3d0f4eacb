"""Rows grouped by expert: what dispatchers make and experts compute on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowGroups:
    """Which rows belong to which of L experts: rows are sorted by expert."""

    offsets: Tensor
    """`[L]` int32 on the device: where each expert's rows end."""

    sizes: Tensor
    """`[L]` int64 on the device: rows of each expert."""

    counts: list[int]
    """The same on the host."""

    @classmethod
    def of(cls, sizes: Tensor, counts: list[int]) -> RowGroups:
        return cls(offsets=sizes.cumsum(0, dtype=torch.int32), sizes=sizes, counts=counts)


class RoutingStatistics:
    """What an experts module routed since the last `reset`, on this rank; reading it is up to the reader.

    Counted in every forward, but not again when activation checkpointing recomputes one.
    """

    def __init__(self) -> None:
        self.readers: list[RoutingStatistics] = []
        """Others that count the same from now on, and are reset on their own."""
        self.reset()

    def reset(self) -> None:
        self.forwards = 0
        """Forwards counted."""
        self.rows_sent = 0
        """Rows of tokens sent to other ranks."""
        self.rows_received = 0
        """Rows of tokens that came from other ranks."""
        self.bytes_sent = 0
        """Bytes of the rows and sums sent to other ranks in forward; backward sends as many."""
        self.pairs_of_expert: Tensor | None = None
        """`[L]` int64 on the device: (token, expert) pairs that each of this rank's experts computed."""

    def __repr__(self) -> str:
        shown = ("forwards", "rows_sent", "rows_received", "bytes_sent", "pairs_of_expert")
        return f"RoutingStatistics({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"

    def count(self, *, rows_sent: int, rows_received: int, bytes_sent: int, pairs_of_expert: Tensor) -> None:
        if is_recomputation():
            return
        self.forwards += 1
        self.rows_sent += rows_sent
        self.rows_received += rows_received
        self.bytes_sent += bytes_sent
        before = self.pairs_of_expert
        self.pairs_of_expert = pairs_of_expert.detach().clone() if before is None else before.add_(pairs_of_expert)
        for reader in self.readers:
            reader.count(
                rows_sent=rows_sent,
                rows_received=rows_received,
                bytes_sent=bytes_sent,
                pairs_of_expert=pairs_of_expert,
            )


def is_recomputation() -> bool:
    """Whether the forward that is running is one that activation checkpointing runs again."""
    # Private; read at torch 2.13: a forward inside of a backward is a recomputation.
    return torch._C._current_graph_task_id() != -1


def group_rows(experts_of_rows: Tensor, num_experts: int) -> tuple[RowGroups, Tensor]:
    """Sort rows by their expert, leaving out those of other experts.

    One host sync, for the counts.

    Args:
        experts_of_rows: integers of any shape; ids outside `[0, num_experts)` are left out.
        num_experts: L.

    Returns:
        The groups, and the `[R]` positions, in the flattened input, of the rows in sorted order.
    """
    ids = experts_of_rows.flatten()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]
    order = torch.argsort(ids, stable=True)
    on_host = counts.tolist()
    return RowGroups.of(counts, on_host), order[: sum(on_host)]


def no_rows(num_experts: int, device: torch.device) -> RowGroups:
    """The groups of zero rows."""
    return RowGroups.of(torch.zeros(num_experts, dtype=torch.int64, device=device), [0] * num_experts)
