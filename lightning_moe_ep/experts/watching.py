"""Seeing which experts the tokens of each forward are given, whatever kind of experts module it is.

An experts module as it was found and a watcher go in; while the handle that comes out is not removed, the watcher is
told of each forward on this rank, those of evaluations and of recomputations included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ep.experts.adapter import Watcher
from lightning_moe_ep.experts.find import ExpertsModule
from lightning_moe_ep.experts.spread import spread_of
from lightning_moe_ep.experts.stacked import positional_arguments


class WatchHandle:
    """Ends what `watch_routing` began."""

    def __init__(self, watchers: list[Watcher], watcher: Watcher) -> None:
        self._watchers, self._watcher = watchers, watcher
        watchers.append(watcher)

    def remove(self) -> None:
        if self._watcher in self._watchers:
            self._watchers.remove(self._watcher)


def watch_routing(found: ExpertsModule, watcher: Watcher) -> WatchHandle | RemovableHandle:
    """Tell `watcher` of the routing of each forward of an experts module, parallel or plain.

    Raises:
        ValueError: the model is plain, and its module is not called with the routing.
    """
    if (spread := spread_of(found.module)) is not None:
        return WatchHandle(spread.watchers, watcher)
    if not found.adapter.called_with_routing:
        raise ValueError(
            f"what is routed to the experts of {found.name} ({type(found.module).__name__}) cannot be seen in a plain"
            " model, where they are not called with (hidden, top_k_index, top_k_weights); use MoEEPStrategy, with ep=1"
            " on one device"
        )

    names = positional_arguments(found.module)[1:3] or ["top_k_index", "top_k_weights"]

    @torch.compiler.disable
    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index, weights = (*args[1:3], *(kwargs[name] for name in names[max(0, len(args) - 1) :]))
        watcher(index, weights)

    return found.module.register_forward_pre_hook(tell, with_kwargs=True)
