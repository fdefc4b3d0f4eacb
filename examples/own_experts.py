"""An experts module of one's own that no rule finds, described to the strategy in fifteen lines.

`ExpertBank` is called with the probabilities of all experts and computes them all. What the strategy has to know is
which of its parameters carry the expert dimension, which experts a token chooses, and what one expert computes. Run it
with `python examples/own_experts.py`: it trains the module of `own_model.py` with it on two CPU processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from own_model import PIECES, Waves, train
from torch import Tensor, nn

from lightning_moe_ep import Dispatch, ExpertsAdapter, MoEEPStrategy, register_experts


class ExpertBank(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_experts, hidden_size, intermediate_size) / hidden_size**0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, intermediate_size, hidden_size) / intermediate_size**0.5)

    def forward(self, hidden: Tensor, probabilities: Tensor) -> Tensor:
        outputs = F.relu(hidden @ self.w_in) @ self.w_out  # [E, T, H]: every expert on every token
        weights, index = probabilities.topk(2)
        return torch.einsum("eth,te->th", outputs, torch.zeros_like(probabilities).scatter(1, index, weights))


@register_experts
class BankAdapter(ExpertsAdapter):
    parameters = ("w_in", "w_out")

    @classmethod
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        return cls(module) if isinstance(module, ExpertBank) else None

    def call(self, dispatch: Dispatch, hidden: Tensor, probabilities: Tensor) -> Tensor:
        weights, index = probabilities.topk(2)
        return dispatch(hidden, index, weights)

    def expert(self, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return F.relu(rows @ parameters["w_in"]) @ parameters["w_out"]


class BankMoE(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden_size, PIECES)
        self.bank = ExpertBank(hidden_size, 2 * hidden_size, PIECES)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.bank(hidden, self.router(hidden).softmax(dim=-1))


class BankWaves(Waves):
    def make_moe(self, hidden_size: int) -> nn.Module:
        return BankMoE(hidden_size)


if __name__ == "__main__":
    train(MoEEPStrategy(ep=2), BankWaves)
