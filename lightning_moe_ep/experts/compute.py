"""What an expert with stacked weights computes: rows sorted by expert in, their outputs out.

Interchangeable ways, see `Computation`. Each gives every weight of this rank a gradient, zero for an expert that got
no row. The gate, the activation and a norm after the experts are the module's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_ep.experts.adapter import Computation, local_parameter, weigh
from lightning_moe_ep.rows import RowGroups

GROUPED_MM_CAPABILITY = (8, 0)
"""The oldest CUDA devices that have a grouped_mm kernel (torch 2.13)."""

ALIGNMENT = 16
"""Bytes that a row of a matrix must be a multiple of for grouped_mm (torch 2.13, CPU and CUDA)."""


_LOW_RANK = "_low_rank"


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to stacked weights `[L, n, m]`: for each expert `scaling * left @ right`."""

    left: Tensor
    """`[L, n, r]`"""

    right: Tensor
    """`[L, r, m]`"""

    scaling: float

    @property
    def mT(self) -> LowRank:  # noqa: N802
        """What it adds to the transposed weights."""
        return LowRank(self.right.mT, self.left.mT, self.scaling)

    def whole(self) -> Tensor:
        """`[L, n, m]`"""
        return self.scaling * (self.left @ self.right)

    def of_all(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """From `[R, n]` rows to `[R, m]`."""
        # grouped_mm takes no matrix whose rows do not fill multiples of ALIGNMENT.
        left, right = (part.to(rows.dtype) for part in (self.left, self.right))
        if missing := -left.shape[2] % (ALIGNMENT // rows.element_size()):
            left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
        narrow = F.grouped_mm(rows, left, offs=groups.offsets)
        return F.grouped_mm(narrow * self.scaling, right, offs=groups.offsets)

    def of_one(self, expert: int, rows: Tensor) -> Tensor:
        left, right = (part[expert].to(rows.dtype) for part in (self.left, self.right))
        return (rows @ left) * self.scaling @ right


def compute_experts(
    module: nn.Module, rows: Tensor, groups: RowGroups, weights: Tensor | None = None, *, computation: Computation
) -> Tensor:
    """Run the experts whose weights this rank holds.

    Args:
        module: an experts module as transformers describes them. Its weights are `gate_up_proj [L, 2I, H]` and
            `down_proj [L, H, I]` (or DTensors with such local tensors), its `_apply_gate` maps `[R, 2I]` to `[R, I]`.
            It may have `up_proj [L, I, H]` and `act_fn` instead of a gate, biases (`NAME_bias [L, width]`), both
            weights transposed (`is_transposed`), and a `post_expert_norm` (`has_post_expert_norm`). `with_low_rank`
            gives one to whose weights adapters add something, which `native` does not take.
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
        return native(module, rows, groups, weights)
    up, down = (_Projection(module, name) for name in (up_name(module), "down_proj"))
    activate = module._apply_gate if up.name == "gate_up_proj" else module.act_fn
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    inputs = rows.to(up.weight.dtype)
    if _use_grouped_mm(up, down, computation) and len(rows):
        hidden = activate(up.of_all(inputs, groups))
        if norm is not None:  # does not commute with the weights
            return weigh(norm(down.of_all(hidden, groups)), weights).to(rows.dtype)
        return down.of_all(weigh(hidden, weights), groups, weights).to(rows.dtype)
    outputs = torch.cat(
        [
            down.of_one(expert, activate(up.of_one(expert, chunk)))
            for expert, chunk in enumerate(inputs.split(groups.counts))
        ]
    )
    return weigh(outputs if norm is None else norm(outputs), weights).to(rows.dtype)


def with_low_rank(module: nn.Module, low_rank: Mapping[str, Sequence[LowRank]]) -> nn.Module:
    """A shallow copy of an experts module, for `compute_experts`, with what adapters add to weights of these names."""
    local = copy.copy(module)
    object.__setattr__(local, _LOW_RANK, low_rank)
    return local


def up_name(module: nn.Module) -> str:
    """The parameter of the first projection: with the gate's, or alone."""
    return "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"


class _Projection:
    """One of the two stacked linear maps of an experts module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        transposed = getattr(module, "is_transposed", False)
        weight = local_parameter(module, name)
        self.weight = weight if transposed else weight.mT
        """`[L, width in, width out]`"""
        added = getattr(module, _LOW_RANK, {}).get(name, ())
        self.low_rank = [each if transposed else each.mT for each in added]
        self.bias = local_parameter(module, f"{name}_bias") if hasattr(module, f"{name}_bias") else None
        """`[L, width out]`"""

    def of_all(self, rows: Tensor, groups: RowGroups, weights: Tensor | None = None) -> Tensor:
        """All experts on their rows; `weights` are those that the rows have been multiplied by already."""
        outputs = F.grouped_mm(rows, self.weight, offs=groups.offsets)
        for added in self.low_rank:
            outputs = outputs + added.of_all(rows, groups)
        if self.bias is None:
            return outputs
        bias = self.bias.repeat_interleave(groups.sizes, dim=0, output_size=len(rows))
        return outputs + weigh(bias, weights)

    def of_one(self, expert: int, rows: Tensor) -> Tensor:
        outputs = rows @ self.weight[expert]
        for added in self.low_rank:
            outputs = outputs + added.of_one(expert, rows)
        return outputs if self.bias is None else outputs + self.bias[expert]


def native(module: nn.Module, rows: Tensor, groups: RowGroups, weights: Tensor | None) -> Tensor:
    """The module's own forward on rows that each have one expert."""
    weights = rows.new_ones(len(rows)) if weights is None else weights.to(rows.dtype)
    num_local = len(groups.counts)
    # A shallow copy that has this rank's experts as plain tensors, and knows only of them.
    local = copy.copy(module)
    local._parameters = {}
    for name, _ in module.named_parameters(recurse=False):
        object.__setattr__(local, name, local_parameter(module, name))  # a plain attribute, whatever subclass it is
    for name in expert_counts(module):
        object.__setattr__(local, name, num_local)
    index = torch.arange(num_local, device=rows.device).repeat_interleave(groups.sizes, output_size=len(rows))
    return type(module).forward(local, rows, index.unsqueeze(1), weights.unsqueeze(1))


def expert_counts(module: nn.Module) -> list[str]:
    """The attributes in which the module says how many experts it has."""
    (num_experts,) = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3}
    return [
        name for name, value in vars(module).items() if "expert" in name and type(value) is int and value == num_experts
    ]


def _use_grouped_mm(up: _Projection, down: _Projection, computation: Computation) -> bool:
    if computation in ("loop", "native"):  # native comes here when there are no rows
        return False
    return takes_grouped_mm(up.weight, {"H": up.weight.shape[1], "I": down.weight.shape[1]}, computation)


def takes_grouped_mm(weight: Tensor, sizes: Mapping[str, int], computation: Computation) -> bool:
    """Whether to compute with grouped_mm, where it is `auto` or asked for.

    Args:
        weight: one of the experts' weights.
        sizes: of the matrices that are multiplied, by name.
        computation: `auto` or `grouped_mm`.

    Raises:
        ValueError: grouped_mm was asked for with sizes that it does not take.
    """
    misfits = [size for size in sizes.values() if size * weight.element_size() % ALIGNMENT]
    if misfits and computation == "grouped_mm":
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"grouped_mm takes sizes that fill multiples of {ALIGNMENT} bytes, but {shown} in {weight.dtype} do not;"
            " use computation='loop' or 'auto'"
        )
    too_old = weight.is_cuda and torch.cuda.get_device_capability(weight.device) < GROUPED_MM_CAPABILITY
    return not misfits and not (too_old and computation == "auto")
