"""Seeing, or deciding, which experts the tokens of each forward are given, whatever kind of experts module it is.

An experts module as it was found and a watcher go in; while the handle that comes out is not removed, the watcher is
told of each forward on this rank, those of evaluations and of recomputations included. In a watcher's place there may
be what says how the forward is routed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ep.experts.adapter import Replacement, Watcher, with_known_ids
from lightning_moe_ep.experts.find import ExpertsModule
from lightning_moe_ep.experts.spread import spread_of
from lightning_moe_ep.experts.stacked import positional_arguments

Told = TypeVar("Told")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class WatchHandle(Generic[Told]):
    """Ends what `watch_routing` or `replace_routing` began."""

    def __init__(self, told: list[Told], one: Told) -> None:
        self._told, self._one = told, one
        told.append(one)

    def remove(self) -> None:
        if self._one in self._told:
            self._told.remove(self._one)


def watch_routing(found: ExpertsModule, watcher: Watcher) -> WatchHandle[Watcher] | RemovableHandle:
    """Tell `watcher` of the routing of each forward of an experts module, parallel or plain.

    Raises:
        ValueError: the model is plain, and its module is not called with the routing.
    """
    if (spread := spread_of(found.module)) is not None:
        return WatchHandle(spread.watchers, watcher)

    def tell(args: tuple[Any, ...], kwargs: dict[str, Any], routing: tuple[Tensor, Tensor]) -> None:
        watcher(*routing)

    return _before_calls(found, tell)


def replace_routing(found: ExpertsModule, replacement: Replacement) -> WatchHandle[Replacement] | RemovableHandle:
    """Have `replacement` say how each forward of an experts module is routed, parallel or plain.

    In a parallel model what is recomputed goes by what was said in its forward, and asks no more.

    Raises:
        ValueError: the model is plain, and its module is not called with the routing.
    """
    if (spread := spread_of(found.module)) is not None:
        return WatchHandle(spread.replacements, replacement)
    names = _routing_arguments(found)

    def replace(args: tuple[Any, ...], kwargs: dict[str, Any], routing: tuple[Tensor, Tensor]) -> Arguments:
        index, weights = replacement(*routing)
        weights = routing[1] if weights is None else weights
        values = dict(zip(names, with_known_ids(found.adapter, index, weights, found.num_experts), strict=True))
        by_position = [values[name] for name, _ in zip(names, args[1:3], strict=False)]
        by_name = {name: values.get(name, value) for name, value in kwargs.items()}
        return (*args[:1], *by_position, *args[3:]), by_name

    return _before_calls(found, replace)


def _routing_arguments(found: ExpertsModule) -> list[str]:
    return positional_arguments(found.module)[1:3] or ["top_k_index", "top_k_weights"]


def _before_calls(
    found: ExpertsModule, then: Callable[[tuple[Any, ...], dict[str, Any], tuple[Tensor, Tensor]], Arguments | None]
) -> RemovableHandle:
    """Have `then` called before a plain experts module is, with its arguments and the routing among them."""
    if not found.adapter.called_with_routing:
        raise ValueError(
            f"what is routed to the experts of {found.name} ({type(found.module).__name__}) cannot be seen in a plain"
            " model, where they are not called with (hidden, top_k_index, top_k_weights); use MoEEPStrategy, with ep=1"
            " on one device"
        )
    names = _routing_arguments(found)

    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        index, weights = (*args[1:3], *(kwargs[name] for name in names[max(0, len(args) - 1) :]))
        return then(args, kwargs, (index, weights))

    return found.module.register_forward_pre_hook(hook, with_kwargs=True)
