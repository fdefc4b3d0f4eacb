"""One family on the pool's ranks: spread, run one step, and compare with the plain model, which every rank has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.checkpoint import full_model_state
from lightning_moe_ep.experts import expert_parameters, to_plain
from lightning_moe_ep.gradients import scale_gradients
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import build_meshes
from lightning_moe_ep.parallelize import parallelize
from lightning_moe_ep.shards import gather
from tests.families.tiny import loss_of, tiny_batch, tiny_model

TOLERANCE = 1e-5
"""Of the largest value of a parameter's gradient."""

ROUND_OFF = 1e-7
"""Of the largest gradient of the model: what a gradient that is truly zero comes to."""


def sweep(family: str, ep: int, dispatcher: str = "auto", computation: Any = "auto") -> list[str]:
    """On a rank: what is wrong with the family under expert parallelism; empty on all ranks but the first."""
    torch.manual_seed(dist.get_rank())
    return compare(
        lambda: tiny_model(family),
        lambda model: loss_of(family, model, tiny_batch(family, seed=dist.get_rank())),
        ep=ep,
        dispatcher=dispatcher,
        computation=computation,
    )


def compare(
    build: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], *, ep: int, **options: Any
) -> list[str]:
    """On a rank: how gradients and state dict of the spread model differ from the plain one's.

    Args:
        build: makes the same model each time.
        loss_of: the loss of this rank's batch.
        ep: over how many ranks.
        options: for `parallelize`.
    """
    world = dist.get_world_size()
    plain = build()
    loss_of(plain).backward()
    right = {}
    for name, parameter in plain.named_parameters():
        right[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / world
        dist.all_reduce(right[name])

    model = build()
    parallelize(model, build_meshes(Layout.for_world(world, ep=ep), "cpu"), **options)
    state = full_model_state(model)
    loss_of(model).backward()
    scale_gradients(expert_parameters(model), 1 / ep)
    gradients = {n: gather(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in model.named_parameters()}
    if dist.get_rank() > 0:
        return []
    return differences(to_plain(model, gradients), right) + _unequal(state, dict(plain.state_dict()))


def differences(ours: dict[str, Any], right: dict[str, Tensor]) -> list[str]:
    if ours.keys() != right.keys():
        return [f"the parameters {sorted(ours.keys() ^ right.keys())} are not in both"]
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    wrong = []
    for name, gradient in right.items():
        error = float((ours[name] - gradient).abs().max())
        allowed = TOLERANCE * float(gradient.abs().max()) + ROUND_OFF * largest
        if not error <= allowed:
            wrong.append(f"the gradient of {name} is off by {error:.1e}, of {float(gradient.abs().max()):.1e}")
    return wrong


def _unequal(ours: dict[str, Any], right: dict[str, Any]) -> list[str]:
    if ours.keys() != right.keys():
        return [f"the state dict's {sorted(ours.keys() ^ right.keys())} are not in both"]
    return [f"{name} is not what it was" for name in right if not torch.equal(ours[name], right[name])]
