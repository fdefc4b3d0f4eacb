"""DBRX: the weights of all experts lie in blocks `[E * I, H]`, in a module inside the experts module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Dispatch, ExpertsAdapter, is_a, register_experts


@register_experts
class DbrxExperts(ExpertsAdapter):
    """`DbrxExperts` (read at transformers 5.24)."""

    parameters = ("mlp.w1", "mlp.v1", "mlp.w2")

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        return cls(module) if is_a(module, "DbrxExperts") else None

    @property
    @override
    def num_experts(self) -> int:
        return self.module.num_experts

    @override
    def call(self, dispatch: Dispatch, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, -2)
        return dispatch(tokens, top_k_index, top_k_weights).view(hidden_states.shape)

    @override
    def expert(self, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self.module.mlp(rows, parameters["mlp.w1"], parameters["mlp.v1"], parameters["mlp.w2"])
