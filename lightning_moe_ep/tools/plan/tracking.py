"""Keeping count of the memory that a computation without data would take: the one place that knows torch's tracker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Private; read at torch 2.13.0. A test fails when it moves.
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor


class Tracker(MemTracker):
    """Torch's memory tracker, which also tells the level, and the highest since it was last asked.

    It counts the storage of every tensor that an operation returns, from then until the last reference to it goes; what
    an operation allocates and frees inside of itself it does not see, nor the allocator's gaps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._highest = 0

    @property
    def level(self) -> int:
        """Bytes of all tensors that are alive."""
        return sum(snapshot["Total"] for snapshot in self._curr_mem_snap.values())

    def highest(self) -> int:
        """Bytes that were alive at the same time, at most, since this was last asked."""
        highest, self._highest = max(self._highest, self.level), self.level
        return highest

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        # The hooks tell gradients from other tensors, which is not asked here, and torch 2.13 puts them on frozen
        # parameters too, which raises.
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # which tensors without data are asked more often than to compute
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        self._highest = max(self._highest, self.level)


def without_data(model: nn.Module) -> dict[str, nn.Parameter]:
    """Replace every parameter and buffer by one of the same shape, dtype and ties; inside of `no_data`.

    Those of a parallel model become plain ones, of the shape of this rank's part.

    Returns:
        The parameters, by their first name.
    """
    made: dict[int, torch.Tensor] = {}
    named: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    shape = tensor._local_tensor.shape if isinstance(tensor, DTensor) else tensor.shape
                    empty = torch.empty(shape, dtype=tensor.dtype, device="cpu")
                    made[id(tensor)] = empty
                    if isinstance(tensor, nn.Parameter):
                        parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = named[f"{name}.{key}" if name else key] = parameter
                kind[key] = made[id(tensor)]
    return named
