"""Device memory of every candidate: what stays by arithmetic, activations from traces of the ways that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from torch import nn

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import ModelShapes
from lightning_moe_ep.planning.wire import Step
from lightning_moe_ep.tools.plan.activations import CausalLM, Event, Trace, Way, trace
from lightning_moe_ep.tools.plan.apart import ApartError
from lightning_moe_ep.tools.plan.layouts import Candidate, Needs
from lightning_moe_ep.tools.plan.memory import Spread
from lightning_moe_ep.tools.plan.peak import StepOptions, peak
from lightning_moe_ep.tools.plan.states import OptimizerStates

PROCESSES = 2
"""That traces are dealt out to; each imports torch anew, and has a few hundred MiB."""


def needs_by(
    build: Callable[[], nn.Module],
    shapes: ModelShapes,
    states: OptimizerStates,
    considered: Sequence[Candidate],
    *,
    batch: CausalLM,
    step: Step,
    device_type: str,
    options: dict[str, Any],
) -> tuple[Callable[[Candidate], Needs], str | None]:
    """What tells the memory of a candidate, and why activations are left out, if they are.

    Args:
        build: makes the model, for the traces.
        shapes: of it.
        states: what its optimizers keep.
        considered: the candidates.
        batch: of a micro-batch.
        step: what the step is made of, but for what a candidate says.
        device_type: where the run computes.
        options: the strategy's.
    """

    def way_of(candidate: Candidate) -> Way:
        return Way(
            ep=candidate.layout.ep,
            cp=candidate.layout.cp,
            dispatcher=candidate.dispatcher,
            activation_checkpointing=candidate.activation_checkpointing,
            computation=options.get("computation", "auto"),
            combine_dtype=step.combine_dtype,
            device_type=device_type,
        )

    ways = list(dict.fromkeys(map(way_of, considered)))
    of_way, told = _traces(build, batch, ways, shapes, options.get("fp32_modules", ()))

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

    return needs_of, told


def _traces(
    build: Callable[[], nn.Module],
    batch: CausalLM,
    ways: Sequence[Way],
    shapes: ModelShapes,
    fp32_modules: Sequence[str],
) -> tuple[Mapping[Way, Trace], str | None]:
    """What each way needs; and why activations are left out of that, if they are."""
    parts = [ways[number::PROCESSES] for number in range(PROCESSES) if ways[number::PROCESSES]]
    try:
        with ThreadPoolExecutor(PROCESSES) as pool:
            run = partial(trace, build, batch, precision=shapes.precision, fp32_modules=fp32_modules)
            results = list(pool.map(run, parts))
    except ApartError as error:
        told = str(error).splitlines()[0]
        return dict.fromkeys(ways, _without_activations(shapes)), (
            f"activations are not in these figures, as a step of this model could not be run without data ({told})"
        )
    return {
        way: of for part, traced in zip(parts, results, strict=True) for way, of in zip(part, traced, strict=True)
    }, None


def _without_activations(shapes: ModelShapes) -> Trace:
    """The moments of a step of which nothing is known but its blocks."""
    blocks = [unit.name for unit in shapes.units if unit.role == "block"]
    forward = [Event(moment, name, 0, 0) for name in blocks for moment in ("before", "after")]
    backward = [Event(moment, name, 0, 0) for name in blocks[::-1] for moment in ("before backward", "after backward")]
    events = (*forward, Event("turn", None, 0, 0), *backward, Event("end", None, 0, 0))
    return Trace(events=events, copies={name: (name,) for name in blocks})
