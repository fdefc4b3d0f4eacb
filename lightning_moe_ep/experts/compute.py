"""What an expert computes: rows sorted by expert in, their outputs out.

Interchangeable ways: `grouped_mm`, one kernel for all experts; `loop`, the readable reference; `native`, the module's
own forward, which for transformers' experts is whatever kernel their `experts_implementation` names. Each gives every
weight of this rank a gradient, zero for an expert that got no row.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_ep.rows import RowGroups

GROUPED_MM_CAPABILITY = (8, 0)
"""The oldest CUDA devices that have a grouped_mm kernel (torch 2.13)."""

Computation = Literal["auto", "grouped_mm", "loop", "native"]

ALIGNMENT = 16
"""Bytes that a row of a matrix must be a multiple of for grouped_mm (torch 2.13, CPU and CUDA)."""


def compute_experts(
    module: nn.Module, rows: Tensor, groups: RowGroups, weights: Tensor | None = None, *, computation: Computation
) -> Tensor:
    """Run the experts whose weights this rank holds.

    Args:
        module: an experts module; its weights are `gate_up_proj [L, 2I, H]` and `down_proj [L, H, I]` (or DTensors
            with such local tensors), its `_apply_gate` maps `[R, 2I]` to `[R, I]`.
        rows: `[R, H]`, sorted by expert; R may be 0.
        groups: which rows belong to which expert.
        weights: `[R]`, by which each row's output is multiplied; None: by 1. grouped_mm multiplies the I activations
            before the down projection, which comes to the same and is less to do.
        computation: `auto` is grouped_mm wherever the sizes and the device admit it, else loop.

    Returns:
        `[R, H]` in the dtype of `rows`.

    Raises:
        ValueError: grouped_mm was asked for with sizes that it does not take.
    """
    if computation == "native" and len(rows):
        return _native(module, rows, groups, weights)
    gate_up, down = _local(module.gate_up_proj), _local(module.down_proj)
    inputs = rows.to(gate_up.dtype)
    if _use_grouped_mm(gate_up, down, computation) and len(rows):
        hidden = module._apply_gate(F.grouped_mm(inputs, gate_up.transpose(-2, -1), offs=groups.offsets))
        if weights is not None:
            hidden = hidden * weights.to(hidden.dtype).unsqueeze(1)
        outputs = F.grouped_mm(hidden, down.transpose(-2, -1), offs=groups.offsets)
    else:
        outputs = torch.cat(
            [
                F.linear(module._apply_gate(F.linear(chunk, gate_up_of_one)), down_of_one)
                for chunk, gate_up_of_one, down_of_one in zip(
                    inputs.split(groups.counts), gate_up.unbind(), down.unbind(), strict=True
                )
            ]
        )
        if weights is not None:  # the definition: the outputs are weighted
            outputs = outputs * weights.to(outputs.dtype).unsqueeze(1)
    return outputs.to(rows.dtype)


def _native(module: nn.Module, rows: Tensor, groups: RowGroups, weights: Tensor | None) -> Tensor:
    """The module's own forward on rows that each have one expert."""
    weights = rows.new_ones(len(rows)) if weights is None else weights.to(rows.dtype)
    # A shallow copy that has this rank's experts as plain tensors, and knows only of them.
    local = copy.copy(module)
    local._parameters = {}
    for name, parameter in module.named_parameters(recurse=False):
        object.__setattr__(local, name, _local(parameter))  # a plain attribute, whatever subclass it is
    num_local = local.num_experts = len(groups.counts)
    index = torch.arange(num_local, device=rows.device).repeat_interleave(groups.sizes, output_size=len(rows))
    return type(module).forward(local, rows, index.unsqueeze(1), weights.unsqueeze(1))


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _use_grouped_mm(gate_up: Tensor, down: Tensor, computation: Computation) -> bool:
    if computation in ("loop", "native"):  # native comes here when there are no rows
        return False
    misfits = [size for size in (gate_up.shape[2], down.shape[2]) if size * gate_up.element_size() % ALIGNMENT]
    if misfits and computation == "grouped_mm":
        raise ValueError(
            f"grouped_mm takes sizes that fill multiples of {ALIGNMENT} bytes, but H={gate_up.shape[2]},"
            f" I={down.shape[2]} in {gate_up.dtype} do not; use computation='loop' or 'auto'"
        )
    too_old = gate_up.is_cuda and torch.cuda.get_device_capability(gate_up.device) < GROUPED_MM_CAPABILITY
    return not misfits and not (too_old and computation == "auto")
