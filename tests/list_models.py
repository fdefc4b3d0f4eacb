"""Mixtures whose experts are a ModuleList, in the styles that older models and remote code have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 64


class GatedMLP(nn.Module):
    """As an expert of Mixtral was."""

    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, intermediate, bias=bias)
        self.w2 = nn.Linear(intermediate, hidden, bias=bias)
        self.w3 = nn.Linear(hidden, intermediate, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class ScaledMLP(nn.Module):
    """With parameters of its own, of two, one and no dimensions, and a norm."""

    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(hidden, intermediate))
        self.norm = nn.LayerNorm(intermediate)
        self.shift = nn.Parameter(torch.empty(intermediate))
        self.gain = nn.Parameter(torch.empty(()))
        self.down = nn.Linear(intermediate, hidden, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=self.up.shape[0] ** -0.5)
        nn.init.normal_(self.shift, std=0.1)
        nn.init.constant_(self.gain, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(x @ self.up) + self.shift)) * self.gain


class MixtralBlock(nn.Module):
    """The loop of transformers 4 over all experts, whether they have tokens or not."""

    expert = GatedMLP

    def __init__(self, num_experts: int, top_k: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList([self.expert(HIDDEN, intermediate_size, bias) for _ in range(num_experts)])

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(hidden_states).softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def forward(self, hidden_states: Tensor) -> Tensor:
        routing_weights, selected_experts = self.route(hidden_states)
        final_hidden_states = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final_hidden_states


class ScaledBlock(MixtralBlock):
    expert = ScaledMLP  # type: ignore[assignment]


class HitBlock(MixtralBlock):
    """Calls only the experts that were chosen, by tensors of one number, several times, with [1, n, H], in place."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        assert len(self.experts) == self.num_experts
        weights, chosen = self.route(hidden_states)
        output = torch.zeros_like(hidden_states)
        for expert in chosen.unique():
            token, slot = torch.where(chosen == expert)
            for half in (slice(0, 1), slice(1, None)):
                rows = self.experts[expert](hidden_states[None, token[half]])
                rows.squeeze(0).mul_(weights[token[half], slot[half], None])
                output = output.index_add(0, token[half], rows.squeeze(0))
        return output


class DeepseekGate(nn.Module):
    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, HIDDEN))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = F.linear(hidden_states, self.weight).sigmoid().topk(self.top_k, dim=-1)
        return index, weights / weights.sum(dim=-1, keepdim=True)


class DeepseekBlock(nn.Module):
    """The remote code of DeepSeek: a repeated token for each choice, shared experts, another way in evaluation."""

    def __init__(self, num_experts: int, top_k: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([GatedMLP(HIDDEN, intermediate_size, bias) for _ in range(num_experts)])
        self.gate = DeepseekGate(num_experts, top_k)
        self.shared_experts = GatedMLP(HIDDEN, 2 * intermediate_size, bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity = hidden_states
        topk_idx, topk_weight = self.gate(hidden_states)
        if self.training:
            flat_topk_idx = topk_idx.view(-1)
            hidden_states = hidden_states.repeat_interleave(self.gate.top_k, dim=0)
            y = torch.empty_like(hidden_states)
            for i, expert in enumerate(self.experts):
                y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
            y = (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)
        else:
            y = self.moe_infer(hidden_states, topk_idx, topk_weight)
        return y + self.shared_experts(identity)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        outputs, start = [], 0
        for i, num_tokens in enumerate(cnts.sum(dim=0).tolist()):
            if num_tokens:
                outputs.append(self.experts[i](sorted_tokens[start : start + num_tokens]))
            start += num_tokens
        outs = torch.cat(outputs) if outputs else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(sorted_tokens)
        new_x[idxs] = outs
        return new_x.view(*topk_ids.shape, -1).mul_(topk_weight.unsqueeze(-1)).sum(dim=1)


class Holder(nn.Module):
    """Experts in a module of their own, which is called with the routing."""

    def __init__(self, num_experts: int, intermediate_size: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList([GatedMLP(HIDDEN, intermediate_size, False) for _ in range(num_experts)])

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for i in range(-len(self.mlps), 0):
            share = (weights * (chosen == i + len(self.mlps))).sum(dim=1, keepdim=True)
            output = output + self.mlps[i](hidden) * share
        return output


BLOCKS: dict[str, type[nn.Module]] = {
    "own_list_mixtral": MixtralBlock,
    "own_list_deepseek": DeepseekBlock,
    "own_list_hit": HitBlock,
    "own_list_scaled": ScaledBlock,
}


class Residual(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = moe

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(self.norm(hidden))


class ListModel(nn.Module):
    """Two blocks and a head, from `[T, H]` to `[T, H]`."""

    def __init__(
        self, kind: str, *, num_experts: int = 8, top_k: int = 2, intermediate_size: int = 48, bias: bool = False
    ) -> None:
        super().__init__()
        make = BLOCKS[kind]
        self.blocks = nn.ModuleList([Residual(make(num_experts, top_k, intermediate_size, bias)) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """Of a state dict with stacked experts, or gradients by such names: what the plain model has, in its order."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        prefix, found, name = key.partition(".moe.experts.")
        if not found or name.split(".")[0].isdigit():
            result[key] = value
        elif f"{prefix}{found}0.{name}" not in result:
            of_list = {k.removeprefix(prefix + found): v for k, v in state.items() if k.startswith(prefix + found)}
            for number in range(len(value)):
                result.update({f"{prefix}{found}{number}.{n}": stacked[number] for n, stacked in of_list.items()})
    return result
