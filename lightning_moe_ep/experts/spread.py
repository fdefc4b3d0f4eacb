"""What is known of an experts module once its experts are spread over the ranks.

`parallelize` leaves a `SpreadExperts` on the module; gradients, checkpoints and callbacks ask here which parameters
are expert parameters, rather than looking at names or at meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_moe_ep.experts.adapter import Dispatch, ExpertsAdapter, Replacement, Watcher, with_known_ids
from lightning_moe_ep.remember import once
from lightning_moe_ep.rows import RoutingStatistics

_ATTRIBUTE = "_spread_experts"


@dataclass(frozen=True)
class SpreadExperts:
    """An experts module of which this rank holds `num_local` experts, from the global id `first` on."""

    name: str
    adapter: ExpertsAdapter
    num_experts: int
    ep: int
    first: int

    mp_policy: MixedPrecisionPolicy
    """The mixed precision that it was parallelized with."""

    by_fsdp: bool
    """Whether FSDP2 manages the experts' weights; if not, each rank holds its experts whole, and no other has them."""

    host_group: dist.ProcessGroup | None = None
    """All ranks, for values of the host."""

    compiled: bool = False
    """Whether the blocks around are compiled."""

    chosen: dict[str, Any] = field(default_factory=dict)
    """Options of `parallelize` that cannot change any more; see `check_parallelized`."""

    statistics: RoutingStatistics = field(default_factory=RoutingStatistics)
    """What was routed, counted on the device; nothing at ep=1."""

    watchers: list[Watcher] = field(default_factory=list)
    """Told of the routing of each forward; see `watch_routing`."""

    replacements: list[Replacement] = field(default_factory=list)
    """The last, if any, says how a forward is routed; see `replace_routing`."""

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep

    def tell(self, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        for watcher in self.watchers:
            watcher(top_k_index, top_k_weights)

    def route(self, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The routing that holds: the model's own, or what replaces it. Watchers are told."""
        # Asked in every forward, so that a recomputation, whenever it runs, goes by what was answered in its forward.
        replaced = once(lambda: self.replacements[-1](top_k_index, top_k_weights) if self.replacements else None)
        if replaced is not None:
            top_k_index, weights = replaced
            top_k_weights = top_k_weights if weights is None else weights
            if self.ep == 1:  # else what dispatches leaves out what is for no expert
                top_k_index, top_k_weights = with_known_ids(self.adapter, top_k_index, top_k_weights, self.num_experts)
        self.tell(top_k_index, top_k_weights)
        return top_k_index, top_k_weights

    def routing(self, dispatch: Dispatch) -> Dispatch:
        """A dispatch by the routing that holds."""

        def route_and_dispatch(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return dispatch(hidden, *self.route(top_k_index, top_k_weights))

        return route_and_dispatch

    def parameters(self) -> list[nn.Parameter]:
        """Those that carry the expert dimension; the module may have others, which all experts share."""
        return [self.adapter.module.get_parameter(name) for name in self.adapter.parameters]


def mark_spread(module: nn.Module, spread: SpreadExperts) -> None:
    """Record that the experts of `module` are spread."""
    setattr(module, _ATTRIBUTE, spread)


def spread_of(module: nn.Module) -> SpreadExperts | None:
    """What was recorded of `module`, if it is an experts module that is spread."""
    return vars(module).get(_ATTRIBUTE)  # its own: a wrapper may pass on the attributes of what it wraps


def is_spread(module: nn.Module) -> bool:
    return spread_of(module) is not None


def spread_experts(model: nn.Module) -> Iterator[tuple[nn.Module, SpreadExperts]]:
    """All experts modules of `model` that `parallelize` has been over."""
    for module in model.modules():
        if (spread := spread_of(module)) is not None:
            yield module, spread


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all experts modules that `parallelize` has been over (as sharded by FSDP2, between steps)."""
    return [parameter for _, spread in spread_experts(model) for parameter in spread.parameters()]


def lone_expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of them that FSDP2 does not manage: a backward writes their gradients whether it reduces or not."""
    return [p for _, spread in spread_experts(model) if not spread.by_fsdp for p in spread.parameters()]


def ep_size(model: nn.Module) -> int:
    """ep, by the experts modules of `model`; 1 when there are none."""
    return next((spread.ep for _, spread in spread_experts(model)), 1)
