"""In-place arithmetic on the gradients of sharded parameters, on this rank's shards only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of each gradient that there is; shards without elements are left out."""
    grads = (local_tensor(p.grad) for p in parameters if p.grad is not None)
    return [grad for grad in grads if grad.numel()]


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds, sharing memory, outside of autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def is_replicated(parameter: nn.Parameter) -> bool:
    """Whether every rank holds the parameter whole, so that nothing but `average_gradients` reduces its gradient."""
    return not isinstance(parameter, DTensor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply the gradients in place by a number, or by a tensor of one element."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in local_gradients(parameters):
        by_device.setdefault(grad.device, []).append(grad)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, factor.to(device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of parameters that every rank holds whole; a missing gradient counts as zero.

    One all-reduce in fp32. Averaging what is already equal on all ranks changes nothing, so a gradient to which only
    some of the micro-batches were added since is right too. After it every parameter has a gradient.
    """
    parameters = list(parameters)
    if not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for parameter, average in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(average.view_as(parameter.grad))
