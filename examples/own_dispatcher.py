"""A dispatcher of one's own, registered under a name that `MoEEPStrategy(dispatcher=...)` then takes.

This one is the simplest that is right: every rank gets all tokens of its group, runs its experts, and the sums go home.
It takes the same number of tokens on each rank only. Run it with `python examples/own_dispatcher.py`: it trains the
module of `own_model.py` with it on two CPU processes.
"""

from __future__ import annotations

import torch
from own_model import train
from torch import Tensor

from lightning_moe_ep import Dispatcher, MoEEPStrategy, register_dispatcher
from lightning_moe_ep.dispatch import Experts, all_gather_rows, reduce_scatter_rows, run_experts
from lightning_moe_ep.rows import group_rows


@register_dispatcher("plain")
class PlainDispatcher(Dispatcher):
    """All tokens to all ranks of the group."""

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Tensor:
        ep = self.expert_group
        tokens, weights, index = (
            all_gather_rows(rows, ep.group, torch.float32) for rows in (hidden, top_k_weights, top_k_index)
        )
        # The (token, expert) pairs of this rank's experts, sorted by expert; `pair` counts through [tokens, K].
        groups, pair = group_rows(index - ep.first, ep.num_local)
        sums = run_experts(
            experts,
            tokens,
            groups,
            row_of_pair=pair // index.shape[1],
            weight_of_pair=weights.flatten()[pair],
        )
        return reduce_scatter_rows(sums, ep.group).to(hidden.dtype)


if __name__ == "__main__":
    train(MoEEPStrategy(ep=2, dispatcher="plain"))
