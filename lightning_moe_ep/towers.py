"""Parts of a model that a batch may leave out: the vision tower where a batch has no image.

FSDP2 reduces the gradients that there are, and hangs where ranks differ on which. Where one rank's forward left out a
part that another's did not, all get zero gradients for it beside those that they have, and reduce the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.experts import spread_experts, with_zero_gradients
from lightning_moe_ep.rows import is_recomputation
from lightning_moe_ep.trees import map_tensors


def keep_ranks_together(
    model: nn.Module,
    roots: Sequence[nn.Module],
    sequences: Sequence[Sequence[nn.Module]],
    host_group: dist.ProcessGroup,
) -> None:
    """Let ranks go different ways through a model where that can be, and refuse it where it cannot.

    After FSDP2, whose hooks must come later than these, and see what they do.

    Args:
        model: the whole model.
        roots: its modules that are called from outside.
        sequences: its lists of layers that FSDP2 shards by themselves, with experts in them.
        host_group: all ranks, for host values.
    """
    if host_group.size() == 1:
        return
    names = {module: name for name, module in model.named_modules()}
    for root in roots:
        inside = set(root.modules())
        firsts = [sequence[0] for sequence in sequences if sequence and sequence[0] in inside]
        if len(firsts) > 1:
            _check_same_way(root, {names[block]: block for block in firsts}, host_group)
        _complete_gradients(root, sequences, firsts, host_group)


def _complete_gradients(
    root: nn.Module,
    sequences: Sequence[Sequence[nn.Module]],
    firsts: Sequence[nn.Module],
    host_group: dist.ProcessGroup,
) -> None:
    """Have ranks agree, in each forward of `root` that is trained, on which of its parts are used.

    Costs a small exchange over the host in each such forward, and nothing for a model without towers: without layers
    in a list beside those that hold experts.
    """
    # An experts module's parameters always have gradients, whether its experts had tokens or not.
    always = [block for sequence in sequences for block in sequence]
    always += [experts for experts, _ in spread_experts(root)]
    inside = {module for each in always for module in each.modules()}
    parts = [module for module in root.modules() if module not in inside]
    has_tower = any(
        isinstance(part, nn.ModuleList) and any(module not in inside for module in part.children())
        for part in parts
        if next(part.parameters(), None) is not None
    )
    if has_tower:
        _Completion([part for part in parts if part is not root], host_group).hook(root)
        for block in firsts:
            block.register_forward_pre_hook(_require_gradient, prepend=True)


def _require_gradient(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let the first layer's input require a gradient on every rank, if it does where a trained tower adds to it.

    torch 2.13: FSDP2 reduces a module's gradients when that of its input is there, and those of one whose input needs
    none at the very end: in another order than on the other ranks.
    """
    if not torch.is_grad_enabled() or is_recomputation():
        return args
    return tuple(
        arg.detach().requires_grad_()
        if isinstance(arg, Tensor) and arg.is_floating_point() and not arg.requires_grad
        else arg
        for arg in args
    )


class _Completion:
    def __init__(self, parts: Sequence[nn.Module], host_group: dist.ProcessGroup) -> None:
        self._parts = [part for part in parts if next(part.parameters(), None) is not None]
        self._host_group = host_group
        self._called: set[nn.Module] = set()

    def hook(self, root: nn.Module) -> None:
        root.register_forward_pre_hook(lambda *_: self._called.clear())
        for part in self._parts:
            part.register_forward_pre_hook(lambda part, _: self._called.add(part))
        root.register_forward_hook(self._complete, prepend=True)

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

        def complete(value: Tensor) -> Tensor:
            return with_zero_gradients(value, weights) if value.requires_grad else value

        return map_tensors(complete, output) if weights else output


def _check_same_way(root: nn.Module, first_blocks: Mapping[str, nn.Module], host_group: dist.ProcessGroup) -> None:
    """Have ranks tell each other, over the host, which list of layers they come to; raise where they do not agree.

    For a model with experts in more than one list, say in a vision tower too: a rank that left one out would wait in a
    collective of the next while the others wait in one of the first.
    """
    places = [*first_blocks, "the end of the forward"]

    def check(place: int, *_: Any) -> None:
        if is_recomputation():
            return
        everyone = torch.empty(host_group.size(), dtype=torch.int64)
        dist.all_gather_single(everyone, torch.tensor([place]), group=host_group)
        where = everyone.tolist()
        if len(set(where)) > 1:
            at = [
                f"rank(s) {[rank for rank, other in enumerate(where) if other == place]} came to {places[place]}"
                for place in sorted(set(where))
            ]
            raise RuntimeError(
                f"{' but '.join(at)}: each batch has to go through every list of layers with experts, or none may; give"
                " each rank an input for all of them (an image, say), or leave it out on all ranks"
            )

    for number, block in enumerate(first_blocks.values()):
        block.register_forward_pre_hook(partial(check, number), prepend=True)
    root.register_forward_hook(partial(check, len(first_blocks)), prepend=True)
