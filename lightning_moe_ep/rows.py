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

    counts: list[int]
    """Rows of each of the L experts, on the host."""


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
    return RowGroups(offsets=counts.cumsum(0, dtype=torch.int32), counts=on_host), order[: sum(on_host)]


def no_rows(num_experts: int, device: torch.device) -> RowGroups:
    """The groups of zero rows."""
    return RowGroups(offsets=torch.zeros(num_experts, dtype=torch.int32, device=device), counts=[0] * num_experts)
