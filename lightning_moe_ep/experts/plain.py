"""From what a model with spread experts holds to the names and forms that the plain model has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe_ep.experts.adapter import ExpertsAdapter
from lightning_moe_ep.experts.spread import spread_experts


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before FSDP2 put its own before it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def converted_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsAdapter]]:
    """Those that the plain model has in other pieces: the start of its parameters' names, module, adapter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module, spread in spread_experts(model):
        if type(spread.adapter).to_file is not ExpertsAdapter.to_file:
            first, parameter = next(module.named_parameters())
            yield names[id(parameter)].removesuffix(first), module, spread.adapter


def to_plain(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """From whole tensors by the names of `model`, some or all, to those of the plain model, in its order."""
    state = dict(state)
    for prefix, _, adapter in converted_experts(model):
        keys = list(state)
        mine = [key for key in keys if key.startswith(prefix)]
        if not mine:
            continue
        start = keys.index(mine[0])
        converted = adapter.to_file({key.removeprefix(prefix): state[key] for key in mine})
        state = {
            **{key: state[key] for key in keys[:start]},
            **{f"{prefix}{name}": value for name, value in converted.items()},
            **{key: state[key] for key in keys[start + len(mine) :]},
        }
    return state
