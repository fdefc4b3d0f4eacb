"""JetMoE: one linear map per expert, called with rows that are sorted by expert already.

Its two mixtures, of MLPs and of attention projections, are made of these maps, two each. Each row has one expert and
comes home by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Dispatch, ExpertsAdapter, is_a, register_experts


@register_experts
class JetMoeLinear(ExpertsAdapter):
    """`JetMoeParallelExperts` (read at transformers 5.24)."""

    parameters = ("weight",)
    called_with_routing = False
    routes_tokens = False

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        return cls(module) if is_a(module, "JetMoeParallelExperts") else None

    @override
    def call(self, dispatch: Dispatch, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        sizes = torch.tensor(expert_size, device=inputs.device)
        index = torch.arange(len(expert_size), device=inputs.device).repeat_interleave(sizes, output_size=len(inputs))
        return dispatch(inputs, index.unsqueeze(1), inputs.new_ones(len(inputs), 1))

    @override
    def expert(self, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return F.linear(rows, parameters["weight"])
