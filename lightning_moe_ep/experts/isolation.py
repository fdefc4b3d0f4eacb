"""Running a module's code as if it had not run: the state of its modules and torch's random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_PLAIN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_buffers"}
"""What every module has: parameters, children, hooks. They are left alone, as FSDP2 may change them at any time."""


@contextmanager
def without_effects(block: nn.Module, experts: nn.Module) -> Iterator[None]:
    """Inside, what is changed in the buffers and the attributes of the block's modules is changed for the time only."""
    inside = set(experts.modules())
    before = [(module, dict(vars(module))) for module in block.modules() if module not in inside]
    for module, attributes in before:
        for name, value in attributes.items():
            if name not in _PLAIN_ATTRIBUTES and type(value) in (list, dict, set, Tensor):
                vars(module)[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
        vars(module)["_buffers"] = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def random_numbers_from(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, torch's random numbers start from `states`; afterwards they go on as if nothing had happened."""
    before = random_state(device)
    _set_random_state(states, device)
    try:
        yield
    finally:
        _set_random_state(before, device)
