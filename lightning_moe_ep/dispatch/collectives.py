"""Collectives over rows that autograd can go through.

All ranks of the group must call them in the same order, in forward and (by autograd's order) in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_ep.remember import exchanged_once


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None) -> Tensor:
    """`[P, ...]` of each rank to `[ep * P, ...]` on every rank, in rank order.

    The gradients of the copies are summed for the owner of the rows, in `reduce_dtype` (None: as they come).
    """
    return _AllGatherRows.apply(rows, group, reduce_dtype)


def reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ep * P, ...]` on each rank to the `[P, ...]` sums of this rank's part, in the dtype of `rows`."""
    return _ReduceScatterRows.apply(rows, group)


@dataclass(frozen=True)
class Splits:
    """How many rows go to and come from each rank of the group."""

    send: list[int]
    receive: list[int]

    def transposed(self) -> Splits:
        """The splits of the way back."""
        return Splits(send=self.receive, receive=self.send)


class Exchange:
    """An all-to-all of rows that is under way; backward runs it the other way, also asynchronously.

    `start` sends and `wait` receives; in backward the gradient is sent where `wait` was and received where `start`
    was, so whatever stands between the two runs beside the exchange both times. On CUDA the collective runs on a
    stream of its own.
    """

    def __init__(self, rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> None:
        """
        Args:
            rows: `[sum(splits.send), ...]`, sorted by the rank they go to.
            splits: on the host; `splits.send` here is `splits.receive` there.
            group: the ranks.
        """
        self._splits, self._group = splits, group
        self._forward: _Transfer | None = None
        self._backward: _Transfer | None = None
        self._received: Tensor | None = _StartExchange.apply(rows, self)

    def wait(self) -> Tensor:
        """`[sum(splits.receive), ...]`, sorted by the rank they come from."""
        received, self._received = self._received, None  # kept, it would be a cycle with its own graph
        return _WaitExchange.apply(received, self)


class _Transfer:
    """One asynchronous all-to-all; keeps what it sends alive until it is done."""

    def __init__(self, rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> None:
        self.sent: Tensor | None = rows.contiguous()
        self.received = rows.new_empty((sum(splits.receive), *rows.shape[1:]))
        self.work: dist.Work | None = dist.all_to_all_single(
            self.received, self.sent, splits.receive, splits.send, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        self.sent = self.work = None  # remembered for a recomputation, only what was received is to be kept
        return self.received


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange._forward = exchanged_once(lambda: _Transfer(rows, exchange._splits, exchange._group))
        return exchange._forward.received.detach()  # remembered, it is another graph's already

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The incoming gradient is that of the received rows, sent already by `_WaitExchange`.
        received = ctx.exchange._backward.wait()
        ctx.exchange._backward = None
        return received, None


class _WaitExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        assert exchange._forward is not None
        exchange._forward.wait()
        exchange._forward = None
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange._backward = _Transfer(grad, exchange._splits.transposed(), exchange._group)
        return grad, None


def exchange_routing(
    weights: Tensor, headers: Tensor, splits: Splits, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Send each pair's weight and header in one all-to-all; the weights' gradient travels home in backward.

    Args:
        weights: `[P]` floating, sorted by the rank they go to.
        headers: `[P]` int16.
        splits: pairs to and from each rank.
        group: the ranks.

    Returns:
        Weights and headers of the pairs that came, sorted by the rank they come from.
    """
    return _ExchangeRouting.apply(weights, headers, splits, group)


class _ExchangeRouting(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, headers: Tensor, splits: Splits, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.splits, ctx.group = splits, group
        parts = [weights.contiguous().unsqueeze(1).view(torch.uint8), headers.unsqueeze(1).view(torch.uint8)]
        received = exchanged_once(lambda: _Transfer(torch.cat(parts, dim=1), splits, group).wait())
        weight_bytes, header_bytes = received.split([part.shape[1] for part in parts], dim=1)
        headers = _as_dtype(header_bytes, torch.int16)
        ctx.mark_non_differentiable(headers)
        return _as_dtype(weight_bytes, weights.dtype), headers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        return _Transfer(grad, ctx.splits.transposed(), ctx.group).wait(), None, None, None


def _as_dtype(columns: Tensor, dtype: torch.dtype) -> Tensor:
    # A clone: `contiguous` leaves the strides of a single row as they are, and `view` refuses them.
    return columns.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(1)


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
        return exchanged_once(lambda: _gather(rows, group)).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grad.to(ctx.reduce_dtype), ctx.group).to(ctx.dtype), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchanged_once(lambda: _scatter(rows, group)).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None
