"""Parts of a model that a batch may leave out: the vision tower where a batch has no image.

FSDP2 reduces the gradients that there are, and hangs where ranks differ on which. A rank whose forward left out a part
that another rank's did not gets zero gradients for it, so that all reduce the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.experts import spread_experts, with_zero_gradients
from lightning_moe_ep.trees import map_tensors


def complete_gradients(root: nn.Module, blocks: Sequence[nn.Module], host_group: dist.ProcessGroup) -> None:
    """Have ranks agree, in each forward of `root` that is trained, on which of its parts are used; before FSDP2.

    Costs a small exchange over the host in each such forward, and nothing for a model without towers: without layers
    in a list beside those that hold experts.

    Args:
        root: a module that is called from outside.
        blocks: those of its modules that FSDP2 shards by themselves, which every forward calls.
        host_group: all ranks, for host values.
    """
    # An experts module's parameters always have gradients, whether its experts had tokens or not.
    always = [*blocks, *(experts for experts, _ in spread_experts(root))]
    inside = {module for each in always for module in each.modules()}
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
        self._parts = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
        self._host_group = host_group
        self._called: set[nn.Module] = set()

    def hook(self, root: nn.Module) -> None:
        root.register_forward_pre_hook(lambda *_: self._called.clear())
        for part in self._parts:
            part.register_forward_pre_hook(lambda part, _: self._called.add(part))
        root.register_forward_hook(self._complete)

    def _complete(self, root: nn.Module, args: Any, output: Any) -> Any:
        trained = [p for p in self._parts if any(w.requires_grad for w in p.parameters(recurse=False))]
        if not trained or not torch.is_grad_enabled():
            return output
        here = torch.tensor([part in self._called for part in trained], dtype=torch.uint8)
        somewhere = here.clone()
        dist.all_reduce(somewhere, op=dist.ReduceOp.MAX, group=self._host_group)
        missing = [part for part, left_out in zip(trained, (somewhere > here).tolist(), strict=True) if left_out]
        weights = [weight for part in missing for weight in part.parameters(recurse=False)]

        def complete(value: Tensor) -> Tensor:
            return with_zero_gradients(value, weights) if value.requires_grad else value

        return map_tensors(complete, output) if weights else output
