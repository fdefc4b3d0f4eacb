"""Switch Transformers and NLLB-MoE: refused, as their experts are a ModuleDict with a forward of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import ExpertsAdapter, register_experts


@register_experts
class ModuleDictExperts(ExpertsAdapter):
    """Any ModuleDict whose members are named `expert_0`, `expert_1`, ... (read at transformers 5.24)."""

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        members = [key for key in module if key.startswith("expert_")] if isinstance(module, nn.ModuleDict) else []
        if len(members) > 1:
            raise NotImplementedError(
                f"is a ModuleDict of {len(members)} experts, which cannot be spread: it was expected to own stacked"
                " weights [E, ...], or to be a ModuleList of equal MLPs, which are stacked; put the experts in a"
                " ModuleList, or describe the module with register_experts"
            )
        return None
