"""Finding the experts modules of a model by what they are.

A model goes in; one `ExpertsModule` per experts module comes out. An experts module owns stacked weights `[E, ...]`
and is called with `(hidden [T, H], top_k_index [T, K], top_k_weights [T, K])`. Names play no part.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn


class NoExpertsError(ValueError):
    """The model has no experts module."""


@dataclass(frozen=True)
class ExpertsModule:
    """An experts module as it was found."""

    name: str
    """Its path in the model."""

    module: nn.Module
    num_experts: int
    """E, the first dimension of each of its parameters."""


def find_experts(model: nn.Module) -> list[ExpertsModule]:
    """All experts modules of `model`, in the order of `named_modules`.

    Raises:
        NoExpertsError: there is none; the message names the modules that came near and what they lack.
        NotImplementedError: an experts module is of a form that cannot be computed yet; says which and why.
    """
    found, near = [], []
    for name, module in model.named_modules():
        stacked = {key: p for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
        if not stacked or isinstance(module, nn.modules.conv._ConvNd):
            continue
        if lacks := _what_it_lacks(module, stacked):
            near.append(f"{name} ({type(module).__name__}): {lacks}")
            continue
        if reason := _why_unsupported(module):
            raise NotImplementedError(
                f"the experts module {name} ({type(module).__name__}) {reason}, which is not supported yet; supported"
                " are gated experts with weights gate_up_proj [E, 2I, H] and down_proj [E, H, I]"
            )
        found.append(ExpertsModule(name=name, module=module, num_experts=next(iter(stacked.values())).shape[0]))
    if not found:
        came_near = "; ".join(near) if near else "no module owns stacked [E, ...] weights"
        raise NoExpertsError(
            "this model has no experts module; plain FSDP2 (ModelParallelStrategy) or DDP is what you want. An experts"
            " module owns weights gate_up_proj [E, 2I, H] and down_proj [E, H, I] and is called with (hidden,"
            f" top_k_index, top_k_weights). What came near: {came_near}"
        )
    return found


def _what_it_lacks(module: nn.Module, stacked: dict[str, nn.Parameter]) -> str | None:
    counts = {parameter.shape[0] for parameter in stacked.values()}
    if len(counts) > 1:
        shapes = ", ".join(f"{key} {list(p.shape)}" for key, p in stacked.items())
        return f"its stacked weights differ in their first dimension: {shapes}"
    required = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(required) != 3:
        return f"it is called with ({', '.join(required)}), not with (hidden, top_k_index, top_k_weights)"
    return None


def _why_unsupported(module: nn.Module) -> str | None:
    names = {key for key, _ in module.named_parameters()}
    if names != {"gate_up_proj", "down_proj"}:
        return f"has the parameters {', '.join(sorted(names))}"
    if getattr(module, "is_transposed", False):
        return "stores transposed weights"
    if not hasattr(module, "_apply_gate"):
        return "has no `_apply_gate` method for its gated activation"
    return None
