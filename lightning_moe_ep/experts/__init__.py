"""What an experts module is: finding it, computing it, and a layer of our own."""

from lightning_moe_ep.experts import families as families
from lightning_moe_ep.experts import module_list as module_list
from lightning_moe_ep.experts.adapter import Computation, Dispatch, ExpertsAdapter, Watcher, is_a, register_experts
from lightning_moe_ep.experts.bias import ChoiceBias, biases_around, choice_biases
from lightning_moe_ep.experts.compute import compute_experts
from lightning_moe_ep.experts.find import ExpertsModule, NoExpertsError, find_experts
from lightning_moe_ep.experts.kept_logits import keep_router_logits, router_logits
from lightning_moe_ep.experts.lora import LoraExperts, initialise_adapters
from lightning_moe_ep.experts.moe import GroupedExperts, MoELayer, SharedExpert, TopKRouter
from lightning_moe_ep.experts.plain import converted_experts, plain_class, to_plain
from lightning_moe_ep.experts.quantized import check_not_quantized
from lightning_moe_ep.experts.replay import ReplayedWeights, Routing, record_routing, replay_routing
from lightning_moe_ep.experts.routers import (
    ROUTERS,
    RouterDtype,
    find_routers,
    fit_outputs,
    logits_of,
    modules_called,
    with_routers,
)
from lightning_moe_ep.experts.spread import (
    SpreadExperts,
    ep_size,
    expert_parameters,
    is_spread,
    lone_expert_parameters,
    mark_spread,
    spread_experts,
    spread_of,
)
from lightning_moe_ep.experts.stacked import with_zero_gradients
from lightning_moe_ep.experts.watching import WatchHandle, watch_routing

__all__ = [
    "ROUTERS",
    "ChoiceBias",
    "Computation",
    "Dispatch",
    "ExpertsAdapter",
    "ExpertsModule",
    "GroupedExperts",
    "LoraExperts",
    "MoELayer",
    "NoExpertsError",
    "ReplayedWeights",
    "RouterDtype",
    "Routing",
    "SharedExpert",
    "SpreadExperts",
    "TopKRouter",
    "WatchHandle",
    "Watcher",
    "biases_around",
    "check_not_quantized",
    "choice_biases",
    "compute_experts",
    "converted_experts",
    "ep_size",
    "expert_parameters",
    "find_experts",
    "find_routers",
    "fit_outputs",
    "initialise_adapters",
    "is_a",
    "is_spread",
    "keep_router_logits",
    "logits_of",
    "lone_expert_parameters",
    "mark_spread",
    "modules_called",
    "plain_class",
    "record_routing",
    "register_experts",
    "replay_routing",
    "router_logits",
    "spread_experts",
    "spread_of",
    "to_plain",
    "watch_routing",
    "with_routers",
    "with_zero_gradients",
]
