"""The parts of a plain model, and what a gradient is without one of the ways through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ep.experts import find_experts, find_routers
from lightning_moe_ep.rows import is_recomputation
from lightning_moe_ep.trees import tensors_of

DETACHED = ("routing weights", "router input")
"""What may be out of the graph."""


def parts_of(module: nn.Module) -> dict[str, str]:
    """Of which part of a plain model each trained parameter is: expert, shared expert, router, adapter or dense."""
    experts = find_experts(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parts = dict.fromkeys((name for name, p in module.named_parameters() if p.requires_grad), "dense")

    def mark(parameters: Any, part: str) -> None:
        parts.update({names[id(p)]: part for p in parameters if names[id(p)] in parts})

    for found in experts:
        outer = module.get_submodule(found.name.rpartition(".")[0])
        for name, inner in outer.named_modules():
            if "shared" in name.split(".")[-1] and found.module not in inner.modules():
                mark(inner.parameters(), "shared expert")
    for router in _routers(module):
        mark(router.parameters(), "router")
    for found in experts:
        inside = dict(found.module.named_parameters())
        stacked = set(found.adapter.parameters) & set(inside)
        mark((inside[name] for name in stacked or inside), "expert")
    for name, part in parts.items():
        if "lora_" in name:
            parts[name] = "expert adapter" if part == "expert" else "adapter"
    return parts


@contextmanager
def detached(module: nn.Module, what: str) -> Iterator[None]:
    """Inside, the experts' third argument, or what routers are given, is out of the graph."""

    def cut_graph(index: int | None) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                arg.detach() if isinstance(arg, Tensor) and index in (None, number) else arg
                for number, arg in enumerate(args)
            )

        return hook

    if what == "router input":
        hooks = [router.register_forward_pre_hook(cut_graph(None)) for router in set(_routers(module))]
    else:
        hooks = [found.module.register_forward_pre_hook(cut_graph(2)) for found in find_experts(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record_choices(module: nn.Module, chosen: list[Tensor]) -> list[RemovableHandle]:
    """Have routers that give expert ids leave them in `chosen`, but not when a forward is run again for backward."""

    def hook(router: nn.Module, args: Any, output: Any) -> None:
        if not is_recomputation() and torch.is_grad_enabled():
            chosen.extend(t.cpu() for t in tensors_of(output) if not t.is_floating_point() and t.ndim == 2)

    return [router.register_forward_hook(hook) for router in dict.fromkeys(_routers(module))]


def _routers(module: nn.Module) -> list[nn.Module]:
    try:
        return list(find_routers(module).values())
    except ValueError:
        return []
