"""The norm of all gradients together, whatever meshes they are sharded over, and clipping by it.

Parameters in named parts go in (dense, experts); the norm of each part and of all comes out, as device tensors that
are the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_ep.gradients.scale import local_gradients, local_tensor, scale_gradients


@dataclass(frozen=True)
class GradientNorm:
    """The p-norm of the gradients: 0-dimensional fp32 tensors on the device, equal on all ranks."""

    total: Tensor
    parts: dict[str, Tensor]


@torch.no_grad()
def gradient_norm(
    parts: Mapping[str, Sequence[nn.Parameter]],
    *,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> GradientNorm:
    """The p-norm of the gradients of `parts`, as if each were one whole tensor in one process.

    Each rank sums `|g|^p` over its shards in fp32; an element that several ranks hold counts once, as each of its
    copies is weighed by one over their number. One all-reduce over the world brings the sums together. Every rank
    must call this, also one that has no gradient at all.

    Args:
        parts: parameters by the name of their part; gradients may be missing.
        norm_type: p > 0, or inf for the largest absolute value.
        group: all ranks; None: there is one process.
        device: where the result lives.

    Raises:
        ValueError: p is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive, or inf")
    largest = math.isinf(norm_type)
    world = group.size() if group is not None else 1
    sums = torch.stack([_local_sum(parameters, norm_type, world, device) for parameters in parts.values()])
    if largest:
        # The maximum over ranks may pass over a NaN (gloo's does, by rank order): what is NaN travels beside it.
        sums = torch.stack([sums.nan_to_num(nan=0.0, posinf=math.inf), sums.isnan().to(sums.dtype)])
    if group is not None:
        dist.all_reduce(sums, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    if largest:
        sums = sums[0].masked_fill(sums[1] > 0, math.nan)
    total = sums.max() if largest else sums.sum().pow(1 / norm_type)
    norms = sums if largest else sums.pow(1 / norm_type)
    return GradientNorm(total=total.float(), parts=dict(zip(parts, norms.float().unbind(), strict=True)))


@torch.no_grad()
def nonfinite_gradients(
    module: nn.Module, parameters: Sequence[nn.Parameter], *, group: dist.ProcessGroup, device: torch.device
) -> list[str]:
    """The names of the parameters whose gradients have a NaN or an infinity on any rank; every rank must call this.

    Args:
        module: gives the names and their order.
        parameters: of it.
        group: all ranks.
        device: for the exchange.
    """
    grads = [local_tensor(p.grad) if p.grad is not None else None for p in parameters]
    bad = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
    flags = torch.tensor(bad, dtype=torch.int32, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    found = {id(parameter) for parameter, flag in zip(parameters, flags.tolist(), strict=True) if flag}
    return [name for name, parameter in module.named_parameters() if id(parameter) in found]


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norms of whole gradients, for the log: in place of `lightning.pytorch.utilities.grad_norm`.

    Gradients are final in `on_before_optimizer_step`. One all-reduce for all parameters; every rank must call this.

    Args:
        module: what to look at.
        norm_type: the p of the norm; may be inf.
        group_separator: between what is measured and the parameter's name.

    Returns:
        `grad_{p}_norm/{name}` of each parameter that has a gradient and `grad_{p}_norm_total` of all together, as
        Lightning names them: tensors `[]` on the device, equal on all ranks. Nothing if there is no gradient.

    Raises:
        ValueError: p is not positive.
    """
    norm_type = float(norm_type)
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.grad is not None}
    if not named:
        return {}
    norms = gradient_norm(
        {name: [parameter] for name, parameter in named.items()},
        norm_type=norm_type,
        group=dist.group.WORLD if dist.is_initialized() else None,
        device=next(iter(named.values())).device,
    )
    of_each = {f"grad_{norm_type}_norm{group_separator}{name}": norm for name, norm in norms.parts.items()}
    return {**of_each, f"grad_{norm_type}_norm_total": norms.total}


@torch.no_grad()
def clip_by_norm(parameters: Sequence[nn.Parameter], *, total: Tensor, max_norm: float) -> None:
    """Scale gradients in place by `min(1, max_norm / (total + 1e-6))`, torch's formula, without asking the device."""
    scale_gradients(parameters, (max_norm / (total + 1e-6)).clamp(max=1.0))


def _local_sum(parameters: Sequence[nn.Parameter], norm_type: float, world: int, device: torch.device) -> Tensor:
    """This rank's share of the sum of `|g|^p` (its maximum of `|g|` for p = inf), float64 `[]`."""
    alike: dict[tuple[int, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault((_copies(parameter, world), parameter.device), []).append(parameter)
    share = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _), of_same in alike.items():
        grads = local_gradients(of_same)
        if not grads:
            continue
        norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float32)).to(device).double()
        share = (
            torch.maximum(share, norms.max()) if math.isinf(norm_type) else share + norms.pow(norm_type).sum() / copies
        )
    return share


def _copies(parameter: nn.Parameter, world: int) -> int:
    """How many ranks hold each element of the parameter's gradient."""
    if not isinstance(parameter, DTensor):
        return world
    shards = math.prod(
        size
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        if not placement.is_replicate()
    )
    return world // shards
