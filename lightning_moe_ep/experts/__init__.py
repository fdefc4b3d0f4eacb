"""What an experts module is: finding it, computing it, and a layer of our own."""

from lightning_moe_ep.experts import families as families
from lightning_moe_ep.experts import module_list as module_list
from lightning_moe_ep.experts.adapter import Computation, Dispatch, ExpertsAdapter, register_experts
from lightning_moe_ep.experts.compute import compute_experts
from lightning_moe_ep.experts.find import ExpertsModule, NoExpertsError, find_experts
from lightning_moe_ep.experts.moe import GroupedExperts, MoELayer, SharedExpert, TopKRouter
from lightning_moe_ep.experts.spread import (
    SpreadExperts,
    ep_size,
    expert_parameters,
    is_spread,
    lone_expert_parameters,
    mark_spread,
    spread_experts,
)
from lightning_moe_ep.experts.stacked import with_zero_gradients

__all__ = [
    "Computation",
    "Dispatch",
    "ExpertsAdapter",
    "ExpertsModule",
    "GroupedExperts",
    "MoELayer",
    "NoExpertsError",
    "SharedExpert",
    "SpreadExperts",
    "TopKRouter",
    "compute_experts",
    "ep_size",
    "expert_parameters",
    "find_experts",
    "is_spread",
    "lone_expert_parameters",
    "mark_spread",
    "register_experts",
    "spread_experts",
    "with_zero_gradients",
]
