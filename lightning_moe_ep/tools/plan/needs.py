"""Device memory of every candidate: what stays by arithmetic, activations from traces of the ways that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import nn

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import ModelShapes
from lightning_moe_ep.planning.wire import Step
from lightning_moe_ep.tools.plan.activations import CausalLM, Trace, Way, trace
from lightning_moe_ep.tools.plan.layouts import Candidate, Needs
from lightning_moe_ep.tools.plan.memory import Spread
from lightning_moe_ep.tools.plan.peak import StepOptions, peak
from lightning_moe_ep.tools.plan.states import OptimizerStates


def needs_by(
    build: Callable[[], nn.Module],
    shapes: ModelShapes,
    states: OptimizerStates,
    considered: Sequence[Candidate],
    *,
    batch: CausalLM,
    step: Step,
    options: dict[str, Any],
) -> Callable[[Candidate], Needs]:
    """What tells the memory of a candidate.

    Args:
        build: makes the model, for the traces.
        shapes: of it.
        states: what its optimizers keep.
        considered: the candidates.
        batch: of a micro-batch.
        step: what the step is made of, but for what a candidate says.
        options: the strategy's.

    Raises:
        ApartError: the model cannot be run without data.
    """

    def way_of(candidate: Candidate) -> Way:
        return Way(
            ep=candidate.layout.ep,
            dispatcher=candidate.dispatcher,
            activation_checkpointing=candidate.activation_checkpointing,
            computation=options.get("computation", "auto"),
            combine_dtype=step.combine_dtype,
        )

    ways = list(dict.fromkeys(map(way_of, considered)))
    fp32_modules = options.get("fp32_modules", ())
    traces = trace(build, batch, ways, precision=shapes.precision, fp32_modules=fp32_modules)
    of_way: dict[Way, Trace] = dict(zip(ways, traces, strict=True))

    @cache
    def spread(layout: Layout) -> Spread:
        return Spread(shapes, layout, cpu_offload=step.cpu_offload)

    def needs_of(candidate: Candidate) -> Needs:
        at = spread(candidate.layout)
        of_step = StepOptions(
            reshard_after_forward=candidate.reshard,
            accumulate=step.micro_batches,
            reduce_every_micro_batch=step.reduce_every_micro_batch,
        )
        highest = peak(at, states, of_way[way_of(candidate)], of_step)
        keeps, away = at.resident(states), at.offloaded(states)
        return Needs(
            parameters=keeps.parameters,
            gradients=keeps.gradients,
            optimizer=keeps.optimizer,
            buffers=keeps.buffers,
            offloaded=away.total,
            at_peak={
                "parameters": keeps.parameters - away.parameters,
                "optimizer state": keeps.optimizer - away.optimizer,
                "buffers": keeps.buffers,
                "gradients": highest.gradients,
                "gathered weights": highest.gathered,
                "activations": highest.activations,
            },
            peak=highest.total,
            where=highest.where,
        )

    return needs_of
