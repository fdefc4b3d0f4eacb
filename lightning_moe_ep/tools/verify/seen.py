"""What was seen of a run's steps: plain facts, whole tensors on the CPU, by the names of the plain model."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ep.context_parallel import slice_length
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.trees import tensors_of

Named = dict[str, Tensor]
"""Whole tensors on the CPU by the names of the plain model's parameters."""

PARTS = ("dense", "experts")


@dataclass
class Step:
    """One optimizer step, seen from rank 0."""

    before: Named = field(default_factory=dict)
    """Weights."""
    buffers: Named = field(default_factory=dict)
    state_before: dict[str, Named] = field(default_factory=dict)
    """What the optimizer has of each parameter, by its key."""
    batches: list[list[Any]] = field(default_factory=list)
    """What `training_step` was given: of each rank (here and below, at cp > 1: of each cp group), its micro-batches."""
    losses: list[list[float]] = field(default_factory=list)
    """What came of each, divided by the number of micro-batches."""
    chosen: list[list[Tensor]] = field(default_factory=list)
    """Of each rank, the expert ids that its routers gave, call by call."""
    gradients: Named = field(default_factory=dict)
    clip: float = math.nan
    """The largest norm, or value, that was left."""
    factors: list[dict[str, float | None]] = field(default_factory=list)
    """What each rank's clipping multiplied its gradients by, of each of `PARTS`; None where it has none."""
    clipped: Named = field(default_factory=dict)
    """Without those that no rank has."""
    after: Named = field(default_factory=dict)
    state_after: dict[str, Named] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    """Gradients that only some ranks have, and the ranks that have none."""
    differing: dict[str, list[str]] = field(default_factory=dict)
    """By what it is ("weights", "gradients", "buffers"), the names of what is replicated, but not equal."""
    unlike: list[list[int]] = field(default_factory=list)
    """The ranks of each cp group that had unlike batches."""

    def join_groups(self, cp: int) -> None:
        """Make of what each rank had what each cp group had, as if it were one rank with whole sequences."""
        groups = [list(range(first, first + cp)) for first in range(0, len(self.batches), cp)]
        self.unlike = [group for group in groups if len({digest_of(self.batches[rank]) for rank in group}) > 1]
        self.chosen = [joined(self.batches[group[0]], [self.chosen[rank] for rank in group]) for group in groups]
        self.batches = self.batches[::cp]
        self.losses = [
            [sum(losses) / cp for losses in zip(*(self.losses[rank] for rank in group), strict=True)]
            for group in groups
        ]


@dataclass
class Phase:
    """One fit at one layout."""

    layout: Layout
    norm_type: float
    value_clip: bool
    own_clip: bool
    """Whether the module clips in a way of its own."""
    num_batches: int | float
    """Of an epoch, on each rank."""
    optimizer: str
    """Its class."""
    step: Step = field(default_factory=Step)
    equal_experts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By the experts module, pairs with the same weights at the start."""
    num_experts: dict[str, int] = field(default_factory=dict)
    holders: dict[str, list[tuple[int, tuple[slice, ...]]]] = field(default_factory=dict)
    """Which part of each parameter each rank holds."""


@dataclass
class Measured:
    """Both steps; the second is missing where there was no resume."""

    phases: list[Phase]
    device: torch.device
    """Of rank 0."""
    changes: list[str]
    """What of the run was cut or set, a line each."""


def joined(batches: list[Any], of_ranks: list[list[Tensor]]) -> list[Tensor]:
    """The expert ids `[B * S, K]` of whole sequences, call by call, from those of the slices `[B * ceil(S / cp), K]`.

    Args:
        batches: the micro-batches, whole.
        of_ranks: of each rank of the cp group, its calls, equally many in each micro-batch.

    Returns:
        Nothing if the calls are not those of such slices.
    """
    calls = list(zip(*of_ranks, strict=False))
    whole = []
    for number, slices in enumerate(calls):
        batch = batches[number * len(batches) // len(calls)]
        rows, length = batch["input_ids"].shape if isinstance(batch, Mapping) and "input_ids" in batch else (0, 0)
        part = slice_length(length, len(slices))
        if not rows or any(len(of_rank) != rows * part for of_rank in slices):
            return []
        of_rows = [of_rank.reshape(rows, part, -1) for of_rank in slices]
        whole.append(torch.cat(of_rows, dim=1)[:, :length].flatten(0, 1))
    return whole


def norm_of(gradients: Named, norm_type: float) -> float:
    """The p-norm of all together."""
    if not gradients:
        return 0.0
    if math.isinf(norm_type):
        return max(float(g.abs().max()) for g in gradients.values() if g.numel())
    return sum(float(g.double().abs().pow(norm_type).sum()) for g in gradients.values()) ** (1 / norm_type)


def digest_of(batch: Any) -> str:
    """Tells batches apart by their tensors."""
    tensors = "".join(digest(tensor) for tensor in tensors_of(batch))
    return tensors or hashlib.sha256(pickle.dumps(batch)).hexdigest()


def digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
