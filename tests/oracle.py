"""What the right answer is: one process, fp32, the whole model, every rank's batches, and plain torch.

Nothing of the code under test computes here: our own layers are replaced by a loop over tokens, transformers' by their
eager forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_ep import GroupedExperts
from tests.models import ADAM_EPS, NOTHING, build, freeze, loss_of


@dataclass
class Answer:
    """Gradients and norms of each step, before clipping, and the weights at the end."""

    gradients: list[dict[str, Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]


def experts_one_by_one(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The definition: for each token the weighted sum of its experts' outputs."""
    outputs = []
    for token, experts, weights in zip(hidden, top_k_index.tolist(), top_k_weights, strict=True):
        total = token * 0  # of the graph, also where no expert is chosen
        for expert, weight in zip(experts, weights, strict=True):
            if not 0 <= expert < len(self.gate_up_proj):  # no expert
                continue
            gate, up = (self.gate_up_proj[expert] @ token).chunk(2)
            total = total + weight * (self.down_proj[expert] @ (F.silu(gate) * up))
        outputs.append(total)
    # A product with no token keeps the graph connected when there is none.
    return torch.stack(outputs) if outputs else hidden @ self.gate_up_proj[0].T[:, :0] @ self.down_proj[0].T[:0, :]


def reference_model(kind: str, options: dict, state: dict[str, Tensor]) -> nn.Module:
    model = build(kind, **options)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.forward = experts_one_by_one.__get__(module)
    if hasattr(model, "config"):
        model.set_experts_implementation("eager")
    model.load_state_dict(state)
    return model


def norm_of(gradients: dict[str, Tensor], norm_type: float) -> float:
    flat = torch.cat([gradient.flatten().double() for gradient in gradients.values()])
    return float(flat.abs().max() if math.isinf(norm_type) else flat.abs().pow(norm_type).sum().pow(1 / norm_type))


def answer(
    kind: str,
    options: dict,
    state: dict[str, Tensor],
    steps: list[list[list[dict[str, Tensor]]]],
    *,
    clip: float | None = None,
    norm_type: float = 2.0,
    dtype: torch.dtype = torch.float32,
    frozen: str = NOTHING,
) -> Answer:
    """Train `len(steps)` steps; `steps[s][r]` are the micro-batches of rank r in step s.

    The gradient is that of the mean over ranks and micro-batches of the batch's loss, as DDP's users mean. Parameters
    whose names have `frozen` in them have none.
    """
    model = reference_model(kind, options, state).to(dtype)
    freeze(model, frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPS)
    gradients, norms = [], []
    for of_ranks in steps:
        optimizer.zero_grad()
        count = len(of_ranks) * len(of_ranks[0])
        for batch in (batch for batches in of_ranks for batch in batches):
            cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
            (loss_of(model, cast) / count).backward()
        gradients.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )
        norms.append(norm_of(gradients[-1], norm_type))
        if clip is not None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(min(1.0, clip / (norms[-1] + 1e-6)))
        optimizer.step()
    return Answer(gradients, norms, {name: p.detach().clone() for name, p in model.named_parameters()})
