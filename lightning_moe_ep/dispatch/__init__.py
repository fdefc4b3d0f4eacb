"""How tokens reach experts and come back: one file a dispatcher, behind the interface in `base`."""

from lightning_moe_ep.dispatch.all_gather import AllGatherDispatcher
from lightning_moe_ep.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe_ep.dispatch.auto import AutoDispatcher
from lightning_moe_ep.dispatch.base import (
    CombineDtype,
    Dispatcher,
    ExpertGroup,
    Experts,
    dispatcher_class,
    register_dispatcher,
)
from lightning_moe_ep.dispatch.collectives import all_gather_rows, reduce_scatter_rows
from lightning_moe_ep.dispatch.local import dispatch_here, run_experts
from lightning_moe_ep.dispatch.overlapped import OverlappedDispatcher
from lightning_moe_ep.remember import once, remember_exchange, remember_routing

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "CombineDtype",
    "Dispatcher",
    "ExpertGroup",
    "Experts",
    "OverlappedDispatcher",
    "all_gather_rows",
    "dispatch_here",
    "dispatcher_class",
    "once",
    "reduce_scatter_rows",
    "register_dispatcher",
    "remember_exchange",
    "remember_routing",
    "run_experts",
]
