"""What `ep="auto"` means where enough is known: the ep that a plan finds best, by arithmetic alone.

Nothing is built or run for it: of activations nothing is known, and AdamW is taken as the optimizer. Where facts are
missing there is no answer, and the rule of `layout.largest_ep` stands.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
from torch import nn

from lightning_moe_ep.layout import Layout, divisors_of
from lightning_moe_ep.planning.estimate import cost_of, time_of
from lightning_moe_ep.planning.exchange import Exchanged, chosen_dispatcher
from lightning_moe_ep.planning.look import Look, by_parameters
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.planning.shapes import ModelShapes, part_of, shapes_of
from lightning_moe_ep.planning.wire import Step, layers_of, wire_of

_KNOWN = ("auto", "all_gather", "all_to_all", "overlapped")


@dataclass(frozen=True)
class Choice:
    """An ep, and why."""

    ep: int
    why: str


@dataclass(frozen=True)
class _Considered:
    ep: int
    need: int
    """Bytes that stay, with the weights of the two largest blocks gathered."""

    seconds: float | None
    cost: float

    @property
    def order(self) -> float:
        return self.cost if self.seconds is None else self.seconds

    def __str__(self) -> str:
        what = f"{self.cost / 1e9:,.3g} GB weighed" if self.seconds is None else f"{self.seconds:.3g} s"
        return f"ep={self.ep}: {what}, {self.need / 2**30:,.1f} GiB"


def choose_ep(
    module: L.LightningModule,
    *,
    world: int,
    replicate: int,
    devices_per_node: int,
    tokens: int | None,
    micro_batches: int,
    precision: str,
    machine: Machine,
    options: Mapping[str, Any],
) -> Choice | None:
    """The ep of the shortest step, among those whose weights and optimizer state fit a device.

    Args:
        module: with its plain model, real or not; it is left as it is.
        world: ranks.
        replicate: copies of the sharded model.
        devices_per_node: ranks of a node.
        tokens: of a micro-batch on one rank; None: not known.
        micro_batches: accumulated before the optimizer steps.
        precision: the Trainer's.
        machine: what is known of it.
        options: those of `parallelize`, and `reduce_every_micro_batch`.

    Returns:
        None where the memory of a device, the tokens or K are not known, or the dispatcher is a user's own.
    """
    if machine.usable is None or tokens is None or options["dispatcher"] not in _KNOWN:
        return None
    model = without_values(module)
    shapes = shapes_of(model, precision=precision, fp32_modules=options["fp32_modules"])
    if any(experts.top_k is None or experts.hidden_size is None for experts in shapes.experts):
        return None
    look, layers = by_parameters(model, shapes, ""), layers_of(shapes, {})
    step = Step(
        tokens=tokens,
        micro_batches=micro_batches,
        reduce_every_micro_batch=options["reduce_every_micro_batch"],
        reshard=options["reshard_after_forward"],
        combine_dtype=options["combine_dtype"],
        activation_checkpointing=options["activation_checkpointing"],
        cpu_offload=options["cpu_offload"],
    )
    considered = [
        _consider(
            shapes,
            Layout.for_world(world, ep=ep, replicate=replicate),
            step,
            look,
            machine,
            layers,
            options["dispatcher"],
            devices_per_node,
        )
        for ep in divisors_of(world // replicate)
        if all(experts.num_experts % ep == 0 for experts in shapes.experts)
    ]
    fitting = [each for each in considered if each.need <= machine.usable]
    ranked = sorted(fitting, key=lambda each: each.order) or sorted(considered, key=lambda each: each.need)
    head = "by the plan" if fitting else "by the plan nothing fits, and this needs least"
    return Choice(ranked[0].ep, f"{head} ({'; '.join(map(str, ranked[:3]))})")


def without_values(module: L.LightningModule) -> L.LightningModule:
    """A copy on the meta device, with the same ties, whose Trainer is the same."""
    memo: dict[int, Any] = {}
    if module._trainer is not None:
        memo[id(module._trainer)] = module._trainer
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def _consider(
    shapes: ModelShapes,
    layout: Layout,
    step: Step,
    look: Look,
    machine: Machine,
    layers: Mapping[str, Exchanged],
    dispatcher: str,
    devices_per_node: int,
) -> _Considered:
    if dispatcher == "auto" and layout.ep > 1:
        first, *_ = layers.values()
        dispatcher = chosen_dispatcher(first, ep=layout.ep, combine_dtype=step.combine_dtype)
    step = replace(step, dispatcher=dispatcher)
    wire = wire_of(shapes, layout, step, devices_per_node=devices_per_node, layers=layers)
    time = time_of(wire, look, step, machine)
    stays, gathered = 0, dict.fromkeys((unit.name for unit in shapes.units), 0)
    units = {unit.name: unit for unit in shapes.units}
    for parameter in shapes.parameters:
        part = part_of(parameter, shapes, layout, cpu_offload=step.cpu_offload)
        by_fsdp = shapes.by_fsdp(parameter, layout, cpu_offload=step.cpu_offload)
        if not (step.cpu_offload and by_fsdp):
            # Itself, its gradient and AdamW's two moments.
            stays += part.padded * parameter.dtype.itemsize * (4 if parameter.trained else 1)
        if by_fsdp and parameter.unit is not None:
            computed = units[parameter.unit].gathered or parameter.dtype
            gathered[parameter.unit] += part.padded * part.ranks * computed.itemsize
    of_blocks = sorted(size for name, size in gathered.items() if units[name].role == "block")
    at_once = sum(of_blocks if not step.reshard else of_blocks[-2:])
    of_roots = sum(size for name, size in gathered.items() if units[name].role == "root")
    return _Considered(layout.ep, stays + at_once + of_roots, time.middle if time else None, cost_of(wire))
