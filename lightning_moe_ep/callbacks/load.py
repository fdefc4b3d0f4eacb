"""Counting what the experts of each layer get to do in a training; shared by the callbacks that need it.

The routing of training forwards goes in; the (token, expert) pairs of each expert come out, of this rank's tokens,
counted on the device and without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_moe_ep.experts import ExpertsModule, watch_routing
from lightning_moe_ep.rows import is_recomputation


class LoadCounter:
    """Counts pairs while `counting`, but not those of forwards that activation checkpointing repeats."""

    def __init__(
        self,
        experts: Sequence[ExpertsModule],
        device: torch.device,
        *,
        also: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """
        Args:
            experts: the experts modules, each a layer.
            device: where they route.
            also: told of each forward that counts: the layer's number, its `top_k_index` and its `top_k_weights`.

        Raises:
            ValueError: the routing of one of them cannot be seen.
        """
        self.sizes = [found.num_experts for found in experts]
        """E of each layer."""
        # Each layer has one place before its experts and one after, for ids that choose none: three kernels a forward.
        widths = [size + 2 for size in self.sizes]
        self._counts = torch.zeros(sum(widths), dtype=torch.int64, device=device)
        places = torch.arange(sum(widths), device=device).split(widths)
        self._experts = torch.cat([of_layer[1:-1] for of_layer in places])
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.forwards = 0
        """Forwards of a layer since the last `reset`."""
        self.counting = False
        self._also = also
        self._handles = [
            watch_routing(found, partial(self._count, layer, counts))
            for layer, (found, counts) in enumerate(zip(experts, self._counts.split(widths), strict=True))
        ]

    def loads(self) -> Tensor:
        """`[sum of E]` int64: pairs of each expert, of one layer after the other, since the last `reset`."""
        return self._counts.index_select(0, self._experts)

    def of_layers(self, values: Tensor) -> tuple[Tensor, ...]:
        """`[sum of E]` as the `[E]` of each layer."""
        return values.split(self.sizes)

    def _count(self, layer: int, counts: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        if not self.counting or is_recomputation():
            return
        with torch.no_grad():
            places = top_k_index.flatten().long().clamp(-1, self.sizes[layer]) + 1
            counts.scatter_add_(0, places, self._one.expand(len(places)))
            if self._also is not None:
                self._also(layer, top_k_index, top_k_weights)
        self.forwards += 1

    def reset(self) -> None:
        self._counts.zero_()
        self.forwards = 0

    def close(self) -> None:
        """Count no more."""
        self.counting = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
