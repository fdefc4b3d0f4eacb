"""The callback that sees one optimizer step of a parallel run, and gathers it on rank 0."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_moe_ep.checkpoint import leave_unread
from lightning_moe_ep.experts import expert_parameters, find_experts, spread_experts, to_plain
from lightning_moe_ep.gradients import local_tensor
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.shards import gather, part_of
from lightning_moe_ep.strategy import MoEEPStrategy
from lightning_moe_ep.tools.verify.cutting import cut, quiet
from lightning_moe_ep.tools.verify.given import Given
from lightning_moe_ep.tools.verify.memory import check_memory
from lightning_moe_ep.tools.verify.parts import record_choices
from lightning_moe_ep.tools.verify.seen import PARTS, Named, Phase, digest, norm_of


class Probe(L.Callback):
    """Cuts the model, and sees one optimizer step."""

    def __init__(self, given: Given, strategy: MoEEPStrategy) -> None:
        self.given = given
        self.strategy = strategy
        self.make_place: Callable[[], str] | None = None
        """On every rank, gives where to save after the step."""
        self.changes: list[str] = []
        self.done = False
        self._batches: list[Any] = []
        self._losses: list[float] = []
        self._before_clip: list[Tensor | None] = []
        self._absent: list[str] = []
        self._chosen: list[Tensor] = []
        self._is_set_up = False

    def edit(self, module: L.LightningModule) -> None:
        """What is done to the plain model."""
        folders = leave_unread(module)
        self.changes = [f"{folder} is not read: the weights are new" for folder in folders]
        self.changes += [*cut(module, self.given.layers), *quiet(module)]
        self.num_experts = {found.name: found.num_experts for found in find_experts(module)}
        if self._is_set_up:  # the model has no memory yet, if it is on the meta device
            self._check_memory(module)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._is_set_up = True
        if next(pl_module.parameters(), None) is not None:
            self._check_memory(pl_module)

    def _check_memory(self, module: L.LightningModule) -> None:
        layout = Layout.for_world(dist.get_world_size(), ep=1, replicate=self.strategy.replicate)
        check_memory(module, layout, self.strategy.root_device, ranks_on_node=self.strategy.num_processes)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.phase = Phase(
            layout=self.strategy.layout,
            norm_type=self.strategy.gradients.norm_type,
            value_clip=trainer.gradient_clip_algorithm == "value",
            own_clip=type(pl_module).configure_gradient_clipping is not L.LightningModule.configure_gradient_clipping,
            num_batches=trainer.num_training_batches,
            num_experts=self.num_experts,
            optimizer=type(trainer.optimizers[0]).__name__,
        )
        step = self.phase.step
        record_choices(pl_module, self._chosen)
        parameters = dict(pl_module.named_parameters())
        raw = _whole(parameters)
        self.phase.holders = {name: _holders(p) for name, p in parameters.items() if isinstance(p, DTensor)}
        if raw:
            names = {id(p): name for name, p in parameters.items()}
            for _, spread in spread_experts(pl_module):
                tensors = {names[id(p)]: raw[names[id(p)]] for p in spread.parameters()}
                if pairs := _equal_experts(tensors):
                    self.phase.equal_experts[spread.name] = pairs
        step.before = to_plain(pl_module, raw)
        step.buffers = _whole(dict(pl_module.named_buffers()))
        step.state_before = self._state(trainer, pl_module)
        self._compare(parameters, "weights")
        self._compare(dict(pl_module.named_buffers()), "buffers")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A copy first: what has a `to` of its own may be moved by it.
        self._batches.append(move_data_to_device(copy.deepcopy(batch), torch.device("cpu")))

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if self.done:
            return
        step = self.phase.step
        trained = _trained(trainer, pl_module)
        has: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(has, [parameter.grad is not None for parameter in trained.values()])
        self._absent = []
        for number, name in enumerate(trained):
            lacking = [rank for rank, of_rank in enumerate(has) if not of_rank[number]]
            if len(lacking) == len(has):
                self._absent.append(name)
            elif lacking:
                step.missing[name] = lacking
        gradients = _gradients(trained)
        self._compare(gradients, "gradients")
        step.gradients = to_plain(pl_module, _whole(gradients))
        clip = [self._clip_that_bites()]
        dist.broadcast_object_list(clip, src=0)
        trainer.gradient_clip_val = step.clip = clip[0]
        self._before_clip = [None if p.grad is None else local_tensor(p.grad).clone() for p in trained.values()]

    def _clip_that_bites(self) -> float:
        size = norm_of(self.phase.step.gradients, math.inf if self.phase.value_clip else self.phase.norm_type)
        return size / 2 if size > 0 and math.isfinite(size) else 1.0

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.done:
            return
        self._losses.append(float(outputs["loss"]))
        if not self._before_clip:  # within an accumulation window
            return
        step = self.phase.step
        trained = _trained(trainer, pl_module)
        mine = (self._batches, self._losses, self._factors(pl_module, trained), self._chosen)
        everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyones, dst=0)
        if everyones is not None:
            facts = (list(of_ranks) for of_ranks in zip(*everyones, strict=True))
            step.batches, step.losses, step.factors, step.chosen = facts
            if self.phase.layout.cp > 1:
                step.join_groups(self.phase.layout.cp)
        parameters = dict(pl_module.named_parameters())
        step.clipped = to_plain(pl_module, _whole(_gradients(trained)))
        for name in self._absent:
            step.clipped.pop(name, None)
        step.after = to_plain(pl_module, _whole(parameters))
        step.state_after = self._state(trainer, pl_module)
        self._compare(parameters, "weights")
        self._before_clip = []
        self.done = True
        if self.make_place is not None:
            trainer.save_checkpoint(self.make_place())
        trainer.should_stop = True

    def _factors(self, module: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, float | None]:
        """By what this rank's clipping scaled its shards."""
        experts = {id(parameter) for parameter in expert_parameters(module)}
        product, square = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        for parameter, before in zip(trained.values(), self._before_clip, strict=True):
            if before is not None and parameter.grad is not None:
                part = PARTS[id(parameter) in experts]
                # A gradient may be too small for the product with itself.
                largest = before.double().abs().max().clamp(min=1e-300) if before.numel() else 1.0
                scaled = before.double() / largest
                product[part] += float((local_tensor(parameter.grad).double() / largest * scaled).sum())
                square[part] += float(scaled.square().sum())
        return {part: product[part] / square[part] if square[part] else None for part in PARTS}

    def _state(self, trainer: L.Trainer, module: nn.Module) -> dict[str, Named]:
        """What the optimizer holds of each parameter, where it has the parameter's shape."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        optimizer = trainer.optimizers[0]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held = {
            key: value.shape == parameter.shape
            for parameter in parameters
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.ndim
        }
        keys: list[set[str]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(keys, {key for key, fits in held.items() if fits})
        found: dict[str, Named] = {}
        for key in sorted(set.union(*keys)):
            of_key = {}
            for parameter in parameters:
                value = optimizer.state.get(parameter, {}).get(key)
                # What is missing counts as zero: every rank has to take part.
                of_key[names[id(parameter)]] = torch.zeros_like(parameter) if value is None else value
            found[key] = to_plain(module, _whole(of_key))
        return found

    def _compare(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Note what should be the same on several ranks and is not, bit by bit."""
        mine = {name: (_part(tensor), digest(local_tensor(tensor))) for name, tensor in tensors.items()}
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        differing = []
        for name in tensors:
            seen: dict[str, str] = {}
            if any(seen.setdefault(part, held) != held for part, held in (of[name] for of in everyones)):
                differing.append(name)
        if differing:
            self.phase.step.differing.setdefault(what, differing)


def _part(tensor: Tensor) -> str:
    return str(part_of(tensor)) if isinstance(tensor, DTensor) else ""


def _holders(parameter: DTensor) -> list[tuple[int, tuple[slice, ...]]]:
    mesh = parameter.device_mesh.mesh
    return [(rank, part_of(parameter, (mesh == rank).nonzero()[0].tolist())) for rank in mesh.flatten().tolist()]


def _trained(trainer: L.Trainer, module: nn.Module) -> dict[str, nn.Parameter]:
    """What the optimizer has; of the rest nobody takes the norm."""
    held = {id(parameter) for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
    return {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) in held}


def _gradients(trained: Mapping[str, nn.Parameter]) -> Named:
    """Those of this rank; one that is missing counts as zero."""
    return {name: torch.zeros_like(p.detach()) if p.grad is None else p.grad for name, p in trained.items()}


def _whole(tensors: Mapping[str, Tensor]) -> Named:
    """On rank 0; nothing on the others."""
    gathered = {name: gather(tensor) for name, tensor in tensors.items()}
    return {name: tensor.clone() for name, tensor in gathered.items() if tensor is not None}


def _equal_experts(tensors: Named) -> list[tuple[int, int]]:
    """Pairs of experts with the same weights; biases that start at zero, and LoRA's, are equal by intention."""
    telling = [t for name, t in tensors.items() if "lora_" not in name and t.numel() and t.min() != t.max()]
    if not telling:
        return []
    digests = ["".join(digest(tensor[number]) for tensor in telling) for number in range(len(telling[0]))]
    first: dict[str, int] = {}
    pairs = []
    for number, of_expert in enumerate(digests):
        if first.setdefault(of_expert, number) != number:
            pairs.append((first[of_expert], number))
    return pairs
