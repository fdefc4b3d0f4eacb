"""The bytes that a rank keeps of a model and those that it gathers for a while, by arithmetic on shapes.

Facts of a model and of its optimizers go in, with a layout. What is kept (parameters, gradients, optimizer state) is
exact; see `peak` for the most that there is at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import ModelShapes, ParameterShape, Part, UnitShape, part_of
from lightning_moe_ep.tools.plan.states import OptimizerStates


@dataclass(frozen=True)
class Resident:
    """Bytes that one rank keeps of a model from step to step."""

    parameters: int
    gradients: int
    """Between backward and the optimizer's step."""

    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Gathered:
    """Bytes of one collective of a unit, those of its dense weights or those of its experts."""

    buffer: int
    """What the all-gather writes to; 0 if one rank has it all, which is then copied."""

    weights: int
    """The whole weights, as they are computed with."""

    transposing: int
    """More of them, while what is sharded along another dimension than 0 is put together."""

    gradients: int
    """The weights' gradients before they are reduced."""

    reduced: int
    """What the reduce-scatter reads: the same, in the dtype in which they are reduced."""

    shard: int
    """What it writes."""

    kept: int
    """The gradients of this rank's part, as they stay."""

    accumulated: int
    """The gradients of the whole weights, where micro-batches are added up unreduced."""


@dataclass(frozen=True)
class Spread:
    """A model in a layout: what each unit gathers, and what each rank keeps."""

    shapes: ModelShapes
    layout: Layout
    cpu_offload: bool = False

    @cached_property
    def parts(self) -> dict[str, Part]:
        """How each parameter is cut, by its name."""
        self.shapes.check_layout(self.layout)
        return {
            p.name: part_of(p, self.shapes, self.layout, cpu_offload=self.cpu_offload) for p in self.shapes.parameters
        }

    @cached_property
    def by_fsdp(self) -> set[str]:
        """The parameters that FSDP2 manages."""
        return {
            parameter.name
            for parameter in self.shapes.parameters
            if self.shapes.by_fsdp(parameter, self.layout, cpu_offload=self.cpu_offload)
        }

    @cached_property
    def groups(self) -> dict[str, list[Gathered]]:
        """The collectives of each unit, by its name, in the order of its forward."""
        of_unit: dict[str, dict[bool, list[ParameterShape]]] = {unit.name: {} for unit in self.shapes.units}
        for parameter in self.shapes.parameters:
            if parameter.unit is not None and parameter.name in self.by_fsdp:
                of_experts = parameter.experts is not None and self.layout.ep > 1
                of_unit[parameter.unit].setdefault(of_experts, []).append(parameter)
        units = {unit.name: unit for unit in self.shapes.units}
        return {
            name: [self._gathered(units[name], parameters) for parameters in groups.values()]
            for name, groups in of_unit.items()
        }

    def _gathered(self, unit: UnitShape, parameters: Sequence[ParameterShape]) -> Gathered:
        total: Counter[str] = Counter()
        for parameter in parameters:
            part = self.parts[parameter.name]
            computed = unit.gathered or parameter.dtype
            reduced = unit.reduced or computed
            whole = part.padded * part.ranks
            total["weights"] += whole * computed.itemsize
            total["buffer"] += whole * computed.itemsize if part.ranks > 1 else 0
            total["transposing"] += whole * computed.itemsize if part.dim and part.ranks > 1 else 0
            if parameter.trained:
                total["gradients"] += math.prod(part.gathered) * computed.itemsize
                total["accumulated"] += math.prod(part.gathered) * reduced.itemsize
                total["reduced"] += whole * reduced.itemsize
                total["shard"] += part.padded * reduced.itemsize
                total["kept"] += part.padded * parameter.dtype.itemsize
        names = ("buffer", "weights", "transposing", "gradients", "reduced", "shard", "kept", "accumulated")
        return Gathered(**{name: total[name] for name in names})

    def resident(self, states: OptimizerStates, rank: int = 0) -> Resident:
        """What a rank keeps of the model.

        Args:
            states: what its optimizers keep.
            rank: which; none has more than rank 0, as parts that are not even are cut as `torch.chunk` does.
        """
        layout = self.layout
        parameters = gradients = optimizer = 0
        for parameter in self.shapes.parameters:
            of_experts = parameter.experts is not None and layout.ep > 1
            coordinate = rank // layout.ep % layout.efsdp if of_experts else rank % layout.fsdp
            part = self.parts[parameter.name]
            elements = part.elements(coordinate if part.ranks > 1 else 0)
            parameters += elements * parameter.dtype.itemsize
            gradients += elements * parameter.dtype.itemsize if parameter.trained else 0
            optimizer += states.bytes_of(parameter, elements)
        buffers = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.shapes.buffers)
        return Resident(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers)

    def offloaded(self, states: OptimizerStates) -> Resident:
        """What of it is in memory of the host."""
        if not self.cpu_offload:
            return Resident(0, 0, 0, 0)
        parameters = gradients = optimizer = 0
        for parameter in self.shapes.parameters:
            if parameter.name in self.by_fsdp:
                elements = self.parts[parameter.name].padded
                parameters += elements * parameter.dtype.itemsize
                gradients += elements * parameter.dtype.itemsize if parameter.trained else 0
                optimizer += states.bytes_of(parameter, elements)
        return Resident(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=0)


def resident(
    shapes: ModelShapes, states: OptimizerStates, layout: Layout, *, rank: int = 0, cpu_offload: bool = False
) -> Resident:
    """What a rank keeps of a model in a layout; see `Spread`.

    Raises:
        ValueError: the layout does not fit the experts.
    """
    return Spread(shapes, layout, cpu_offload).resident(states, rank)
