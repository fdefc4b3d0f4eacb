"""A Mixture-of-Experts layer for people who write their own model.

`MoELayer` is a top-k router, stacked gated experts and an optional shared expert. On its own it is an ordinary
module; under `MoEEPStrategy` (or `parallelize`) its `GroupedExperts` are spread over the ranks like any other.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_ep.experts.compute import compute_experts
from lightning_moe_ep.rows import group_rows


class TopKRouter(nn.Module):
    """Picks K experts a token by the softmax of a linear map."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, normalize: bool = True, choice_bias: bool = False
    ) -> None:
        """
        Args:
            hidden_size: H.
            num_experts: E.
            top_k: K, at most E.
            normalize: whether the K weights of a token are scaled to sum to 1.
            choice_bias: whether there is a bias `[E]`, 0 at first, that is added to the softmax for the choice of
                experts but not for their weights; for `ExpertBiasCallback`, as it gets no gradient.
        """
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}")
        self.top_k = top_k
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.choice_bias: Tensor | None
        self.register_buffer("choice_bias", torch.empty(num_experts, dtype=torch.float32) if choice_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.choice_bias is not None:
            nn.init.zeros_(self.choice_bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From `[T, H]` to logits `[T, E]`, weights `[T, K]` in the dtype of `hidden`, expert ids `[T, K]`."""
        logits = F.linear(hidden, self.weight)
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        if self.choice_bias is None:
            weights, index = scores.topk(self.top_k, dim=-1)
        else:
            index = (scores.detach() + self.choice_bias).topk(self.top_k, dim=-1).indices
            weights = scores.gather(1, index)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(hidden.dtype), index


class GroupedExperts(nn.Module):
    """E gated experts, `down(silu(gate(x)) * up(x))`, with stacked weights."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        """
        Args:
            hidden_size: H.
            intermediate_size: I, the width of one expert.
            num_experts: E.
        """
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            hidden: `[T, H]`; T may be 0.
            top_k_index: `[T, K]` expert ids.
            top_k_weights: `[T, K]`.

        Returns:
            `[T, H]`.
        """
        groups, pair = group_rows(top_k_index, self.num_experts)
        token = pair // top_k_index.shape[1]
        weights = top_k_weights.flatten().index_select(0, pair)
        outputs = compute_experts(self, hidden.index_select(0, token), groups, weights, computation="auto")
        return torch.zeros_like(hidden).index_add(0, token, outputs.to(hidden.dtype))


class SharedExpert(nn.Module):
    """One gated MLP that every token goes through."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class MoELayer(nn.Module):
    """Router, experts and an optional shared expert: from `[..., H]` to `[..., H]`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int | None = None,
        normalize: bool = True,
        choice_bias: bool = False,
    ) -> None:
        """
        Args:
            hidden_size: H.
            intermediate_size: I, the width of one routed expert.
            num_experts: E.
            top_k: K, experts per token.
            shared_intermediate_size: the width of the shared expert; None: there is none.
            normalize: whether the K routing weights of a token sum to 1.
            choice_bias: whether the router has a bias for the choice of experts; see `TopKRouter`.
        """
        super().__init__()
        self.router = TopKRouter(hidden_size, num_experts, top_k, normalize=normalize, choice_bias=choice_bias)
        self.experts = GroupedExperts(hidden_size, intermediate_size, num_experts)
        self.shared_expert = SharedExpert(hidden_size, shared_intermediate_size) if shared_intermediate_size else None

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        _, weights, index = self.router(tokens)
        output = self.experts(tokens, index, weights)
        if self.shared_expert is not None:
            output = output + self.shared_expert(tokens)
        return output.reshape(hidden.shape)
