"""What FSDP2 gathers and shards together, and over what: decided from the modules and the layout alone.

A plain model goes in. What comes out is what `parallelize` does to it, and what can be said of it without doing so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_moe_ep.experts import ExpertsModule, modules_called
from lightning_moe_ep.layout import Layout

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Units:
    """The modules that FSDP2 shards each by itself; a parameter belongs to the innermost around it."""

    in_fp32: list[nn.Module]
    """Modules that are gathered in fp32 whatever the precision; inner ones first."""

    sequences: list[list[nn.Module]]
    """The transformer blocks of each list, in its order; inner lists first."""

    roots: list[nn.Module]
    """What is called from outside; some may be blocks."""

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for sequence in self.sequences for block in sequence]

    @property
    def in_order(self) -> list[tuple[nn.Module, Literal["fp32", "block", "root"]]]:
        """Every one in the order in which FSDP2 takes what belongs to it, and what it is; a root may be a block too."""
        return [
            *((module, "fp32") for module in self.in_fp32),
            *((block, "block") for block in self.blocks if block not in self.roots),
            *((root, "root") for root in self.roots),
        ]


def find_units(
    model: nn.Module,
    experts: Sequence[ExpertsModule],
    *,
    roots: Sequence[nn.Module] | None,
    fp32_modules: Sequence[str],
    policy: MixedPrecisionPolicy,
) -> Units:
    """
    Args:
        model: plain.
        experts: its experts modules.
        roots: the modules that are called from outside, if `model` itself is not.
        fp32_modules: names of modules that are gathered in fp32, by themselves unless all is fp32 anyway.
        policy: the precision.

    Raises:
        ValueError: a parameter is shared between units, or `fp32_modules` has a name that there is not.
    """
    named = modules_called(model, fp32_modules)
    units = Units(
        in_fp32=named if policy.param_dtype is not None or not _is_fp32(model) else [],
        sequences=find_blocks(model, experts),
        roots=list(roots) if roots is not None else [model],
    )
    _check_shared_parameters(model, [*units.in_fp32, *units.blocks, *units.roots])
    return units


def top_level_modules(parent: nn.Module) -> list[nn.Module]:
    """The children of `parent` that own parameters, with containers that cannot be called replaced by their members."""
    found: list[nn.Module] = []
    for child in parent.children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += top_level_modules(child)
        else:
            found.append(child)
    return found


def find_blocks(model: nn.Module, experts: Sequence[ExpertsModule]) -> list[list[nn.Module]]:
    """The transformer blocks: members of the innermost ModuleList (else ModuleDict or Sequential) around experts.

    The members beside those with experts count too (the dense layers of a mixed model).

    Returns:
        The blocks of each container, in its order; inner containers come first.
    """
    containers: dict[str, nn.Module] = {}
    for found in experts:
        path = found.name.split(".")
        ancestors = [".".join(path[:length]) for length in range(len(path) - 1, -1, -1)]
        around = [(name, model.get_submodule(name)) for name in ancestors]
        if found.adapter.block is not None:
            around = around[[module for _, module in around].index(found.adapter.block) :]
        lists = [(name, m) for name, m in around if isinstance(m, nn.ModuleList)]
        others = [(name, m) for name, m in around if isinstance(m, _CONTAINERS)]
        containers.update((lists or others)[:1])
    inner_first = sorted(containers, key=lambda name: -name.count("."))
    return [
        [
            member
            for member in containers[name].children()
            if next(member.parameters(), None) is not None and not isinstance(member, nn.ModuleList | nn.ModuleDict)
        ]
        for name in inner_first
    ]


def stay_whole(dtypes: Iterable[torch.dtype], layout: Layout, policy: MixedPrecisionPolicy) -> bool:
    """Whether FSDP2 has nothing to do for the experts' weights: no other rank has them, and no cast is asked for.

    torch 2.13: at efsdp=1 it would copy the whole slice for each forward and backward, and its gradient once more.
    """
    alone = layout.ep > 1 and layout.efsdp == 1 and layout.replicate == 1
    return alone and all(policy.param_dtype in (None, dtype) for dtype in dtypes)


def shard_dim(shape: Sequence[int], efsdp: int) -> int:
    """Along which dimension a rank's expert weights of `shape` `[L, ...]` are sharded over efsdp.

    0, unless only dimension 1 divides evenly: FSDP2 pads dimension 0 and takes no uneven other one.
    """
    num_local, *width = shape
    return 1 if num_local % efsdp and width and width[0] % efsdp == 0 else 0


def _is_fp32(module: nn.Module) -> bool:
    return all(parameter.dtype == torch.float32 for parameter in module.parameters())


def _check_shared_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """A parameter shared by two units would be sharded in one and silently stay behind, untied, in the other."""
    taken: set[nn.Module] = set()
    owner: dict[int, tuple[int, str]] = {}
    names = {module: name for name, module in model.named_modules()}
    for number, unit in enumerate(units):
        for module in unit.modules():
            if module in taken:
                continue
            taken.add(module)
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{names[module]}.{key}"
                number_before, name_before = owner.setdefault(id(parameter), (number, name))
                if number_before != number:
                    raise ValueError(
                        f"{name_before} and {name} are one parameter, but in modules that FSDP2 shards apart; put both"
                        " under one module with a forward of its own, or untie them"
                    )
