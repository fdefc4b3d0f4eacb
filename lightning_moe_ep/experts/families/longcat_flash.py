"""LongCat-Flash: beyond its E experts a token may choose zero experts, which give it back as it is.

Those stay on the token's own rank. The rows that `gate_up_proj` has for them, which nothing uses, become a parameter
of their own, as they cannot be spread; files have them where the plain model has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Computation, Dispatch, ExpertsAdapter, is_a, register_experts
from lightning_moe_ep.experts.compute import compute_experts
from lightning_moe_ep.rows import RowGroups

_UNUSED = "gate_up_proj_of_zero_experts"


@register_experts
class LongcatFlashExperts(ExpertsAdapter):
    """`LongcatFlashExperts` (read at transformers 5.24)."""

    parameters = ("gate_up_proj", "down_proj")
    computations = frozenset({"auto", "grouped_mm", "loop"})
    by_compute_experts = True

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
        self.module._apply_gate = self._apply_gate
        whole = self.module.gate_up_proj
        if whole.shape[0] == self.num_experts:
            return
        used, unused = whole.detach().tensor_split([self.num_experts])
        for name, part in (("gate_up_proj", used), (_UNUSED, unused)):
            self.module.register_parameter(name, nn.Parameter(part.clone(), requires_grad=whole.requires_grad))

    @override
    def completed(self, dispatch: Dispatch) -> Dispatch:
        def with_zero_experts(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            zero = torch.where(top_k_index >= self.num_experts, top_k_weights, 0).sum(dim=1, keepdim=True)
            return dispatch(hidden, top_k_index, top_k_weights) + (hidden * zero).to(hidden.dtype)

        return with_zero_experts

    @override
    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        return compute_experts(self.module, rows, groups, weights, computation=computation)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.module.act_fn(gate) * up

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
