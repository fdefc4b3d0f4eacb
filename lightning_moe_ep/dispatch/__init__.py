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
from lightning_moe_ep.dispatch.overlapped import OverlappedDispatcher

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "AutoDispatcher",
    "CombineDtype",
    "Dispatcher",
    "ExpertGroup",
    "Experts",
    "OverlappedDispatcher",
    "dispatcher_class",
    "register_dispatcher",
]
