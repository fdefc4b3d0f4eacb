"""The `all_gather` dispatcher: every rank of the ep group sees all of the group's tokens.

Tokens and routing are gathered, each rank runs its own experts on the rows that chose them, and the partial sums are
reduce-scattered home. It sends (ep - 1) T rows a rank whatever the routing, and needs no counts before it sends; the
one host sync is for how many rows are this rank's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_ep.dispatch.base import Dispatcher, Experts, register_dispatcher
from lightning_moe_ep.dispatch.collectives import all_gather_rows, reduce_scatter_rows
from lightning_moe_ep.dispatch.local import run_experts
from lightning_moe_ep.remember import once
from lightning_moe_ep.rows import RowGroups, group_rows


@register_dispatcher("all_gather")
class AllGatherDispatcher(Dispatcher):
    """All-gather of tokens, reduce-scatter of partial outputs."""

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Tensor:
        ep = self.expert_group
        num_tokens, top_k = top_k_index.shape
        padding, groups, pair = once(lambda: self._plan(top_k_index))
        dtype = ep.sum_dtype(torch.float32, hidden=hidden.dtype)
        tokens = all_gather_rows(_pad(hidden, padding), ep.group, dtype)
        weights = all_gather_rows(_pad(top_k_weights, padding), ep.group, torch.float32)
        weight_of_pair = weights.flatten().index_select(0, pair)
        partial = run_experts(experts, tokens, groups, row_of_pair=pair // top_k, weight_of_pair=weight_of_pair)
        others = (ep.size - 1) * (num_tokens + padding)
        ep.statistics.count(
            rows_sent=others,
            rows_received=others,
            bytes_sent=others * (hidden.shape[1] * hidden.element_size() + partial.shape[1] * dtype.itemsize),
            pairs_of_expert=groups.sizes,
        )
        return reduce_scatter_rows(partial.to(dtype), ep.group)[:num_tokens].to(hidden.dtype)

    def _plan(self, top_k_index: Tensor) -> tuple[int, RowGroups, Tensor]:
        """How many rows this rank pads, and the pairs of its experts, sorted, in the group's flattened `[T, K]`.

        Ranks pad to the longest (at least one row, so that no collective is ever empty); padding chooses no expert.
        One host sync.
        """
        ep = self.expert_group
        num_tokens = len(top_k_index)
        padding = max(1, *ep.agree_on_tokens(num_tokens)) - num_tokens
        index = all_gather_rows(_pad(top_k_index, padding, value=-1), ep.group, None)
        return padding, *group_rows(index - ep.first, ep.num_local)


def _pad(rows: Tensor, padding: int, value: float = 0) -> Tensor:
    return F.pad(rows, (0, 0, 0, padding), value=value) if padding else rows
