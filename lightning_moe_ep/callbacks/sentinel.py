"""Checks during a run, every N steps, of what the loss does not show.

Each rank puts what it sees into one vector of integers: the norm that it clips by, sums over the bits of what it holds,
how many pairs its routers chose and its experts computed. One all-reduce makes the vector whole; all ranks read the
same from it, so all raise or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moe_ep.callbacks.load import LoadCounter
from lightning_moe_ep.experts import SpreadExperts, find_experts, is_spread, spread_experts
from lightning_moe_ep.faults import (
    Fault,
    equal_experts,
    experts_equal_across_ranks,
    norms_differ,
    pairs_lost,
    replicas_differ,
)
from lightning_moe_ep.gradients import local_gradients, local_tensor
from lightning_moe_ep.rows import RoutingStatistics
from lightning_moe_ep.shards import part_of

OnFault = Literal["raise", "warn"]

OF_EACH_RANK = 4
"""Numbers that a rank says of itself: the norm, the factor of its clipping, the sums of its buffers and its weights."""

OF_OWN_BATCHES = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norms, which each rank has of its own."""

SOME = 64
"""Elements of each gradient that are looked at, to see what it is scaled by."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SentinelCallback(L.Callback):
    """Checks every N optimizer steps, the first one among them, that expert parallelism does what it should.

    * Every rank clips by the same norm: the logged `grad_norm`, and the one factor by which clipping scaled this rank's
      gradients (in automatic optimization with `gradient_clip_val`), are equal on all ranks. A module's own clipping
      that treats groups of parameters differently has no such factor, and is not judged.
    * What is replicated is bit-equal: weights that every rank holds whole, persistent buffers (but the running
      statistics of batch norms), and the shards of replicas.
    * No token is lost: the (token, expert) pairs that experts computed are, summed over the world, the T * K that the
      routers chose, in each layer; at ep > 1.
    * No two experts of a layer have the same weights.

    A fault is an error on every rank, or a warning, in the words of `lightning-moe-ep verify`. What is checked of
    experts are those that `MoEEPStrategy` spread; the rest works with DDP, too.

    A check reads each weight once, has one all-reduce of some integers for each rank, expert and layer, and waits for
    the device. The other steps do nothing.
    """

    def __init__(self, every_n_steps: int = 100, *, on_fault: OnFault = "raise") -> None:
        """
        Args:
            every_n_steps: N, in optimizer steps as `global_step` counts them.
            on_fault: "raise" ends the run at a fault, "warn" goes on.

        Raises:
            ValueError: every_n_steps is not positive, or on_fault is neither.
        """
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be 1 or more")
        if on_fault not in get_args(OnFault):
            raise ValueError(f"on_fault={on_fault!r} is not known; use one of {list(get_args(OnFault))}")
        self.every_n_steps = every_n_steps
        self.on_fault = on_fault
        self._hooks: list[RemovableHandle] = []
        self._watches = False
        self._next = 0
        self._chosen: LoadCounter | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()
        self._next = 0
        self._held = _Held.of(pl_module, replicas=getattr(trainer.strategy, "replicate", 1))
        if self._held.experts:
            spread = [found for found in find_experts(pl_module) if is_spread(found.module)]
            self._chosen = LoadCounter(spread, trainer.strategy.root_device)
        self._hooks = [o.register_step_post_hook(self._after_step) for o in trainer.optimizers]

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._watches or trainer.global_step < self._next:
            return
        self._watches = True
        self._first_step = trainer.global_step
        self._before: dict[int, Tensor] = {}
        self._factor: Tensor | None = None
        if self._chosen is not None:
            self._chosen.reset()
            self._chosen.counting = True
        self._computed = [RoutingStatistics() for _ in self._held.experts]
        for spread, reader in zip(self._held.experts, self._computed, strict=True):
            spread.statistics.readers.append(reader)

    @override
    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        clips = (trainer.gradient_clip_val or 0) > 0 and trainer.gradient_clip_algorithm != "value"
        if self._watches and clips and pl_module.automatic_optimization:
            self._before[id(optimizer)] = _some_gradients(optimizer, trainer.strategy.root_device)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # Not before it: `step` runs the closure, with backward and clipping in it.
        before = self._before.pop(id(optimizer), None) if self._watches else None
        if before is not None and self._factor is None:
            after = _some_gradients(optimizer, before.device)
            self._factor = _factor(before, after, tolerance=self._held.tolerance)

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self._watches or trainer.global_step == self._first_step:
            return
        self._next = (trainer.global_step - 1) // self.every_n_steps * self.every_n_steps + self.every_n_steps
        faults = self._check(trainer)
        self._stop_watching()
        if faults:
            listed = "\n".join(f"* {fault.text}" for fault in faults)
            message = f"SentinelCallback, after step {trainer.global_step}:\n{listed}"
            if self.on_fault == "raise":
                raise RuntimeError(f"{message}\n(SentinelCallback(on_fault='warn') goes on)")
            rank_zero_warn(message)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end()

    def _check(self, trainer: L.Trainer) -> list[Fault]:
        device, held = trainer.strategy.root_device, self._held
        alike_in_world = [*held.whole, *_saved_buffers(trainer.lightning_module)]  # buffers may be others by now
        norm = trainer.callback_metrics.get("grad_norm")
        world, rank = trainer.world_size, trainer.global_rank
        numbers = torch.zeros(held.size(world), dtype=torch.int64, device=device)
        of_ranks, pairs, experts = numbers.split([world * OF_EACH_RANK, 2 * len(held.experts), held.num_experts])
        of_ranks.view(world, OF_EACH_RANK)[rank] = torch.stack(
            [
                *(_as_bits(value, device) for value in (norm, self._factor)),
                _sum_of_bits([tensor for _, tensor in alike_in_world], device),
                _sum_of_bits([tensor for _, tensor in held.alike_in_replicas], device),
            ]
        )
        chosen = self._chosen.of_layers(self._chosen.loads()) if self._chosen is not None else ()
        for both, computed, load in zip(pairs.view(-1, 2), self._computed, chosen, strict=True):
            if computed.pairs_of_expert is not None:  # at ep=1 nothing is counted
                both.copy_(torch.stack([computed.pairs_of_expert.sum(), load.sum()]))
        for sums, spread in zip(experts.split([s.num_experts for s in held.experts]), held.experts, strict=True):
            _add_sums_of_experts(sums, spread)
        if world > 1:
            dist.all_reduce(numbers)
        of_ranks, pairs, experts = (part.cpu() for part in (of_ranks, pairs, experts))
        faults = list(self._norm_faults(of_ranks.view(world, OF_EACH_RANK), trainer.gradient_clip_val))
        faults += self._replica_faults(of_ranks.view(world, OF_EACH_RANK), alike_in_world, device)
        faults += [pairs_lost(*both) for both in pairs.view(-1, 2).tolist() if both[0] != both[1]][:1]
        if not of_ranks.view(world, OF_EACH_RANK)[:, :2].view(torch.float64).isfinite().all():
            return faults  # experts that are NaN are equal, but that is not what is wrong
        for sums, spread in zip(experts.split([s.num_experts for s in held.experts]), held.experts, strict=True):
            faults += _equal_experts(sums.tolist(), spread)
        return faults

    def _norm_faults(self, of_ranks: Tensor, clip: float | None) -> Iterator[Fault]:
        norms, factors = (
            dict(enumerate(column.view(torch.float64).tolist())) for column in of_ranks.T[:2].contiguous()
        )
        seen = {rank: norm for rank, norm in norms.items() if norm != 0}  # 0: there is none
        if _differ(seen.values(), tolerance=1e-6):
            yield norms_differ(seen)
            return
        # A rank without gradients (empty shards) has no factor.
        seen = {rank: factor for rank, factor in factors.items() if factor != 0}
        if clip and _differ(seen.values(), tolerance=self._held.tolerance):
            yield norms_differ({rank: clip / factor for rank, factor in seen.items()})

    def _replica_faults(
        self, of_ranks: Tensor, alike_in_world: Sequence[tuple[str, Tensor]], device: torch.device
    ) -> Iterator[Fault]:
        """What differs is looked for only now; all ranks know that they have to."""
        world, held = len(of_ranks), self._held
        if len(of_ranks[:, 2].unique()) > 1:
            yield replicas_differ(_which_differ(alike_in_world, world, 1, device), "weights or buffers")
        replicas = of_ranks[:, 3].view(held.replicas, -1)
        if (replicas != replicas[0]).any():
            shards = world // held.replicas
            yield replicas_differ(_which_differ(held.alike_in_replicas, world, shards, device), "weights")

    def _stop_watching(self) -> None:
        self._watches = False
        if self._chosen is not None:
            self._chosen.counting = False
        for spread, reader in zip(self._held.experts, self._computed, strict=True):
            spread.statistics.readers.remove(reader)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._watches:
            self._stop_watching()
        if self._chosen is not None:
            self._chosen.close()
            self._chosen = None


@dataclass(frozen=True)
class _Held:
    """What this rank holds, and of what others hold the same."""

    experts: list[SpreadExperts]
    whole: list[tuple[str, Tensor]]
    """Parameters that every rank has whole."""
    alike_in_replicas: list[tuple[str, Tensor]]
    replicas: int
    tolerance: float
    """Of what gradients are scaled by; those in bf16 are rounded then."""

    @classmethod
    def of(cls, module: nn.Module, *, replicas: int) -> _Held:
        parameters = list(module.named_parameters())
        sharded = [(name, p) for name, p in parameters if isinstance(p, DTensor)] if replicas > 1 else []
        whole = [(name, p) for name, p in parameters if not isinstance(p, DTensor)]
        in_fp32 = all(p.dtype in (torch.float32, torch.float64) for _, p in parameters if p.requires_grad)
        return cls(
            experts=[spread for _, spread in spread_experts(module)],
            whole=whole,
            alike_in_replicas=[(name, local_tensor(p)) for name, p in sharded],
            replicas=replicas,
            tolerance=1e-4 if in_fp32 else 1e-2,
        )

    @property
    def num_experts(self) -> int:
        """E of all layers together."""
        return sum(spread.num_experts for spread in self.experts)

    def size(self, world: int) -> int:
        return world * OF_EACH_RANK + 2 * len(self.experts) + self.num_experts


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in {*owner._non_persistent_buffers_set, *OF_OWN_BATCHES}:
                yield name, buffer


def _some_gradients(optimizer: Optimizer, device: torch.device) -> Tensor:
    """The first elements of this rank's shard of each gradient, fp64 `[n]`."""
    grads = local_gradients(p for group in optimizer.param_groups for p in group["params"])
    some = [grad.flatten()[:SOME].to(device).double() for grad in grads]
    return torch.cat(some) if some else torch.zeros(0, dtype=torch.float64, device=device)


def _factor(before: Tensor, after: Tensor, *, tolerance: float) -> Tensor | None:
    """What `after` is `before` times, `[]`; 0 where it is no multiple: something else than a norm has changed it."""
    if before.shape != after.shape or not len(before):
        return None
    largest = before.abs().max()
    before, after = before / largest, after / largest
    factor = (before * after).sum() / before.square().sum()
    is_multiple = (after - factor * before).abs().max() <= tolerance * factor.abs()
    return factor.masked_fill((largest == 0) | ~(is_multiple | factor.isnan()), 0.0)


def _as_bits(value: Tensor | None, device: torch.device) -> Tensor:
    """A number as an integer that zeros can be added to; 0 where there is none."""
    number = (
        torch.zeros((), dtype=torch.float64, device=device) if value is None else value.detach().to(device).double()
    )
    return number.view(torch.int64)


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(BITS[tensor.element_size()])


def _weights(count: int, device: torch.device) -> Tensor:
    """A number for each place, int64 `[count]`: sums that are weighed by them are equal for equal values only."""
    return _made_weights(1 << max(0, count - 1).bit_length(), device)[:count]


@lru_cache(maxsize=16)
def _made_weights(count: int, device: torch.device) -> Tensor:
    # SplitMix64, whose constants are given as int64; odd, so that no bit gets lost.
    mixed = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1


def _sum_of_bits(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A sum over the bits of all elements, each row and tensor weighed differently; int64 `[]`, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors):
        bits = _bits(tensor)
        rows = bits.flatten(1).sum(dim=1, dtype=torch.int64) if bits.ndim > 1 else bits.flatten().long()
        total += (2 * number + 1) * (rows * _weights(len(rows), rows.device)).sum().to(device)
    return total


def _add_sums_of_experts(sums: Tensor, spread: SpreadExperts) -> None:
    """Add to `sums` `[E]` those of the bits of each expert that this rank has, or has a part of."""
    for number, parameter in enumerate(spread.parameters()):
        local = local_tensor(parameter)
        if not local.numel():
            continue
        starts = [part.start for part in part_of(parameter)] if isinstance(parameter, DTensor) else [0] * local.ndim
        rows_an_expert = parameter.shape[0] // spread.num_experts
        row = torch.arange(starts[0], starts[0] + len(local), device=local.device)
        bits = _bits(local)
        if bits.ndim > 1 and rows_an_expert == 1:
            inner = bits.flatten(2).sum(dim=2, dtype=torch.int64) if bits.ndim > 2 else bits.long()
            of_rows = (inner * _weights(starts[1] + inner.shape[1], inner.device)[starts[1] :]).sum(dim=1)
        else:
            of_rows = bits.flatten(1).sum(dim=1, dtype=torch.int64) if bits.ndim > 1 else bits.long()
            of_rows = of_rows * _weights(rows_an_expert, bits.device)[row % rows_an_expert]
        sums.index_add_(0, (row // rows_an_expert).to(sums.device), (2 * number + 1) * of_rows.to(sums.device))


def _equal_experts(sums: list[int], spread: SpreadExperts) -> list[Fault]:
    num_local = spread.num_local
    first_with: dict[int, int] = {}
    pairs = [(first, i) for i, bits in enumerate(sums) if (first := first_with.setdefault(bits, i)) != i]
    if not pairs:
        return []
    if spread.ep > 1 and sums == sums[:num_local] * spread.ep and len(set(sums)) == num_local:
        return [experts_equal_across_ranks(spread.name, num_local)]
    return [equal_experts(spread.name, pairs)]


def _differ(values: Any, *, tolerance: float) -> bool:
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values):
        return bool(finite)
    return bool(values) and max(values) - min(values) > tolerance * max(values)


def _which_differ(tensors: Sequence[tuple[str, Tensor]], world: int, shards: int, device: torch.device) -> list[str]:
    """The names of those whose bits are not the same on all ranks that are a multiple of `shards` apart."""
    sums = torch.zeros(world, len(tensors), dtype=torch.int64, device=device)
    sums[dist.get_rank()] = torch.stack([_sum_of_bits([tensor], device) for _, tensor in tensors])
    dist.all_reduce(sums)
    by_replica = sums.view(-1, shards, len(tensors))
    differ = (by_replica != by_replica[0]).any(dim=1).any(dim=0).tolist()
    return [name for (name, _), differs in zip(tensors, differ, strict=True) if differs]
