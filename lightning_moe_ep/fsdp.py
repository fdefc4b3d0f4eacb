"""FSDP2's state beyond its public interface: what is gathered, what gradients it keeps.

Private attributes of FSDP2 are read here only; as they were in torch 2.13.0. Tests fail when they move.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_steps = 0
"""Of all optimizers of sharded parameters; every rank takes the same."""


def _count(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    _steps += any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


register_optimizer_step_post_hook(_count)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every module of `model` that FSDP2 manages."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Let go of what is gathered, so that the modules' parameters are the shards that optimizers have."""
    for managed in fsdp_modules(model):
        managed.reshard()


def gather_anew_when_changed(model: nn.Module) -> None:
    """Have a forward gather weights anew where they, or which of them are trained, have changed since.

    FSDP2 keeps what a root has gathered until a backward comes through it. Without one (a forward for the log between
    backward and step, a root that is frozen or toggled off) the next forward would go on with weights of before.
    """
    for managed in fsdp_modules(model):
        for group in managed._get_fsdp_state()._fsdp_param_groups:
            group.unshard = partial(_unshard, group, group.unshard, {})


def _unshard(group: Any, unshard: Any, gathered: dict[str, Any], async_op: bool = False) -> Any:
    # Both are the same on all ranks, as a rank that gathered alone would wait for the others.
    now = _steps, [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]
    if group.is_unsharded and group._training_state.name == "FORWARD" and gathered.get("at") != now:
        group._to_sharded()
    if not group.is_unsharded:
        gathered["at"] = now
    return unshard(async_op)


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Forget what backward without reduction has accumulated, which `zero_grad` does not reach."""
    for managed in fsdp_modules(model):
        for group in managed._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # it is, once it was gathered
                    parameter._unsharded_param.grad = None
