"""From a whole tensor to this rank's part of it, and back.

Torch's own `distribute_tensor` and `full_tensor` refuse or copy too much where FSDP2 shards a DTensor unevenly; these
two work for every layout that `parallelize` makes. The parts follow FSDP2: dimension `d` of what the inner mesh
dimensions left is cut by `torch.chunk`'s rule, so some parts may be smaller or empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding


@torch.no_grad()
def cut(full: Tensor, like: DTensor, *, device: torch.device | None = None) -> DTensor:
    """The DTensor that holds `full`, sharded as `like` is; only this rank's part is copied.

    Args:
        full: the whole tensor, the same on every rank.
        like: gives mesh and placements.
        device: where the part goes; None: where the part of `like` is.

    Raises:
        ValueError: the shapes differ.
    """
    if full.shape != like.shape:
        raise ValueError(f"a tensor of shape {list(full.shape)} cannot fill one of shape {list(like.shape)}")
    local = full[part_of(like)]
    local = local.to(device or like._local_tensor.device, copy=True, memory_format=torch.contiguous_format)
    return of_part(local, like)


def of_part(part: Tensor, like: DTensor) -> DTensor:
    """The DTensor of which this rank has `part`, sharded as `like` is; also where parts are uneven or empty."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor | None:
    """The whole tensor on the CPU of rank 0, None on the others; every rank of the world must call this.

    Args:
        tensor: a DTensor over all ranks, or a tensor that is the same on all of them (then rank 0's is taken).
    """
    first = dist.get_rank() == 0
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if first else None
    mesh = tensor.device_mesh.mesh
    parts = {rank: part_of(tensor, (mesh == rank).nonzero()[0].tolist()) for rank in mesh.flatten().tolist()}
    largest = max(math.prod(part.stop - part.start for part in slices) for slices in parts.values())
    mine = torch.zeros(largest, dtype=tensor.dtype, device=tensor._local_tensor.device)
    mine[: tensor._local_tensor.numel()] = tensor._local_tensor.flatten()
    received = [torch.empty_like(mine) for _ in parts] if first else None
    dist.gather(mine, received, dst=0)
    if received is None:
        return None
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for rank, slices in parts.items():
        target = full[slices]
        target.copy_(received[rank][: target.numel()].view(target.shape))
    return full


def part_of(tensor: DTensor, coordinate: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Which part of the whole tensor the rank at `coordinate` of the tensor's mesh holds; None: this rank."""
    if coordinate is None:
        coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    part = [slice(0, size) for size in tensor.shape]
    mesh_dims = list(zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True))
    # The innermost mesh dimension first: FSDP2 shards what expert parallelism left to this rank.
    for mesh_size, position, placement in reversed(mesh_dims):
        if placement.is_replicate():
            continue
        whole = part[placement.dim]
        size = -(-(whole.stop - whole.start) // mesh_size)
        start = min(whole.start + position * size, whole.stop)
        part[placement.dim] = slice(start, min(start + size, whole.stop))
    return tuple(part)


@register_sharding(torch.ops.aten._is_any_true.default)
def _is_any_true(tensor: DTensor) -> list:
    """torch 2.13 has no rule for it, which anomaly detection asks of every gradient."""
    return [([Replicate()], [Replicate()])]
