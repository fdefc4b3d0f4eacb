"""The bytes that a rank needs, by arithmetic on shapes: what stays, and the most that there is at once in a step.

Facts of a model, of its optimizers and of its activations go in, with a layout and options; a `Memory` comes out. What
stays (parameters, gradients, optimizer state) is exact. The peak is that of a walk through the step: at each moment the
weights that FSDP2 has gathered, its buffers, the activations so far, and what the part that is running adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import ModelShapes, part_of
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


def resident(
    shapes: ModelShapes, states: OptimizerStates, layout: Layout, *, rank: int = 0, cpu_offload: bool = False
) -> Resident:
    """What a rank keeps of the model.

    Args:
        shapes: of the model.
        states: what its optimizers keep.
        layout: how it is spread.
        rank: which; none has more than rank 0, as parts that are not even are cut as `torch.chunk` does.
        cpu_offload: as given to the strategy, which tells what FSDP2 manages; where it is kept is not asked here.

    Raises:
        ValueError: the layout does not fit the experts.
    """
    shapes.check_layout(layout)
    parameters = gradients = optimizer = 0
    for parameter in shapes.parameters:
        part = part_of(parameter, shapes, layout, cpu_offload=cpu_offload)
        of_experts = parameter.experts is not None and layout.ep > 1
        coordinate = rank // layout.ep % layout.efsdp if of_experts else rank % layout.fsdp
        elements = part.elements(coordinate if part.ranks > 1 else 0)
        parameters += elements * parameter.dtype.itemsize
        gradients += elements * parameter.dtype.itemsize if parameter.trained else 0
        optimizer += states.bytes_of(parameter, elements)
    buffers = 0
    for _, shape, dtype in shapes.buffers:
        buffers += math.prod(shape) * dtype.itemsize
    return Resident(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=buffers)
