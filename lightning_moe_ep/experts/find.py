"""Finding the experts modules of a model by what they are.

A model goes in; one `ExpertsModule` per experts module comes out, with the adapter that serves it. Every kind that is
registered is asked about every module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_moe_ep.experts.adapter import ExpertsAdapter, adapter_for
from lightning_moe_ep.experts.lora import LoraExperts
from lightning_moe_ep.experts.module_list import called_experts
from lightning_moe_ep.experts.spread import spread_of
from lightning_moe_ep.experts.stacked import positional_arguments, stacked_parameters


class NoExpertsError(ValueError):
    """The model has no experts module."""


@dataclass(frozen=True)
class ExpertsModule:
    """An experts module as it was found."""

    name: str
    """Its path in the model."""

    adapter: ExpertsAdapter

    @property
    def module(self) -> nn.Module:
        return self.adapter.module

    @property
    def num_experts(self) -> int:
        """E."""
        return self.adapter.num_experts


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """All experts modules of `model`, in the order of `named_modules`.

    Raises:
        NoExpertsError: there is none; the message names the modules that came near and what they lack.
        NotImplementedError: an experts module is of a form that cannot be served; says which and why.
    """
    found: list[ExpertsModule] = []
    near = []
    for name, module in model.named_modules():
        if found and name.startswith(f"{found[-1].name}."):  # part of the one before
            continue
        path = name.split(".") if name else []
        around = [model.get_submodule(".".join(path[:length])) for length in range(len(path) - 1, -1, -1)]
        try:
            adapter = spread.adapter if (spread := spread_of(module)) else adapter_for(module, around)
        except NotImplementedError as error:
            raise NotImplementedError(f"the experts module {name} ({type(module).__name__}) {error}") from None
        if adapter is not None:
            _check_no_adapters_inside(name, adapter)
            found.append(ExpertsModule(name=name, adapter=adapter))
        elif lacks := _what_it_lacks(module, around):
            near.append(f"{name} ({type(module).__name__}): {lacks}")
    if not found:
        came_near = "; ".join(near) if near else "no module owns stacked [E, ...] weights"
        raise NoExpertsError(
            "this model has no experts module; plain FSDP2 (ModelParallelStrategy) or DDP is what you want. An experts"
            " module owns weights gate_up_proj [E, 2I, H] and down_proj [E, H, I] and is called with (hidden,"
            " top_k_index, top_k_weights), or is a ModuleList of equal MLPs with a router's weight [E, H] beside it;"
            " one of another kind can be described with register_experts. What came near:"
            f" {came_near}"
        )
    return found


def _check_no_adapters_inside(name: str, adapter: ExpertsAdapter) -> None:
    base = adapter.base if isinstance(adapter, LoraExperts) else adapter
    for inner, part in base.module.named_modules():
        if hasattr(part, "lora_A"):
            raise NotImplementedError(
                f"the experts module {name} ({type(base.module).__name__}) has a LoRA adapter on its part {inner}; only"
                " stacked weights [E, ...] of three dimensions can have one, by target_parameters. Take that part out"
                " of the adapter's targets"
            )


def _what_it_lacks(module: nn.Module, around: Sequence[nn.Module]) -> str | None:
    if isinstance(module, nn.ModuleList) and len(module) > 1 and around and called_experts(module, around[0]):
        return f"no router's weight [{len(module)}, H] is beside its {len(module)} members"
    stacked = stacked_parameters(module)
    if not stacked:
        return None
    if len({parameter.shape[0] for parameter in stacked.values()}) > 1:
        shapes = ", ".join(f"{key} {list(p.shape)}" for key, p in stacked.items())
        return f"its stacked weights differ in their first dimension: {shapes}"
    arguments = positional_arguments(module)
    if len(arguments) != 3:
        return f"it is called with ({', '.join(arguments)}), not with (hidden, top_k_index, top_k_weights)"
    return (
        f"its weights ({', '.join(stacked)}) are not those of gated experts, and no attribute with 'expert' in its name"
        f" is their number, {next(iter(stacked.values())).shape[0]}"
    )
