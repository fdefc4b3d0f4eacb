"""Parts of a model that a batch may leave out: the vision tower where a batch has no image.

FSDP2 reduces the gradients that there are, and hangs where ranks differ on which. Where one rank's forward left out a
part that another's did not, all get zero gradients for it beside those that they have, and reduce the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private; read at torch 2.13.0. A test fails when it moves.
from torch.utils._pytree import tree_map

from lightning_moe_ep.experts import with_zero_gradients


def complete_gradients(root: nn.Module, blocks: Sequence[nn.Module], host_group: dist.ProcessGroup) -> None:
    """Have ranks agree, in each forward of `root` that is trained, on which of its parts are used; before FSDP2.

    Costs a small exchange over the host in each such forward, and nothing for a model without towers: without layers
    in a list beside those that hold experts.

    Args:
        root: a module that is called from outside.
        blocks: those of its modules that FSDP2 shards by themselves, which every forward calls.
        host_group: all ranks, for host values.
    """
    inside = {module for block in blocks for module in block.modules()}
    parts = [module for module in root.modules() if module not in inside]
    has_tower = any(
        isinstance(part, nn.ModuleList) and any(module not in inside for module in part.children())
        for part in parts
        if next(part.parameters(), None) is not None
    )
    if host_group.size() > 1 and has_tower:
        _Completion([part for part in parts if part is not root], host_group).hook(root)


class _Completion:
    def __init__(self, parts: Sequence[nn.Module], host_group: dist.ProcessGroup) -> None:
        self._parts = [part for part in parts if next(part.parameters(), None) is not None]
        self._host_group = host_group
        self._called: set[nn.Module] = set()

    def hook(self, root: nn.Module) -> None:
        root.register_forward_pre_hook(lambda *_: self._called.clear())
        for part in self._parts:
            part.register_forward_pre_hook(lambda part, _: self._called.add(part))
        root.register_forward_hook(self._complete)

    def _complete(self, root: nn.Module, args: Any, output: Any) -> Any:
        own = {
            part: [w for w in part._parameters.values() if w is not None and w.requires_grad] for part in self._parts
        }
        if not any(own.values()) or not torch.is_grad_enabled():
            return output
        calls = torch.tensor([part in self._called for part in self._parts], dtype=torch.int32)
        dist.all_reduce(calls, group=self._host_group)
        differing = [
            part
            for part, number in zip(self._parts, calls.tolist(), strict=True)
            if 0 < number < self._host_group.size()
        ]
        # All that is inside of them, on every rank: a weight may be used without a call of its module, or not at all.
        inside = dict.fromkeys(module for part in differing for module in part.modules())
        weights = [weight for module in inside for weight in own.get(module, ())]

        def complete(value: Any) -> Any:
            differentiable = isinstance(value, Tensor) and value.requires_grad
            return with_zero_gradients(value, weights) if differentiable else value

        return tree_map(complete, output) if weights else output
