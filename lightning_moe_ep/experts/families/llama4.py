"""Llama 4: a token is multiplied by its routing weight before its experts, not after, and every expert gets all tokens.

The block around the experts repeats the tokens for each expert, zero where it is not chosen. In its place each token
goes to the experts that are, with its weight, which multiplies it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Computation, Dispatch, ExpertsAdapter, is_a, register_experts, weigh
from lightning_moe_ep.experts.compute import compute_experts
from lightning_moe_ep.rows import RowGroups


@register_experts
class Llama4Experts(ExpertsAdapter):
    """`Llama4TextExperts`, called by way of the `Llama4TextMoe` around it (read at transformers 5.24)."""

    block: nn.Module
    parameters = ("gate_up_proj", "down_proj")
    computations = frozenset({"auto", "grouped_mm", "loop"})
    by_compute_experts = True
    called_with_routing = False

    def __init__(self, module: nn.Module, block: nn.Module) -> None:
        super().__init__(module)
        self.block = block

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        return cls(module, around[0]) if is_a(module, "Llama4TextExperts") else None

    @override
    def prepare(self) -> None:
        self.module.is_transposed = True
        self.module._apply_gate = self._apply_gate

    @override
    def install(self, dispatch: Dispatch, *, alone: bool) -> None:
        self.block.forward = partial(self.call, dispatch)

    @override
    def call(self, dispatch: Dispatch, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.flatten(0, -2)
        scores, logits = self.block.router(tokens)  # scores [T, E], zero where an expert is not chosen
        index = logits.topk(self.block.top_k, dim=1).indices
        routed = dispatch(tokens, index, scores.gather(1, index))
        return self.block.shared_expert(tokens) + routed, logits

    @override
    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        return compute_experts(self.module, weigh(rows, weights), groups, computation=computation)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.module.act_fn(gate)
