"""Collectives over rows that autograd can go through.

Each is the other's backward: gathering everyone's rows, and summing everyone's rows for their owner. All ranks of the
group must call them, with the same shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None) -> Tensor:
    """`[P, ...]` of each rank to `[ep * P, ...]` on every rank, in rank order.

    The gradients of the copies are summed for the owner of the rows, in `reduce_dtype` (None: as they come).
    """
    return _AllGatherRows.apply(rows, group, reduce_dtype)


def reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ep * P, ...]` on each rank to the `[P, ...]` sums of this rank's part, in the dtype of `rows`."""
    return _ReduceScatterRows.apply(rows, group)


def _gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = rows.new_empty((group.size() * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_single(everyone, rows.contiguous(), group=group)
    return everyone


def _scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    dist.reduce_scatter_single(mine, rows.contiguous(), group=group)
    return mine


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype, ctx.reduce_dtype = group, rows.dtype, reduce_dtype or rows.dtype
        return _gather(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _scatter(grad.to(ctx.reduce_dtype), ctx.group).to(ctx.dtype), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather(grad, ctx.group), None
