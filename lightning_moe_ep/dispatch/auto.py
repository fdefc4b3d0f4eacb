"""The `auto` dispatcher: `all_gather` or `all_to_all`, whichever moves less by a cost model.

The model, for one forward of a layer, in bytes that a rank sends for each of its tokens:

* `all_gather`: (ep - 1) (H a + m) to gather, (ep - 1) H c to scatter the sums, with a and c the bytes of an element of
  the activations and of the sums, and m those of a token's routing;
* `all_to_all`: D (H a + H c), where D = (ep - 1) (1 - C(E - L, K) / C(E, K)) is how many other ranks hold at least one
  of K experts drawn without preference, plus 6 bytes a pair for routing.

Each is weighted by how slowly the backend moves a byte in that collective. The tokens cancel out, so every rank comes
to the same choice without asking. `overlapped` is not a candidate: what it hides depends on the device, which no
formula here knows; choose it by name.
"""

from __future__ import annotations

import logging
from functools import cache
from math import comb

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ep.dispatch.all_gather import AllGatherDispatcher
from lightning_moe_ep.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe_ep.dispatch.base import Dispatcher, ExpertGroup, Experts, register_dispatcher

log = logging.getLogger(__name__)

SLOWNESS = {
    # gloo on one host, 2 ranks, 2 MiB a rank: 2.9 ms and 5.3 ms where all_to_all takes 1.1 ms (torch 2.13).
    "gloo": {"gather": 2.6, "scatter": 4.9},
}
"""Time a byte takes in an all-gather and a reduce-scatter, in units of an all-to-all's, by backend; 1 if not listed."""

COUNTS = 0.05
"""The share by which all_to_all must be cheaper, for its exchange of counts, which the rows have to wait for."""


@register_dispatcher("auto")
class AutoDispatcher(Dispatcher):
    """Decides at the first call, once for all."""

    def __init__(self, expert_group: ExpertGroup) -> None:
        super().__init__(expert_group)
        self._chosen: Dispatcher | None = None

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Tensor:
        if self._chosen is None:
            self._chosen = self._choose(hidden, top_k_index, top_k_weights)
        return self._chosen(hidden, top_k_index, top_k_weights, experts)

    def _choose(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatcher:
        group = self.expert_group
        gather, exchange = costs(
            ep=group.size,
            num_experts=group.num_experts,
            top_k=top_k_index.shape[1],
            hidden_size=hidden.shape[1],
            dtype=hidden.dtype,
            gather_sum_dtype=group.sum_dtype(torch.float32, hidden=hidden.dtype),
            exchange_sum_dtype=group.sum_dtype(hidden.dtype, hidden=hidden.dtype),
            backend=dist.get_backend(group.group),
        )
        chosen = AllToAllDispatcher if exchange < gather * (1 - COUNTS) else AllGatherDispatcher
        if dist.get_rank() == 0:
            _log_once(
                f"dispatcher='auto': {chosen.name} (weighted bytes a token: all_gather {gather:,.0f}, all_to_all"
                f" {exchange:,.0f}) for ep={group.size}, E={group.num_experts}, K={top_k_index.shape[1]},"
                f" H={hidden.shape[1]}, {hidden.dtype}"
            )
        return chosen(group)


def costs(
    *,
    ep: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    gather_sum_dtype: torch.dtype,
    exchange_sum_dtype: torch.dtype,
    backend: str,
) -> tuple[float, float]:
    """Weighted bytes a token in forward, of `all_gather` and of `all_to_all`; see the module for the formula."""
    slowness = SLOWNESS.get(backend, {"gather": 1.0, "scatter": 1.0})
    row = hidden_size * dtype.itemsize
    gather = slowness["gather"] * (row + top_k * (8 + dtype.itemsize))
    scatter = slowness["scatter"] * hidden_size * gather_sum_dtype.itemsize
    ranks = distinct_remote_ranks(ep=ep, num_experts=num_experts, top_k=top_k)
    pairs = top_k * (ep - 1) / ep
    exchange = ranks * (row + hidden_size * exchange_sum_dtype.itemsize) + pairs * (2 + dtype.itemsize)
    return (ep - 1) * (gather + scatter), exchange


def distinct_remote_ranks(*, ep: int, num_experts: int, top_k: int) -> float:
    """How many other ranks hold at least one of `top_k` experts drawn uniformly without replacement."""
    return (ep - 1) * (1 - comb(num_experts - num_experts // ep, top_k) / comb(num_experts, top_k))


@cache
def _log_once(message: str) -> None:
    log.info(message)
