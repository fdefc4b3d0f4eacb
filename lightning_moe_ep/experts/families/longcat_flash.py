"""LongCat-Flash: beyond its E experts a token may choose zero experts, which give it back as it is.

Those stay on the token's own rank. The rows that `gate_up_proj` has for them, which nothing uses, become a parameter
of their own, as they cannot be spread; files have them where the plain model has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Dispatch, ExpertsAdapter, is_a, register_experts

_UNUSED = "gate_up_proj_of_zero_experts"


@register_experts
class LongcatFlashExperts(ExpertsAdapter):
    """`LongcatFlashExperts` (read at transformers 5.24)."""

    parameters = ("gate_up_proj", "down_proj")

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        return cls(module) if is_a(module, "LongcatFlashExperts") else None

    @property
    @override
    def num_experts(self) -> int:
        return self.module.num_routed_experts

    @override
    def prepare(self) -> None:
        whole = self.module.gate_up_proj
        if whole.shape[0] == self.num_experts:
            return
        used, unused = whole.detach().tensor_split([self.num_experts])
        for name, part in (("gate_up_proj", used), (_UNUSED, unused)):
            self.module.register_parameter(name, nn.Parameter(part.clone(), requires_grad=whole.requires_grad))

    @override
    def call(self, dispatch: Dispatch, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        zero = torch.where(top_k_index >= self.num_experts, top_k_weights, 0).sum(dim=1, keepdim=True)
        return dispatch(hidden_states, top_k_index, top_k_weights) + (hidden_states * zero).to(hidden_states.dtype)

    @override
    def expert(self, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, parameters["gate_up_proj"]).chunk(2, dim=-1)
        return F.linear(self.module.act_fn(gate) * up, parameters["down_proj"])

    @override
    def to_file(self, state: dict[str, Any]) -> dict[str, Any]:
        if _UNUSED not in state:
            return state
        unused = state.pop(_UNUSED)
        return {**state, "gate_up_proj": torch.cat([state["gate_up_proj"], unused])}

    @override
    def from_file(self, state: dict[str, Any]) -> dict[str, Any]:
        if len(state["gate_up_proj"]) == self.num_experts:
            return state
        used, unused = state["gate_up_proj"].tensor_split([self.num_experts])
        return {**state, "gate_up_proj": used, _UNUSED: unused}
