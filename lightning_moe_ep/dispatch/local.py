"""What every dispatcher does between its exchanges: gather rows for the experts, sum their weighted outputs by row.

Sums are in fp32 whatever the activations' dtype, and only the indices are kept for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_ep.dispatch.base import Experts
from lightning_moe_ep.rows import RowGroups, group_rows


def run_experts(
    experts: Experts, source: Tensor, groups: RowGroups, *, row_of_pair: Tensor, weight_of_pair: Tensor
) -> Tensor:
    """Run this rank's experts for (row, expert) pairs and sum what they give for each row.

    Args:
        experts: runs this rank's experts.
        source: `[N, H]`, the rows.
        groups: which pairs belong to which expert; P pairs in all.
        row_of_pair: `[P]` int64, sorted by expert; a row may occur several times or not at all.
        weight_of_pair: `[P]`, in the same order.

    Returns:
        `[N, H]` in fp32: for each row the weighted sum of its experts' outputs; zero where it has none.
    """
    outputs = experts(_TakeRows.apply(source, row_of_pair), groups, weight_of_pair)
    return _SumRows.apply(outputs, row_of_pair, source.shape[0])


def dispatch_here(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts, *, num_experts: int
) -> Tensor:
    """What a dispatcher does, where this rank has all E experts."""
    groups, pair = group_rows(top_k_index, num_experts)
    weights = top_k_weights.flatten().index_select(0, pair)
    row = pair // top_k_index.shape[1]
    return run_experts(experts, hidden, groups, row_of_pair=row, weight_of_pair=weights).to(hidden.dtype)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros((ctx.num_rows, *grad.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = outputs.dtype
        total = outputs.new_zeros((num_rows, outputs.shape[1]), dtype=torch.float32)
        return total.index_add_(0, index, outputs.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index).to(ctx.dtype), None, None
