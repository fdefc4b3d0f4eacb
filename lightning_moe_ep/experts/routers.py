"""Finding the routers of a model by where they are and what they hold.

A model goes in, plain or parallel; for each of its experts modules the module that chooses among its experts comes out.
"""

from __future__ import annotations

from torch import nn

from lightning_moe_ep.experts.find import ExpertsModule, find_experts


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The router of each experts module, by the experts module's name; experts modules may share one.

    It is the child, of the nearest module around the experts that has one, which owns a parameter `[E, ...]` of two
    dimensions or has an attribute with "expert" in its name that is E. Where several do, the one that has more of
    these, and a parameter `[E]`, is taken, then the smaller one.

    Raises:
        NoExpertsError: there is no experts module.
        ValueError: nothing around some experts module, within its block, looks like a router; names it.
    """
    experts = find_experts(model)
    inside = {part for found in experts for part in found.module.modules()}
    return {found.name: _router_of(model, found, inside) for found in experts}


def _router_of(model: nn.Module, found: ExpertsModule, inside: set[nn.Module]) -> nn.Module:
    path, num_experts = found.name.split("."), found.num_experts
    for length in range(len(path) - 1, -1, -1):
        outer = model.get_submodule(".".join(path[:length]))
        if isinstance(outer, nn.ModuleList):  # of blocks
            break
        scores = {
            child: score
            for child in outer.children()
            if inside.isdisjoint(child.modules()) and (score := _likeness(child, num_experts))
        }
        if scores:
            return max(scores, key=lambda child: (scores[child], -sum(p.numel() for p in child.parameters())))
    raise ValueError(
        f"no router was found around the {num_experts} experts of {found.name}: no module beside them owns a parameter"
        f" [{num_experts}, ...] of two dimensions or says, in an attribute with 'expert' in its name, that they are"
        f" {num_experts}"
    )


def _likeness(module: nn.Module, num_experts: int) -> int:
    """How many signs of a router there are; 0 if only one that many other modules have."""
    rows = {parameter.ndim for parameter in module.parameters() if parameter.shape[:1] == (num_experts,)}
    says = any(
        "expert" in key and type(value) is int and value == num_experts
        for part in module.modules()
        for key, value in vars(part).items()
    )
    return (2 in rows) + says + (1 in rows) if 2 in rows or says else 0
